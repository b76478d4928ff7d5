import json
from pathlib import Path

import msgspec
import pytest

from cluster.events import (
    CodecChanged,
    Event,
    FellBack,
    LinkConfigured,
    LinkProbed,
    LinkTuned,
    ModeChanged,
    RequestFailed,
    RouterStats,
    TransferCompleted,
    WorkerExited,
    WorkerStarting,
    encode_event,
)
from cluster.run_log import EVENTS_FILE, RunLogError, write_events
from cluster.summary import summarize, write_summary
from tests.cluster.histories import (
    BYTES_PER_TOKEN,
    arrived,
    handed_off,
    run_started,
    run_stopped,
    worker_stats,
)

RELIED_ON: dict[str, type | list[str]] = {
    "schema": int, "run": str, "profile": str, "model": str, "mode": str, "duration_s": float,
    "requests": ["finished", "failed", "rejected", "cancelled", "retried", "migrated", "fallbacks"],
    "ttft_ms": ["p50", "p90", "p99", "max"],
    "itl_ms": ["p50", "p90", "p99", "max"],
    "tpot_ms": ["p50", "p90", "p99", "max"],
    "e2el_ms": ["p50", "p90", "p99", "max"],
    "ttft_parts_ms": ["queue", "prefill", "transfer_exposed", "admit_wait", "first_decode", "router", "residual"],
    "kv": [
        "transfers", "tokens", "raw_bytes", "wire_bytes", "skipped_tokens", "skipped_bytes", "exposed_ms",
        "achieved_bytes_per_s",
    ],
    "link": ["backend", "asked_bits_per_s", "achieved_bits_per_s", "asked_delay_ms"],
    "b_star_bytes_per_s": float, "rho": float,
    "workers": list,
}  # fmt: skip
"""What scripts read: names must not change."""


def whole_run(*middle: Event) -> list[Event]:
    return [*run_started(), *middle, *run_stopped(22.0)]


def test_summary_has_the_fields_that_scripts_rely_on() -> None:
    summary = summarize(whole_run(*handed_off()))
    for name, expected in RELIED_ON.items():
        if isinstance(expected, list):
            assert set(expected) <= set(summary[name]), name
        else:
            assert isinstance(summary[name], expected), name
    assert {"id", "role", "pid", "restarts", "held_blocks", "peak_rss_bytes"} <= set(summary["workers"][0])
    assert set(summary["kv"]["exposed_ms"]) == {"p50", "p99"}


def test_summary_of_one_run() -> None:
    summary = summarize(whole_run(*handed_off("a"), *handed_off("b", label="burst", prompt_tokens=300)))

    assert summary["run"] == "r1"
    assert summary["duration_s"] == 20.0, "from ready to stopping"
    assert summary["requests"]["finished"] == 2
    assert summary["requests"]["fallbacks"] == {}
    assert summary["ttft_ms"]["p50"] == 100.0
    assert sum(summary["ttft_parts_ms"].values()) == pytest.approx(summary["ttft_ms"]["mean"])
    assert set(summary["itl_ms_by_label"]) == {"steady", "burst"}
    assert summary["kv"]["tokens"] == 400
    assert summary["kv"]["raw_bytes"] == 400 * BYTES_PER_TOKEN
    assert summary["kv"]["formula_ok"] is True
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(8 / 20)
    assert [worker["id"] for worker in summary["workers"]] == ["prefill-0", "decode-0"]
    assert [worker["held_blocks"] for worker in summary["workers"]] == [0, 0]
    assert summary["router"]["id"] == "router"
    assert summary["orphans"] == 0
    json.dumps(summary, allow_nan=False)


def test_rho_is_achieved_link_over_what_breaks_even() -> None:
    summary = summarize(whole_run(*handed_off()))  # 100 tokens in 50 ms
    assert summary["prefill_tokens_per_s"] == pytest.approx(2000.0)
    assert summary["b_star_bytes_per_s"] == pytest.approx(2000.0 * BYTES_PER_TOKEN)
    assert summary["rho"] == pytest.approx(9.4e9 / 8 / (2000.0 * BYTES_PER_TOKEN))


def test_rho_takes_the_asked_rate_where_no_probe_was_made_since_the_link_changed() -> None:
    change = LinkConfigured(at=5.0, backend="pacing", asked_bits_per_s=1e9)
    summary = summarize(whole_run(change, *handed_off()))
    assert summary["link"]["achieved_bits_per_s"] is None
    assert summary["rho"] == pytest.approx(1e9 / 8 / (2000.0 * BYTES_PER_TOKEN))


def test_link_described_anew_keeps_its_probes() -> None:
    same = LinkConfigured(
        at=5.0, backend="pacing", asked_bits_per_s=1e10, asked_delay_ms=0.05, limit="reached 9.4"
    )
    link = summarize(whole_run(same))["link"]
    assert (link["achieved_bits_per_s"], link["limit"]) == (9.4e9, "reached 9.4")


def test_rho_of_an_unlimited_unprobed_link_is_unknown() -> None:
    change = LinkConfigured(at=5.0, backend="none", asked_bits_per_s=0.0)
    assert summarize(whole_run(change, *handed_off()))["rho"] is None


def test_achieved_link_is_the_median_of_the_pairs_last_probes() -> None:
    probes = [
        LinkProbed(
            at=5.0, from_worker="prefill-0", to_worker=f"decode-{n}", achieved_bits_per_s=rate, rtt_ms=0.1
        )
        for n, rate in ((0, 1e9), (0, 9e9), (1, 8e9), (2, 2e9))
    ]
    assert summarize(whole_run(*probes))["link"]["achieved_bits_per_s"] == 8e9


def test_prefill_rate_comes_from_the_workers_samples_weighted_by_tokens() -> None:
    samples = [
        worker_stats(3.0, "prefill-0", "prefill", prefill_tokens=1000, prefill_tokens_per_s=1000.0),
        worker_stats(
            4.0, "prefill-0", "prefill", prefill_tokens=1000, prefill_tokens_per_s=1.0
        ),  # nothing new
        worker_stats(5.0, "prefill-0", "prefill", prefill_tokens=4000, prefill_tokens_per_s=3000.0),
    ]
    assert summarize(whole_run(*samples, *handed_off()))["prefill_tokens_per_s"] == pytest.approx(4000 / 2)


def test_held_blocks_are_the_last_sample_of_the_living_process() -> None:
    crash = WorkerExited(at=6.0, worker_id="decode-0", role="decode", pid=12, signal=9)
    again = WorkerStarting(at=6.5, worker_id="decode-0", role="decode", pid=13, restarts=1)
    log = [*run_started(), worker_stats(5.0, held_blocks=7, rss_bytes=900)]

    def decode(events: list[Event]) -> dict[str, object]:
        return next(worker for worker in summarize(events)["workers"] if worker["id"] == "decode-0")

    assert decode(run_started())["held_blocks"] is None
    assert decode(log)["held_blocks"] == 7
    assert decode([*log, crash])["held_blocks"] is None
    restarted = decode([*log, crash, again, worker_stats(7.0, held_blocks=2, rss_bytes=300)])
    assert restarted["held_blocks"] == 2
    assert (restarted["restarts"], restarted["pid"], restarted["exits"]) == (1, 13, 1)
    assert restarted["peak_rss_bytes"] == 900, "the peak is of all its lives"


def test_preemptions_are_of_each_worker_over_all_its_lives() -> None:
    log = [
        *run_started(),
        worker_stats(5.0, preemptions=4),
        WorkerExited(at=6.0, worker_id="decode-0", role="decode", pid=12, signal=9),
        WorkerStarting(at=6.5, worker_id="decode-0", role="decode", pid=13, restarts=1),
        worker_stats(7.0, preemptions=3),
    ]
    workers = {worker["id"]: worker["preemptions"] for worker in summarize(log)["workers"]}
    assert workers == {"prefill-0": 0, "decode-0": 7}


def test_worker_stopped_with_the_run_keeps_its_last_sample() -> None:
    stop = WorkerExited(at=23.0, worker_id="decode-0", role="decode", pid=12, cause="stop")
    decode = summarize([*whole_run(), stop])["workers"][1]
    assert (decode["held_blocks"], decode["exits"]) == (0, 0)


@pytest.mark.parametrize(
    ("raw_bytes", "wire_bytes", "codec", "ok"),
    [
        (100 * BYTES_PER_TOKEN, 100 * BYTES_PER_TOKEN, "raw", True),
        (100 * BYTES_PER_TOKEN, 100 * BYTES_PER_TOKEN // 4, "int8", True),
        (112 * BYTES_PER_TOKEN, 112 * BYTES_PER_TOKEN, "raw", False),  # the last block was padded
        (100 * BYTES_PER_TOKEN, 100 * BYTES_PER_TOKEN + 4, "raw", False),
    ],
)
def test_kv_bytes_are_checked_against_the_formula(
    raw_bytes: int, wire_bytes: int, codec: str, ok: bool
) -> None:
    transfer = TransferCompleted(
        at=4.0,
        request_id="a",
        attempt=1,
        from_worker="prefill-0",
        to_worker="decode-0",
        codec=codec,
        tokens=100,
        raw_bytes=raw_bytes,
        wire_bytes=wire_bytes,
        duration_s=0.1,
        exposed_s=0.1,
        busy_s=0.1,
    )
    assert summarize(whole_run(arrived("a", 3.0), transfer))["kv"]["formula_ok"] is ok


@pytest.mark.parametrize(
    ("times_s", "hidden", "hidden_busy"),
    [
        ([(0.08, 0.08, 0.07, 0.0)], 0.0, 0.0),  # bulk: duration, exposed, busy, busy before prefill's end
        ([(8.0, 0.01, 0.08, 0.07)], 0.99875, 0.875),  # streamed while 8 s of prompt were computed
        ([(8.0, 0.01, 0.08, 0.07), (0.08, 0.08, 0.12, 0.0)], 1 - 0.09 / 8.08, 0.35),
    ],
)
def test_hidden_shares_weigh_all_transfers_by_their_time(
    times_s: list[tuple[float, float, float, float]], hidden: float, hidden_busy: float
) -> None:
    (transfer,) = (event for event in handed_off("a") if isinstance(event, TransferCompleted))
    transfers = [
        msgspec.structs.replace(
            transfer, duration_s=duration, exposed_s=exposed, busy_s=busy, hidden_busy_s=before
        )
        for duration, exposed, busy, before in times_s
    ]
    kv = summarize(whole_run(arrived("a", 3.0), *transfers))["kv"]
    assert kv["hidden_share"] == pytest.approx(hidden, abs=1e-6)
    assert kv["hidden_busy_share"] == pytest.approx(hidden_busy, abs=1e-6)
    none = summarize(whole_run(arrived("a", 3.0)))["kv"]
    assert (none["hidden_share"], none["hidden_busy_share"]) == (None, None)


def test_tokens_that_decode_held_are_counted_apart_from_those_that_moved() -> None:
    again = handed_off("b", prompt_tokens=300, skipped_tokens=256, codec="int8")
    kv = summarize(whole_run(*handed_off("a"), *again))["kv"]
    assert (kv["transfers"], kv["tokens"], kv["skipped_tokens"]) == (2, 100 + 44, 256)
    assert kv["raw_bytes"] == 144 * BYTES_PER_TOKEN
    assert kv["wire_bytes"] == 100 * BYTES_PER_TOKEN + 44 * BYTES_PER_TOKEN // 4
    assert kv["skipped_bytes"] == 256 * BYTES_PER_TOKEN, "as stored, whatever the codec"
    assert kv["formula_ok"] is True


def test_skipped_bytes_are_checked_against_the_formula_too() -> None:
    (transfer,) = (
        event for event in handed_off("a", skipped_tokens=32) if isinstance(event, TransferCompleted)
    )
    wrong = msgspec.structs.replace(transfer, skipped_bytes=transfer.skipped_bytes - 1)
    assert summarize(whole_run(arrived("a", 3.0), wrong))["kv"]["formula_ok"] is False


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    summary = summarize(whole_run())
    assert summary["ttft_ms"] == {
        "p50": None,
        "p90": None,
        "p99": None,
        "max": None,
        "mean": None,
        "count": 0,
    }
    assert summary["kv"]["achieved_bytes_per_s"] is None
    assert summary["ttft_parts_ms"]["queue"] is None
    assert summary["rho"] is None


def test_modes_and_codecs_in_order_of_use() -> None:
    switches: list[Event] = [ModeChanged(at=5.0, mode="colocated"), CodecChanged(at=6.0, codec="int8")]
    summary = summarize(whole_run(*switches))
    assert (summary["mode"], summary["modes"]) == ("colocated", ["disagg", "colocated"])
    assert (summary["codec"], summary["codecs"]) == ("int8", ["raw", "int8"])


def test_failures_and_fallbacks_are_in_the_counts() -> None:
    summary = summarize(
        whole_run(
            arrived("a", 3.0),
            FellBack(
                at=3.1,
                request_id="a",
                attempt=2,
                worker_id="decode-0",
                reason="prefill_died",
                prompt_tokens=9,
            ),
            RequestFailed(at=3.2, request_id="a", reason="no_worker", status=503),
            arrived("b", 4.0),
            RouterStats(at=4.0, rss_bytes=77),
        )
    )
    assert summary["requests"]["failed"] == 1
    assert summary["requests"]["failed_by_reason"] == {"no_worker": 1}
    assert summary["requests"]["fallbacks"] == {"prefill_died": 1}
    assert summary["requests"]["in_flight"] == 1
    assert summary["router"]["peak_rss_bytes"] == 77


def test_empty_log_gives_a_summary() -> None:
    summary = summarize([])
    assert summary["duration_s"] == 0.0
    assert summary["workers"] == []


def test_summary_is_written_whole_and_equals_what_is_returned(tmp_path: Path) -> None:
    write_events(tmp_path / EVENTS_FILE, whole_run(*handed_off()))
    summary = write_summary(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_bytes()) == summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "summary.json"]


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_log_cut_in_mid_line_gives_the_summary_of_what_is_whole(tmp_path: Path, kept: int) -> None:
    events = [*run_started(), *handed_off("a"), *handed_off("b")]
    cut = encode_event(events[-1])[:kept]
    write_events(tmp_path / EVENTS_FILE, events[:-1])
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(cut)
    summary = write_summary(tmp_path)
    assert summary["requests"]["finished"] == 1
    assert summary["requests"]["in_flight"] == 1
    assert summary["orphans"] is None


def test_damaged_log_leaves_the_old_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("old")
    (tmp_path / EVENTS_FILE).write_text("nonsense\n")
    with pytest.raises(RunLogError, match="line 1"):
        write_summary(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "old"


def test_target_stands_beside_the_runs_own_rho() -> None:
    assert {summarize(whole_run())[name] for name in ("target_rho", "rho_at_start")} == {None}
    tuned = LinkTuned(
        at=1.8,
        target="a100-7b@10gbe",
        target_rho=0.65,
        prefill_tokens_per_s=2000.0,
        b_star_bytes_per_s=2000.0 * BYTES_PER_TOKEN,
        asked_bits_per_s=5e6,
        achieved_bits_per_s=5.2e6,
        rho=0.64,
    )
    summary = summarize(whole_run(tuned, *handed_off()))
    assert (summary["target"], summary["target_rho"], summary["rho_at_start"]) == (
        "a100-7b@10gbe",
        0.65,
        0.64,
    )
    assert summary["rho"] == pytest.approx(9.4e9 / 8 / (2000.0 * BYTES_PER_TOKEN))
    moved = LinkConfigured(at=15.0, backend="pacing", asked_bits_per_s=1e9)
    assert summarize(whole_run(tuned, moved))["target"] == "", "the link stands for nothing any more"
