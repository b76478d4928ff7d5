"""Every number about requests, as one pure fold over events: the same for a live cluster and for a finished log.

Definitions are in docs/metrics.md. Memory is bounded: pools of samples are (see ``samples``), and timelines of ended
requests are kept up to a limit.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.events import (
    Event,
    FellBack,
    HandoffChosen,
    HandoffMeasured,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    RunStopping,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    WorkerExited,
)
from cluster.request_filter import RequestEvent, RequestFilter
from cluster.request_timeline import TTFT_PARTS, RequestTimeline
from cluster.samples import Reservoir, Samples

ROUTER_DIED = "router_died"
"""Reason of the failure of requests that were open when the router exited."""

_SLO_SAMPLES = 50_000


@dataclass(frozen=True)
class Slos:
    """Limits a good request keeps, all of them; None = no limit. As vLLM: TPOT counts as 0 with one token. ITL is a
    limit on every gap."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def are_met_by(self, request: "RequestLatency") -> bool:
        return (
            (self.ttft_ms is None or request.ttft_ms <= self.ttft_ms)
            and (self.itl_ms is None or request.worst_itl_ms <= self.itl_ms)
            and (self.tpot_ms is None or request.tpot_ms <= self.tpot_ms)
            and (self.e2el_ms is None or request.e2el_ms <= self.e2el_ms)
        )


class RequestLatency(NamedTuple):
    """What SLOs are checked against."""

    ttft_ms: float
    tpot_ms: float  # 0 with one token
    e2el_ms: float
    worst_itl_ms: float  # 0 with one token


@dataclass
class LatencyPools:
    """Pools over finished requests; ITL pools every gap."""

    ttft_ms: Samples = field(default_factory=Samples)
    itl_ms: Samples = field(default_factory=Samples)
    tpot_ms: Samples = field(default_factory=Samples)
    e2el_ms: Samples = field(default_factory=Samples)

    def add(self, timeline: RequestTimeline) -> None:
        for pool, value in (
            (self.ttft_ms, timeline.ttft_ms),
            (self.tpot_ms, timeline.tpot_ms),
            (self.e2el_ms, timeline.e2el_ms),
        ):
            if value is not None:
                pool.add(value)
        self.itl_ms.extend(timeline.itl_ms)


@dataclass
class KVTotals:
    """Over completed transfers, whatever became of their requests. Skipped is what decode workers held already."""

    transfers: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    skipped_tokens: int = 0
    skipped_bytes: int = 0
    busy_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    hidden_busy_s: float = 0.0
    unequal_raw: int = 0  # transfers without a codec whose wire bytes were not their raw bytes
    transfer_ms: Samples = field(default_factory=Samples)
    exposed_ms: Samples = field(default_factory=Samples)

    @property
    def achieved_bytes_per_s(self) -> float | None:
        return self.wire_bytes / self.busy_s if self.busy_s > 0 else None

    @property
    def hidden_share(self) -> float | None:
        """How much of the transfer time lay before prefill's end."""
        return 1 - self.exposed_s / self.transfer_s if self.transfer_s > 0 else None

    @property
    def hidden_busy_share(self) -> float | None:
        """How much of the time in which the link was busy lay before prefill's end."""
        return self.hidden_busy_s / self.busy_s if self.busy_s > 0 else None

    def add(self, event: TransferCompleted) -> None:
        self.transfers += 1
        self.tokens += event.tokens
        self.raw_bytes += event.raw_bytes
        self.wire_bytes += event.wire_bytes
        self.skipped_tokens += event.skipped_tokens
        self.skipped_bytes += event.skipped_bytes
        self.busy_s += event.busy_s
        self.transfer_s += event.duration_s
        self.exposed_s += event.exposed_s
        self.hidden_busy_s += event.hidden_busy_s
        self.transfer_ms.add(event.duration_s * 1000.0)
        self.exposed_ms.add(event.exposed_s * 1000.0)
        if event.codec == "raw" and event.wire_bytes != event.raw_bytes:
            self.unequal_raw += 1


@dataclass
class HandoffTotals:
    """Over attempts that ``handoff = "auto"`` weighed. An error is the time from dispatch to first token less its
    forecast."""

    choices: Counter[str] = field(default_factory=Counter)  # remote, local
    unweighed: int = 0  # of these, for want of measurements
    error_ms: Samples = field(default_factory=Samples)  # absolute
    signed_error_ms: float = 0.0  # sum, as the next one
    actual_ms: float = 0.0

    @property
    def error_share(self) -> float | None:
        """The absolute errors' sum over the sum of what it took."""
        error_ms = self.error_ms
        return (error_ms.mean or 0.0) * error_ms.count / self.actual_ms if self.actual_ms > 0 else None

    @property
    def bias_ms(self) -> float | None:
        """Mean of the signed errors."""
        return self.signed_error_ms / self.error_ms.count if self.error_ms.count else None

    def chosen(self, event: HandoffChosen) -> None:
        self.choices[event.choice] += 1
        self.unweighed += not event.remote_ms and not event.local_ms

    def measured(self, event: HandoffMeasured) -> None:
        error_ms = event.actual_ms - event.forecast_ms
        self.error_ms.add(abs(error_ms))
        self.signed_error_ms += error_ms
        self.actual_ms += event.actual_ms


class RunMetrics:
    """Fold of a run's events. ``keep``: how many ended requests' timelines to hold, None = all.

    ``pools`` and ``pools_by_label`` (steady, burst, client) hold finished requests only. Requests labelled probe are in
    ``num_probes`` and nowhere else.
    """

    def __init__(self, keep: int | None = 1000) -> None:
        self.timelines: dict[str, RequestTimeline] = {}  # in flight and kept, by arrival
        self.arrived = 0
        self.finished = 0
        self.failed: Counter[str] = Counter()  # by reason, as the next ones
        self.rejected: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()  # by phase
        self._is_stopping = False
        self.cut_off = 0  # in flight when the cluster was stopped
        self.fallbacks: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.transfer_failures: Counter[str] = Counter()
        self.retried = 0  # requests with one or more retries
        self.migrated = 0
        self.prompt_tokens = 0  # of finished requests, as the next one
        self.output_tokens = 0
        self.position_errors = 0
        self.pools = LatencyPools()
        self.pools_by_label: dict[str, LatencyPools] = {}
        self.ttft_parts_ms = dict.fromkeys(TTFT_PARTS, 0.0)  # sums over finished requests
        self.kv = KVTotals()
        self.handoff = HandoffTotals()
        self._keep = keep
        self._filter = RequestFilter()
        self._running: dict[str, RequestTimeline] = {}
        self._ended: deque[str] = deque()
        self._latencies: list[RequestLatency] = []
        self._latency_places = Reservoir(_SLO_SAMPLES)

    @property
    def num_probes(self) -> int:
        return self._filter.num_probes

    @property
    def in_flight(self) -> list[RequestTimeline]:
        """Requests that have arrived and not ended, oldest first."""
        return list(self._running.values())

    def fold(self, event: Event) -> list[RequestEvent]:
        """Take in the next event of the log. Returns what of it counted: nothing of a probe, and with a request's
        arrival also the events that were logged before it."""
        if isinstance(event, RequestEvent):
            counted = self._filter.pass_on(event)
            for each in counted:
                self._count(each)
            return counted
        if isinstance(event, RunStopping):
            self._is_stopping = True
        elif isinstance(event, WorkerExited) and event.role == "router":
            self._close_open(event)
        return []

    def goodput(self, slos: Slos, duration_s: float) -> float | None:
        """Finished requests that met all of ``slos``, per second; None for a duration of 0.

        Exact up to 50,000 finished requests, then estimated from a uniform sample of as many.
        """
        if duration_s <= 0:
            return None
        if not self._latencies:
            return 0.0
        good = sum(slos.are_met_by(latency) for latency in self._latencies)
        return good / len(self._latencies) * self.finished / duration_s

    def _count(self, event: RequestEvent) -> None:
        if isinstance(event, RequestArrived):
            self.arrived += 1
            self.timelines[event.request_id] = self._running[event.request_id] = RequestTimeline.begin(event)
            return
        self._count_facts(event)
        timeline = self.timelines.get(event.request_id)
        if timeline is None:
            return  # its timeline was dropped, or it was rejected before it arrived
        had_ended = timeline.has_ended
        if isinstance(event, TokensDelivered):
            self._count_tokens(event, timeline)
        else:
            timeline.apply(event)
        if isinstance(event, RequestRetried) and timeline.retries == 1:
            self.retried += 1
        elif isinstance(event, RequestMigrated) and timeline.migrations == 1:
            self.migrated += 1
        if timeline.has_ended and not had_ended:
            self._end(timeline, event)

    def _count_facts(self, event: RequestEvent) -> None:
        """What counts whether or not the request's timeline is still held."""
        match event:
            case TransferCompleted():
                self.kv.add(event)
            case HandoffChosen():
                self.handoff.chosen(event)
            case HandoffMeasured():
                self.handoff.measured(event)
            case TransferFailed():
                timeline = self.timelines.get(event.request_id)
                if timeline is None or event.attempt != timeline.failed_transfer_attempt:
                    self.transfer_failures[event.reason] += 1  # both ends tell: the first one counts
            case FellBack():
                self.fallbacks[event.reason] += 1
            case RequestRetried():
                self.retries[event.reason] += 1
            case RequestRejected() if event.request_id not in self.timelines:
                self.rejected[event.reason] += 1

    def _count_tokens(self, event: TokensDelivered, timeline: RequestTimeline) -> None:
        first_gap, errors = len(timeline.itl_ms), timeline.position_errors
        timeline.apply(event)
        self.position_errors += timeline.position_errors - errors
        if timeline.phase == "finished":  # the last batch may be logged after the end
            self._add_gaps(timeline, first_gap)

    def _add_gaps(self, timeline: RequestTimeline, first: int) -> None:
        gaps = timeline.itl_ms[first:]
        self.pools.itl_ms.extend(gaps)
        self.pools_by_label[timeline.label].itl_ms.extend(gaps)

    def _end(self, timeline: RequestTimeline, event: RequestEvent) -> None:
        match event:
            case RequestFinished():
                self._finish(timeline, event)
            case RequestFailed():
                self.failed[event.reason] += 1
            case RequestRejected():
                self.rejected[event.reason] += 1
            case RequestCancelled() if self._is_stopping:  # our own clients were told to stop
                self.cut_off += 1
            case RequestCancelled():
                self.cancelled[event.phase] += 1
        self._drop_later(timeline)

    def _finish(self, timeline: RequestTimeline, event: RequestFinished) -> None:
        self.finished += 1
        self.prompt_tokens += timeline.prompt_tokens
        self.output_tokens += event.output_tokens
        self.pools.add(timeline)
        if timeline.label not in self.pools_by_label:
            self.pools_by_label[timeline.label] = LatencyPools()
        self.pools_by_label[timeline.label].add(timeline)
        for part, value in timeline.ttft_parts_ms.items():
            self.ttft_parts_ms[part] += value
        ttft_ms = math.inf if timeline.ttft_ms is None else timeline.ttft_ms
        worst_itl_ms = max(timeline.itl_ms, default=0.0)
        latency = RequestLatency(ttft_ms, timeline.tpot_ms or 0.0, event.e2el_ms, worst_itl_ms)
        place = self._latency_places.place()
        if place == len(self._latencies):
            self._latencies.append(latency)
        elif place is not None:
            self._latencies[place] = latency

    def _close_open(self, event: WorkerExited) -> None:
        """The router is gone, and with it every client's stream."""
        for timeline in self.in_flight:
            if event.cause == "stop":
                timeline.end("cut_off", event.at)
                self.cut_off += 1
            else:
                timeline.end("failed", event.at, ROUTER_DIED)
                self.failed[ROUTER_DIED] += 1
            self._drop_later(timeline)

    def _drop_later(self, timeline: RequestTimeline) -> None:
        del self._running[timeline.request_id]
        self._ended.append(timeline.request_id)
        while self._keep is not None and len(self._ended) > self._keep:
            del self.timelines[self._ended.popleft()]
