import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.events import (
    Event,
    FellBack,
    RequestCancelled,
    RequestFailed,
    RequestRejected,
    RequestRetried,
    RouterStats,
    TransferFailed,
    WorkerExited,
    WorkerStarting,
)
from cluster.metrics import RunMetrics
from cluster.prometheus import PrometheusFold
from tests.cluster.histories import arrived, finished, handed_off, run_started, tokens, worker_stats

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(*events: Event) -> dict[Sample, float]:
    """Every sample of a scrape after these events, by name (without the prefix) and labels."""
    fold = PrometheusFold()
    for event in events:
        fold.fold(event)
    text = fold.render().decode()
    return {
        (sample.name.removeprefix("pdconsole:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def plain(name: str, **labels: str) -> Sample:
    return name, tuple(sorted(labels.items()))


def test_every_name_has_the_prefix_and_vllms_suffix_where_there_is_one() -> None:
    fold = PrometheusFold()
    names = set(re.findall(r"^# TYPE (\S+)", fold.render().decode(), re.MULTILINE))
    assert all(name.startswith("pdconsole:") for name in names)
    for suffix in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_time_per_output_token_seconds", "num_requests_running", "num_requests_waiting",
        "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
        "kv_transfer_seconds", "kv_transfer_exposed_seconds", "kv_transfer_bytes_total",
        "kv_transfer_rate_bytes_per_second", "fallbacks_total", "requests_total", "retries_total",
        "transfer_failures_total", "num_preemptions_total",
    ):  # fmt: skip
        assert f"pdconsole:{suffix}" in names, suffix


def test_buckets_span_the_links_and_latencies_of_interest() -> None:
    text = PrometheusFold().render().decode()

    def edges(name: str) -> list[float]:
        found = re.findall(rf'^pdconsole:{name}_bucket{{le="([^"]+)"}}', text, re.MULTILINE)
        return [float(edge) for edge in found if edge != "+Inf"]

    seconds, rates = edges("inter_token_latency_seconds"), edges("kv_transfer_rate_bytes_per_second")
    assert (seconds[0], seconds[-1]) == (0.001, 120.0)
    assert (rates[0], rates[-1]) == (1e6, 1e10)


def test_what_was_skipped_is_counted_apart_from_what_moved() -> None:
    found = scrape(*run_started(), *handed_off("a"), *handed_off("b", skipped_tokens=64))
    assert found[plain("kv_transfer_tokens_total")] == 100 + 36
    assert found[plain("kv_transfer_raw_bytes_total")] == 136 * 512
    assert found[plain("kv_transfer_skipped_tokens_total")] == 64
    assert found[plain("kv_transfer_skipped_bytes_total")] == 64 * 512


def test_one_request_is_in_every_histogram() -> None:
    found = scrape(*run_started(), *handed_off())
    assert found[plain("time_to_first_token_seconds_sum")] == pytest.approx(0.1)
    assert found[plain("inter_token_latency_seconds_count")] == 3
    assert found[plain("inter_token_latency_seconds_sum")] == pytest.approx(0.04)
    assert found[plain("e2e_request_latency_seconds_sum")] == pytest.approx(0.14)
    assert found[plain("request_decode_time_seconds_sum")] == pytest.approx(0.04)
    assert found[plain("request_queue_time_seconds_sum")] == pytest.approx(0.01)
    assert found[plain("request_prefill_time_seconds_sum")] == pytest.approx(0.05)
    assert found[plain("kv_transfer_seconds_count")] == 1
    assert found[plain("kv_transfer_bytes_total")] == 51200
    assert found[plain("kv_transfer_rate_bytes_per_second_bucket", le="10000000.0")] == 1
    assert found[plain("kv_transfer_rate_bytes_per_second_bucket", le="5000000.0")] == 0
    assert found[plain("requests_total", outcome="finished")] == 1
    assert found[plain("generation_tokens_total")] == 4


def test_last_batch_after_the_end_is_observed_once() -> None:
    end = finished("a", 1.4, output_tokens=3, e2el_ms=1400.0, tpot_ms=200.0)
    found = scrape(arrived("a", 0.0), tokens("a", 0, 1.0, 1.1), end, tokens("a", 2, 1.4))
    assert found[plain("inter_token_latency_seconds_count")] == 2
    assert found[plain("inter_token_latency_seconds_sum")] == pytest.approx(0.4)


def test_failed_requests_are_counted_and_not_timed() -> None:
    found = scrape(
        *handed_off("a")[:-1],
        RequestFailed(at=11.0, request_id="a", reason="no_worker"),
        arrived("b"),
        RequestCancelled(at=11.0, request_id="b", phase="queued"),
        RequestRejected(at=11.0, reason="queue full", status=429),
    )
    assert found[plain("time_to_first_token_seconds_count")] == 0
    assert found[plain("inter_token_latency_seconds_count")] == 0
    for outcome, count in (("finished", 0), ("failed", 1), ("cancelled", 1), ("rejected", 1)):
        assert found[plain("requests_total", outcome=outcome)] == count


def test_router_death_is_in_the_failures() -> None:
    exited = WorkerExited(at=11.0, worker_id="router", role="router", pid=1)
    found = scrape(*run_started(), arrived("a"), exited)
    assert found[plain("requests_total", outcome="failed")] == 1
    assert found[plain("process_up", worker="router")] == 0
    assert found[plain("process_up", worker="decode-0")] == 1


def test_reasons_are_labels() -> None:
    found = scrape(
        arrived("a"),
        RequestRetried(at=1.0, request_id="a", attempt=2, reason="prefill_died"),
        TransferFailed(at=1.0, request_id="a", attempt=2, worker_id="decode-0", reason="checksum"),
        FellBack(
            at=1.0,
            request_id="a",
            attempt=2,
            worker_id="decode-0",
            reason="transfer_checksum",
            prompt_tokens=1,
        ),
    )
    assert found[plain("retries_total", reason="prefill_died")] == 1
    assert found[plain("transfer_failures_total", reason="checksum")] == 1
    assert found[plain("fallbacks_total", reason="transfer_checksum")] == 1


def test_gauges_follow_the_last_sample_and_end_with_the_worker() -> None:
    sample = worker_stats(3.0, running=4, waiting=2, reserved=1, held_blocks=25)
    router = RouterStats(at=3.0, in_flight=5, queued=2, rss_bytes=1000)
    found = scrape(*run_started(), worker_stats(2.0, running=9), sample, router)
    assert found[plain("num_requests_running", worker="decode-0")] == 4
    assert found[plain("num_requests_waiting", worker="decode-0")] == 2
    assert found[plain("num_requests_waiting_for_kv", worker="decode-0")] == 1
    assert found[plain("kv_cache_usage_perc", worker="decode-0")] == 0.25
    assert found[plain("router_requests_queued")] == 2
    assert found[plain("link_achieved_bits_per_second")] == 9.4e9

    gone = WorkerExited(at=4.0, worker_id="decode-0", role="decode", pid=12, signal=9)
    after = scrape(*run_started(), sample, gone)
    assert plain("num_requests_running", worker="decode-0") not in after
    assert after[plain("process_up", worker="decode-0")] == 0


def test_preemptions_are_counted_over_all_lives_of_a_worker() -> None:
    log = [
        *run_started(),
        worker_stats(3.0, preemptions=2),
        worker_stats(4.0, preemptions=5),
        WorkerExited(at=5.0, worker_id="decode-0", role="decode", pid=12, signal=9),
        WorkerStarting(at=5.1, worker_id="decode-0", role="decode", pid=13, restarts=1),
        worker_stats(6.0, preemptions=0),
        worker_stats(7.0, preemptions=1),
    ]
    counts = [scrape(*log[:end])[plain("num_preemptions_total", worker="decode-0")] for end in range(-4, 0)]
    assert [*counts, scrape(*log)[plain("num_preemptions_total", worker="decode-0")]] == [5, 5, 5, 5, 6]
    assert scrape(*log)[plain("num_preemptions_total", worker="prefill-0")] == 0


def test_probes_are_left_out() -> None:
    found = scrape(*handed_off("p", label="probe"))
    assert found[plain("time_to_first_token_seconds_count")] == 0
    assert found[plain("kv_transfers_total")] == 0


def test_two_folds_in_one_process_do_not_meet() -> None:
    one, other = PrometheusFold(), PrometheusFold()
    for event in handed_off():
        one.fold(event)
    assert b'pdconsole:requests_total{outcome="finished"} 1.0' in one.render()
    assert b'pdconsole:requests_total{outcome="finished"} 0.0' in other.render()


def test_histogram_counts_agree_with_the_pools() -> None:
    events = [event for number in range(20) for event in handed_off(f"r{number}", gaps_s=(0.01,) * number)]
    metrics = RunMetrics()
    for event in events:
        metrics.fold(event)
    assert scrape(*events)[plain("inter_token_latency_seconds_count")] == metrics.pools.itl_ms.count == 190
