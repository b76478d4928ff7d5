import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    PrefillFinished,
    PrefillStarted,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    TransferCompleted,
    TransferFailed,
    WorkerExited,
)
from cluster.metrics import ROUTER_DIED, RunMetrics, Slos
from cluster.request_timeline import TTFT_PARTS
from tests.cluster.histories import arrived, finished, handed_off, tokens


def fold(*events: Event, keep: int | None = 1000) -> RunMetrics:
    metrics = RunMetrics(keep=keep)
    for event in events:
        metrics.fold(event)
    return metrics


def router_exited(cause: str) -> WorkerExited:
    return WorkerExited(at=11.0, worker_id="router", role="router", pid=1, cause=cause)


def test_one_handed_off_request_gives_every_number() -> None:
    metrics = fold(*handed_off())

    assert (metrics.arrived, metrics.finished) == (1, 1)
    assert metrics.pools.ttft_ms.percentile(50) == 100.0
    assert metrics.pools.itl_ms.count == 3
    assert metrics.pools.itl_ms.max == pytest.approx(20.0)
    assert metrics.pools.tpot_ms.mean == pytest.approx(40.0 / 3)
    assert metrics.pools.e2el_ms.mean == pytest.approx(140.0)
    assert sum(metrics.ttft_parts_ms.values()) == pytest.approx(100.0)
    assert tuple(metrics.ttft_parts_ms) == TTFT_PARTS
    assert (metrics.kv.tokens, metrics.kv.raw_bytes, metrics.kv.wire_bytes) == (100, 51200, 51200)
    assert metrics.kv.achieved_bytes_per_s == pytest.approx(51200 / 0.01)
    assert metrics.kv.exposed_ms.percentile(99) == pytest.approx(20.0)
    timeline = metrics.timelines["a"]
    assert (timeline.phase, timeline.prefill_worker, timeline.decode_worker) == (
        "finished",
        "prefill-0",
        "decode-0",
    )
    assert (timeline.output_tokens, timeline.kv_wire_bytes, timeline.codec) == (4, 51200, "raw")


def test_gap_between_two_batches_counts() -> None:
    metrics = fold(
        arrived("a", 0.0),
        tokens("a", 0, 1.0, 1.1),
        tokens("a", 2, 1.4),
        finished("a", 1.4, output_tokens=3, e2el_ms=1400.0, tpot_ms=200.0),
    )
    assert list(metrics.timelines["a"].itl_ms) == pytest.approx([100.0, 300.0])


def test_last_batch_logged_after_the_end_still_counts() -> None:
    end = finished("a", 1.4, output_tokens=3, e2el_ms=1400.0, tpot_ms=200.0)
    metrics = fold(arrived("a", 0.0), tokens("a", 0, 1.0, 1.1), end, tokens("a", 2, 1.4))

    assert metrics.pools.itl_ms.count == 2
    assert metrics.pools.itl_ms.max == pytest.approx(300.0)
    assert metrics.pools_by_label["steady"].itl_ms.count == 2
    assert metrics.position_errors == 0


@pytest.mark.parametrize(("first", "errors"), [(2, 0), (1, 1), (3, 1)])
def test_token_twice_or_missing_is_noticed_once(first: int, errors: int) -> None:
    metrics = fold(
        arrived("a", 0.0), tokens("a", 0, 1.0, 1.1), tokens("a", first, 1.2), tokens("a", first + 1, 1.3)
    )
    assert metrics.position_errors == errors


@pytest.mark.parametrize(
    "end",
    [
        RequestFailed(at=10.3, request_id="a", reason="no_worker"),
        RequestCancelled(at=10.3, request_id="a", phase="decode"),
        RequestRejected(at=10.3, request_id="a", reason="queue full", status=429),
    ],
)
def test_only_finished_requests_are_in_percentiles(end: Event) -> None:
    metrics = fold(*handed_off()[:-1], end)

    assert metrics.finished == 0
    assert metrics.failed.total() + metrics.cancelled.total() + metrics.rejected.total() == 1
    for pool in (metrics.pools.ttft_ms, metrics.pools.itl_ms, metrics.pools.tpot_ms, metrics.pools.e2el_ms):
        assert pool.count == 0
        assert pool.percentile(50) is None
    assert metrics.kv.transfers == 1, "bytes that went over the wire were moved all the same"


def test_second_end_of_a_request_changes_nothing() -> None:
    metrics = fold(*handed_off(), RequestFailed(at=11.0, request_id="a", reason="late"))
    assert (metrics.finished, metrics.failed.total()) == (1, 0)
    assert metrics.timelines["a"].phase == "finished"


def test_probes_are_counted_apart_and_nowhere_else() -> None:
    probe = handed_off("p", label="probe")
    early = probe[2:6]  # the workers' events may be logged before the router's arrival
    late = [probe[0], *probe[6:]]
    metrics = fold(*early, *late)

    assert metrics.num_probes == 1
    assert (metrics.arrived, metrics.finished, metrics.kv.transfers) == (0, 0, 0)
    assert metrics.timelines == {}


def test_workers_events_before_the_arrival_wait_for_it() -> None:
    first, dispatched, *rest = handed_off()
    metrics = fold(*rest[:4])
    assert metrics.kv.transfers == 0
    for event in (first, dispatched, *rest[4:]):
        metrics.fold(event)
    straight = fold(*handed_off())
    assert metrics.kv.transfers == straight.kv.transfers == 1
    assert metrics.timelines["a"] == straight.timelines["a"]


def test_events_of_a_request_that_never_arrived_count_nothing() -> None:
    metrics = fold(*handed_off()[1:])
    assert (metrics.arrived, metrics.finished, metrics.kv.transfers) == (0, 0, 0)


def test_reasons_are_counted_by_name_and_requests_once() -> None:
    metrics = fold(
        arrived("a"),
        RequestRetried(at=10.1, request_id="a", attempt=2, reason="prefill_died"),
        RequestRetried(at=10.2, request_id="a", attempt=3, reason="prefill_died"),
        TransferFailed(at=10.3, request_id="a", attempt=3, worker_id="decode-0", reason="checksum"),
        TransferFailed(at=10.3, request_id="a", attempt=3, worker_id="prefill-0", reason="checksum"),
        FellBack(
            at=10.3,
            request_id="a",
            attempt=3,
            worker_id="decode-0",
            reason="transfer_checksum",
            prompt_tokens=5,
        ),
        RequestMigrated(at=10.4, request_id="a", attempt=4, from_worker="decode-0", delivered_tokens=1),
        RequestMigrated(at=10.5, request_id="a", attempt=5, from_worker="decode-1", delivered_tokens=2),
    )
    assert metrics.retries == {"prefill_died": 2}
    assert metrics.fallbacks == {"transfer_checksum": 1}
    assert metrics.transfer_failures == {"checksum": 1}
    assert (metrics.retried, metrics.migrated) == (1, 1)
    timeline = metrics.timelines["a"]
    assert (timeline.retries, timeline.migrations, timeline.fallback) == (2, 2, "transfer_checksum")


def test_rejection_without_an_arrival_counts() -> None:
    metrics = fold(RequestRejected(at=1.0, reason="bad input", status=400))
    assert metrics.rejected == {"bad input": 1}
    assert metrics.arrived == 0


def test_router_death_fails_what_was_open() -> None:
    metrics = fold(*handed_off("a"), arrived("b"), router_exited("crash"), *handed_off("c"))
    assert metrics.failed == {ROUTER_DIED: 1}
    assert (metrics.finished, metrics.in_flight) == (2, [])


def test_stop_cuts_off_what_was_open_without_failing_it() -> None:
    metrics = fold(arrived("b"), router_exited("stop"))
    assert (metrics.cut_off, metrics.failed.total(), metrics.in_flight) == (1, 0, [])
    assert metrics.timelines["b"].phase == "cut_off"


def test_phase_follows_one_attempt_forward_and_starts_over_with_the_next() -> None:
    def dispatched(attempt: int, prefill_worker: str) -> RequestDispatched:
        return RequestDispatched(
            at=1.0,
            request_id="a",
            attempt=attempt,
            mode="disagg",
            codec="raw",
            prefill_worker=prefill_worker,
            decode_worker="decode-0",
            decode_reason="",
        )

    def prefill_finished(attempt: int, worker_id: str) -> PrefillFinished:
        return PrefillFinished(
            at=2.0, request_id="a", attempt=attempt, worker_id=worker_id, prompt_tokens=9, compute_s=1.0
        )

    metrics = RunMetrics()
    phases = []
    for event in (
        arrived("a"),
        dispatched(1, "prefill-0"),
        PrefillStarted(at=1.5, request_id="a", attempt=1, worker_id="prefill-0"),
        dispatched(2, "prefill-1"),
        prefill_finished(1, "prefill-0"),  # late, of the attempt given up
        PrefillStarted(at=1.7, request_id="a", attempt=2, worker_id="prefill-1"),
        prefill_finished(2, "prefill-1"),
        FirstToken(at=3.0, request_id="a", ttft_ms=5.0),
    ):
        metrics.fold(event)
        phases.append(metrics.timelines["a"].phase)
    assert phases == ["queued", "queued", "prefill", "queued", "queued", "prefill", "transfer", "decode"]


def test_labels_have_pools_of_their_own() -> None:
    metrics = fold(*handed_off("a", gaps_s=(0.01,)), *handed_off("b", label="burst", gaps_s=(0.5,)))
    assert metrics.pools_by_label["steady"].itl_ms.max == pytest.approx(10.0)
    assert metrics.pools_by_label["burst"].itl_ms.max == pytest.approx(500.0)
    assert metrics.pools.itl_ms.count == 2


def test_timelines_of_ended_requests_are_dropped_beyond_the_limit_and_numbers_kept() -> None:
    events = [event for number in range(50) for event in handed_off(f"r{number}")]
    few, all_of_them = fold(*events, keep=3), fold(*events, keep=None)

    assert list(few.timelines) == ["r47", "r48", "r49"]
    assert len(all_of_them.timelines) == 50
    for name in ("finished", "output_tokens", "prompt_tokens", "ttft_parts_ms"):
        assert few.__dict__[name] == all_of_them.__dict__[name]
    assert few.pools.itl_ms.percentile(99) == all_of_them.pools.itl_ms.percentile(99)


def test_late_event_of_a_dropped_request_still_counts_its_bytes() -> None:
    *most, end = handed_off("a")
    transfer = next(event for event in most if isinstance(event, TransferCompleted))
    most.remove(transfer)
    metrics = fold(*most, end, *handed_off("b"), transfer, keep=1)
    assert "a" not in metrics.timelines
    assert metrics.kv.transfers == 2


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    metrics = fold(*handed_off("a"), *handed_off("b", gaps_s=(0.2,)), *handed_off("c", gaps_s=()))

    assert metrics.goodput(Slos(), 10.0) == pytest.approx(0.3)
    assert metrics.goodput(Slos(ttft_ms=100.0), 10.0) == pytest.approx(0.3)
    assert metrics.goodput(Slos(ttft_ms=99.9), 10.0) == 0.0
    assert metrics.goodput(Slos(tpot_ms=50.0), 10.0) == pytest.approx(0.2)
    assert metrics.goodput(Slos(tpot_ms=50.0, e2el_ms=120.0), 10.0) == pytest.approx(0.1)
    assert metrics.goodput(Slos(), 0.0) is None
    assert RunMetrics().goodput(Slos(), 10.0) == 0.0


def test_request_without_a_first_token_is_not_good() -> None:
    end = finished("a", 1.0, output_tokens=1, e2el_ms=1.0, tpot_ms=None)
    assert fold(arrived("a"), end).goodput(Slos(ttft_ms=1e9), 1.0) == 0.0


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=30), st.integers(1, 7))
def test_gaps_and_tpot_agree_however_tokens_are_batched(gaps_s: list[float], batch: int) -> None:
    at = [100.0]
    for gap in gaps_s:
        at.append(at[-1] + gap)
    batches = [tokens("a", start, *at[start : start + batch]) for start in range(0, len(at), batch)]
    tpot_ms = (at[-1] - at[0]) * 1000.0 / len(gaps_s)
    end = finished("a", at[-1], output_tokens=len(at), e2el_ms=(at[-1] - 99.0) * 1000.0, tpot_ms=tpot_ms)
    metrics = fold(arrived("a", 99.0), *batches, end)

    assert metrics.pools.itl_ms.count == len(gaps_s)
    assert metrics.pools.itl_ms.mean == pytest.approx(tpot_ms, rel=1e-6, abs=1e-6)
    assert metrics.position_errors == 0
