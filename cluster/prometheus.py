"""A run's events as Prometheus metrics, named as vLLM names them under ``pdconsole:`` where vLLM has the metric.

Histograms hold finished requests only, as every latency percentile of this project does; totals and gauges are read
from the folds when a scrape asks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.events import (
    Event,
    HandoffMeasured,
    RequestFinished,
    RouterStats,
    TokensDelivered,
    TransferCompleted,
    WorkerExited,
    WorkerStarting,
    WorkerStats,
)
from cluster.metrics import RunMetrics
from cluster.request_filter import RequestEvent
from cluster.request_timeline import RequestTimeline
from cluster.run_facts import ROUTER_ROLE, RunFacts

PREFIX: Final = "pdconsole:"

SECONDS_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
RATE_BUCKETS: Final = (1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10)


class PrometheusFold:
    """Fold events in, ``render`` what a scrape gets. Owns its registry: two in one process do not meet."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = RunMetrics()
        self._totals = _Totals(self._metrics)
        self._ttft = _Histogram("time_to_first_token_seconds", "Request read to first token written")
        self._itl = _Histogram("inter_token_latency_seconds", "Gap between consecutive tokens of a request")
        self._tpot = _Histogram("request_time_per_output_token_seconds", "Mean gap of a request")
        self._e2el = _Histogram("e2e_request_latency_seconds", "Request read to last token written")
        self._decode = _Histogram("request_decode_time_seconds", "First token written to last token written")
        self._queue = _Histogram("request_queue_time_seconds", "Part of the time to first token: queue")
        self._prefill = _Histogram("request_prefill_time_seconds", "Part of the time to first token: prefill")
        self._transfer = _Histogram("kv_transfer_seconds", "First KV frame sent to transfer acknowledged")
        self._exposed = _Histogram("kv_transfer_exposed_seconds", "Part of the transfer after prefill's end")
        self._rate = _Histogram(
            "kv_transfer_rate_bytes_per_second",
            "Payload bytes over the time the socket was busy",
            RATE_BUCKETS,
        )
        self._forecast_error = _Histogram(
            "handoff_forecast_error_seconds",
            "Time from dispatch to first token against its forecast, absolute, where the handoff was weighed",
        )
        collectors: tuple[Collector, ...] = (
            self._ttft, self._itl, self._tpot, self._e2el, self._decode, self._queue, self._prefill,
            self._transfer, self._exposed, self._rate, self._forecast_error, self._totals,
        )  # fmt: skip
        for collector in collectors:
            self._registry.register(collector)

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._totals.fold(event)
        for counted in self._metrics.fold(event):
            self._observe(counted)

    def render(self) -> bytes:
        """The text exposition format (``content_type`` goes with it)."""
        return generate_latest(self._registry)

    def _observe(self, event: RequestEvent) -> None:
        if isinstance(event, TransferCompleted):
            self._transfer.observe(event.duration_s)
            self._exposed.observe(event.exposed_s)
            if event.busy_s > 0:
                self._rate.observe(event.wire_bytes / event.busy_s)
            return
        if isinstance(event, HandoffMeasured):
            self._forecast_error.observe(abs(event.actual_ms - event.forecast_ms) / 1000.0)
            return
        timeline = self._metrics.timelines.get(event.request_id)
        if timeline is None or timeline.phase != "finished":
            return
        if isinstance(event, TokensDelivered):  # the last batch, logged after the end
            self._observe_gaps(timeline.itl_ms[-len(event.token_at) :] if event.token_at else ())
        elif isinstance(event, RequestFinished) and event.at == timeline.ended_at:
            self._observe_finished(timeline, event)

    def _observe_finished(self, timeline: RequestTimeline, event: RequestFinished) -> None:
        self._observe_gaps(timeline.itl_ms)
        self._e2el.observe(event.e2el_ms / 1000.0)
        if timeline.ttft_ms is not None:
            self._ttft.observe(timeline.ttft_ms / 1000.0)
            self._decode.observe((event.e2el_ms - timeline.ttft_ms) / 1000.0)
            self._queue.observe(timeline.ttft_parts_ms["queue"] / 1000.0)
            self._prefill.observe(timeline.ttft_parts_ms["prefill"] / 1000.0)
        if event.tpot_ms is not None:
            self._tpot.observe(event.tpot_ms / 1000.0)

    def _observe_gaps(self, gaps_ms: Sequence[float]) -> None:
        self._itl.observe(*(gap_ms / 1000.0 for gap_ms in gaps_ms))


class _Histogram(Collector):
    """Counts per bucket. The client's own histogram takes a lock for every value, and ITL has one for every token."""

    def __init__(self, name: str, documentation: str, edges: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self._name = PREFIX + name
        self._documentation = documentation
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        for value in values:
            self._counts[bisect_left(self._edges, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        names = (*map(repr, self._edges), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class _Totals(Collector):
    """Counters and gauges, read from the folds at every scrape."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics
        self._facts = RunFacts()
        self._stats: dict[str, WorkerStats] = {}
        self._router = RouterStats(at=0.0)
        self._up: set[str] = set()

    def fold(self, event: Event) -> None:
        self._facts.fold(event)
        match event:
            case WorkerStats():
                self._stats[event.worker_id] = event
            case RouterStats():
                self._router = event
            case WorkerStarting():
                self._up.add(event.worker_id)
            case WorkerExited():
                self._up.discard(event.worker_id)
                self._stats.pop(event.worker_id, None)

    def collect(self) -> Iterator[Metric]:
        metrics, kv = self._metrics, self._metrics.kv
        outcomes = {
            "finished": metrics.finished,
            "failed": metrics.failed.total(),
            "rejected": metrics.rejected.total(),
            "cancelled": metrics.cancelled.total(),
        }
        yield _counter("requests", "Requests by how they ended", outcomes, "outcome")
        yield _counter("fallbacks", "Prompts prefilled by their decode worker", metrics.fallbacks, "reason")
        yield _counter("retries", "Further attempts on another prefill worker", metrics.retries, "reason")
        yield _counter("transfer_failures", "KV transfers that failed", metrics.transfer_failures, "reason")
        yield _counter("migrations", "Requests that moved to another decode worker", {"": metrics.migrated})
        yield _counter("prompt_tokens", "Prompt tokens of finished requests", {"": metrics.prompt_tokens})
        yield _counter("generation_tokens", "Output tokens of finished requests", {"": metrics.output_tokens})
        yield _counter(
            "handoffs_weighed", "Attempts by where auto had them computed", metrics.handoff.choices, "choice"
        )
        yield _counter("kv_transfers", "KV transfers acknowledged", {"": kv.transfers})
        yield _counter("kv_transfer_bytes", "KV payload bytes on the wire", {"": kv.wire_bytes})
        yield _counter("kv_transfer_raw_bytes", "The same before a codec", {"": kv.raw_bytes})
        yield _counter("kv_transfer_tokens", "Tokens whose KV was moved", {"": kv.tokens})
        yield _counter(
            "kv_transfer_skipped_tokens", "Tokens whose KV the decode worker held", {"": kv.skipped_tokens}
        )
        yield _counter("kv_transfer_skipped_bytes", "Raw bytes of these", {"": kv.skipped_bytes})
        yield _gauge("router_requests_in_flight", "Requests the router holds", {"": self._router.in_flight})
        yield _gauge("router_requests_queued", "Of these, waiting for a worker", {"": self._router.queued})
        yield from self._workers()
        yield from self._link()

    def _workers(self) -> Iterator[Metric]:
        stats = self._stats
        facts = self._facts.processes
        restarts = {process_id: process.restarts for process_id, process in facts.items()}
        preemptions = {worker.process_id: worker.preemptions for worker in self._facts.workers}
        up = {process_id: float(process_id in self._up) for process_id in facts}
        usage = {
            worker_id: sample.held_blocks / sample.total_blocks
            for worker_id, sample in stats.items()
            if sample.total_blocks
        }
        running = {worker_id: sample.running for worker_id, sample in stats.items()}
        waiting = {worker_id: sample.waiting for worker_id, sample in stats.items()}
        waiting_for_kv = {worker_id: sample.reserved for worker_id, sample in stats.items()}
        held = {worker_id: sample.held_blocks for worker_id, sample in stats.items()}
        stranded = {worker_id: sample.stranded_blocks for worker_id, sample in stats.items()}
        memory = {worker_id: sample.rss_bytes for worker_id, sample in stats.items()}
        memory[ROUTER_ROLE] = self._router.rss_bytes
        yield _gauge("num_requests_running", "Sequences in a worker's running set", running, "worker")
        yield _gauge("num_requests_waiting", "Sequences waiting in a worker", waiting, "worker")
        yield _gauge(
            "num_requests_waiting_for_kv", "Sequences with blocks, without KV", waiting_for_kv, "worker"
        )
        yield _gauge("kv_cache_usage_perc", "Held over all KV blocks, 0 to 1", usage, "worker")
        yield _gauge("kv_blocks_held", "KV blocks held by sequences", held, "worker")
        yield _gauge("kv_blocks_stranded", "KV blocks that nobody would free; 0", stranded, "worker")
        yield _gauge("process_resident_memory_bytes", "Resident memory", memory, "worker")
        yield _gauge("process_up", "1 while the process lives", up, "worker")
        yield _counter(
            "num_preemptions",
            "Sequences that lost their KV blocks and were computed again",
            preemptions,
            "worker",
        )
        yield _counter("process_restarts", "Times the process was started again", restarts, "worker")

    def _link(self) -> Iterator[Metric]:
        achieved = self._facts.achieved_bits_per_s
        yield _gauge("link_asked_bits_per_second", "0 = unlimited", {"": self._facts.asked_bits_per_s})
        if achieved is not None:
            yield _gauge("link_achieved_bits_per_second", "As last probed", {"": achieved})
        b_star, rho, tuned = self._facts.b_star_bytes_per_s, self._facts.rho, self._facts.tuned
        if b_star is not None:
            yield _gauge(
                "b_star_bytes_per_second",
                "The link on which KV moves as fast as it is computed",
                {"": b_star},
            )
        if rho is not None:
            yield _gauge("rho", "Link rate over B*", {"": rho})
        if tuned is not None:
            yield _gauge("target_rho", "The rho that the link was to be given", {"": tuned.target_rho})


def _counter(
    name: str, documentation: str, values: dict[str, int] | dict[str, float], label: str = ""
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label] if label else [])
    for value_of, value in values.items():
        family.add_metric([value_of] if label else [], value)
    return family


def _gauge(
    name: str, documentation: str, values: dict[str, int] | dict[str, float], label: str = ""
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=[label] if label else [])
    for value_of, value in values.items():
        family.add_metric([value_of] if label else [], value)
    return family
