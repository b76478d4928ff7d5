from typing import get_args

import msgspec
import pytest

from cluster.events import (
    CodecChanged,
    Event,
    FirstToken,
    HeartbeatMissed,
    LinkTuned,
    LoadStarted,
    LoadStopped,
    ModeChanged,
    NoteAdded,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    RoleChanged,
    RunStopped,
    TextDelivered,
    TokensDelivered,
    TransferCompleted,
    TransferProgressed,
    WorkerDrained,
    WorkerDraining,
    WorkerExited,
    WorkerReady,
    WorkerRemoved,
    WorkerResumed,
    WorkerStarting,
    WorkerStats,
)
from cluster.request_filter import RequestEvent
from console.feed_text import FAULTS, NOTABLE, REQUESTS, TRANSFERS, feed_line
from console.held_blocks import Holder, WorkerBlocks
from console.own_cost import OwnCost
from console.panels.header import header_lines
from console.panels.worker_facts import fact_lines
from console.panels.workers import worker_lines
from console.request_book import KEPT_DONE
from console.request_view import TTFT_PARTS
from console.screens.request_detail import detail_lines
from console.text_format import fit, format_ratio
from console.view_state import KEPT_LINES, ViewState
from tests.console.history import (
    KV_BYTES_PER_TOKEN,
    LINK_BITS_PER_S,
    PREFILL_TOKENS_PER_S,
    kill_and_restart,
    killed_request,
    numbered,
    request,
    start,
    stats,
    story,
)


def fold(*events: Event) -> ViewState:
    state = ViewState()
    for event in events:
        state.fold(event)
    return state


def texts(state: ViewState, wanted: str) -> list[str]:
    return [entry.line.text for entry in state.feed.newest(wanted)]


def test_a_request_goes_through_its_phases() -> None:
    state = fold(*start())
    seen = []
    for event in numbered(request("r1", 1010.0, prompt_tokens=8000, output_tokens=16)):
        state.fold(event)
        found = state.requests.get("r1")
        assert found is not None
        if not seen or seen[-1] != found.phase:
            seen.append(found.phase)
    assert seen == ["queued", "prefill", "transfer", "decode", "done"]
    found = state.requests.get("r1")
    assert found is not None
    assert (found.out_tokens, found.path, found.codec, found.outcome) == (16, "P0>D0", "raw", "ok")
    assert found.transfer is not None
    assert found.transfer.raw_bytes == 8000 * KV_BYTES_PER_TOKEN
    assert state.requests.finished == 1
    assert not state.requests.live


def test_what_decode_held_is_told_with_the_transfer() -> None:
    state = fold(
        *start(),
        *numbered(
            request("r1", 1010.0, prompt_tokens=8000, skipped_tokens=4096)
            + request("r2", 1040.0, prompt_tokens=8000)
        ),
    )
    told = {}
    for name in ("r1", "r2"):
        found = state.requests.get(name)
        assert found is not None
        page = [line.plain for line in detail_lines(state, found, 1060.0, 200)]
        told[name] = [line for line in (*texts(state, TRANSFERS), *page) if "skipped" in line]
    skipped = "skipped 4,096 tokens, 12.0 MiB"
    started, detail, history = told["r1"]
    assert started == f"r1 transfer P0>D0 started: raw 11.4 MiB (3,904 tokens), {skipped}"
    assert detail.startswith("  transfer 11.4 MiB raw (1.00 of raw), 3,904 tokens, ")
    assert detail.endswith(skipped)
    assert history.endswith(f"transfer started prefill-0 > decode-0 raw, {skipped}")
    assert told["r2"] == [started]  # the feed's line; nothing of its own


def test_ttft_parts_are_kept_and_sum_to_the_whole() -> None:
    state = fold(*start(), *numbered(request("r1", 1010.0)))
    found = state.requests.get("r1")
    assert found is not None
    first = found.first_token
    assert first is not None
    parts = sum(msgspec.structs.asdict(first)[name] for _, name in TTFT_PARTS)
    assert parts + first.residual_ms == pytest.approx(first.ttft_ms, abs=1.0)


def test_worker_events_may_overtake_the_routers() -> None:
    state = fold(*start(), PrefillStarted(at=1010.01, request_id="r1", attempt=1, worker_id="prefill-0"))
    assert list(state.requests) == []  # not shown before its arrival is known
    state.fold(RequestArrived(at=1010.0, request_id="r1", prompt_tokens=10, max_tokens=4))
    found = state.requests.get("r1")
    assert found is not None
    assert found.phase == "prefill"
    assert found.wait_ms == pytest.approx(10.0)
    assert [r.request_id for r in state.requests] == ["r1"]


def test_late_worker_events_do_not_bring_a_dropped_request_back() -> None:
    state = fold(*start())
    for index in range(KEPT_DONE + 1):
        at = 1010.0 + index
        state.fold(RequestArrived(at=at, request_id=f"r{index}", prompt_tokens=1, max_tokens=1))
        state.fold(
            RequestFinished(
                at=at + 0.5, request_id=f"r{index}", finish_reason="stop", output_tokens=1, e2el_ms=1
            )
        )
    assert state.requests.get("r0") is None
    state.fold(
        PrefillFinished(at=2000.0, request_id="r0", attempt=1, worker_id="p", prompt_tokens=1, compute_s=0.1)
    )
    assert state.requests.get("r0") is None
    assert len(state.requests.done) == KEPT_DONE
    assert state.requests.finished == KEPT_DONE + 1


def test_itl_counts_every_gap_across_batches() -> None:
    state = fold(
        *start(),
        RequestArrived(at=1010.0, request_id="r1", prompt_tokens=1, max_tokens=4),
        TokensDelivered(at=1010.2, request_id="r1", first_position=0, token_at=(1010.1, 1010.11)),
        TokensDelivered(at=1010.4, request_id="r1", first_position=2, token_at=(1010.14, 1010.2)),
    )
    found = state.requests.get("r1")
    assert found is not None
    assert found.gaps_ms == pytest.approx([10.0, 30.0, 60.0])
    assert found.itl_ms()[0] == pytest.approx(30.0)
    state.fold(
        RequestFinished(at=1010.5, request_id="r1", finish_reason="stop", output_tokens=4, e2el_ms=500)
    )
    assert found.gaps_ms == []
    assert found.itl_ms()[0] == pytest.approx(30.0)
    assert state.requests.itl_ms.percentiles(1010.5, 10.0, 0.5) == (pytest.approx(30.0),)


def test_kill_fallback_and_restart() -> None:
    at = 1090.0
    state = fold(*start(), *numbered(killed_request("r9", at - 0.8, at) + kill_and_restart(at)))
    found = state.requests.get("r9")
    assert found is not None
    assert found.outcome == "FALLBACK"
    assert found.path == "D0"
    assert state.requests.fallbacks == {"prefill_died": 1}
    worker = state.topology.workers["prefill-0"]
    assert (worker.state, worker.restarts, worker.pid) == ("ready", 1, 4399)
    assert [mark.letter for mark in state.marks] == ["K", "f", "R"]
    faults = texts(state, FAULTS)
    assert any("FALLBACK local prefill on decode-0: prefill_died" in text for text in faults)
    assert any("prefill-0 EXITED signal 9 (operator)" in text for text in faults)


def test_workers_states_and_transfers_of_a_dead_end() -> None:
    state = fold(*start(), *numbered(request("r1", 1010.0))[:5])
    link = state.topology.links["prefill-0", "decode-0"]
    assert list(link.active) == [("r1", 1)]
    state.fold(WorkerExited(at=1013.0, worker_id="prefill-0", role="prefill", pid=1, signal=9, cause="crash"))
    assert link.active == {}
    assert state.topology.workers["prefill-0"].word == ("-", "down")
    state.fold(WorkerStats(at=1012.9, worker_id="prefill-0", role="prefill", held_blocks=7))
    assert state.topology.held_blocks() == 0  # a sample that came after the death counts for nothing
    state.fold(WorkerStarting(at=1013.1, worker_id="prefill-0", role="prefill", pid=2, restarts=1))
    assert state.topology.workers["prefill-0"].word == ("~", "starting")
    state.fold(WorkerReady(at=1014.0, worker_id="prefill-0", role="prefill", pid=2, after_s=0.9))
    assert state.topology.workers["prefill-0"].word == ("*", "ready")
    assert state.topology.workers["prefill-0"].is_stale(1018.0)


def test_b_star_and_rho_come_from_measured_numbers() -> None:
    state = fold(*start())
    assert state.rho is None
    for event in stats(1010.0):
        state.fold(event)
    assert state.b_star_bytes_per_s == pytest.approx(KV_BYTES_PER_TOKEN * PREFILL_TOKENS_PER_S)
    assert state.rho == pytest.approx(LINK_BITS_PER_S / 8 / (KV_BYTES_PER_TOKEN * PREFILL_TOKENS_PER_S))
    state.fold(WorkerStats(at=1011.0, worker_id="prefill-0", role="prefill"))  # idle: no rate to report
    assert state.rho is not None


def tuned(target: str, limit: str = "") -> LinkTuned:
    return LinkTuned(
        at=1001.0,
        target=target,
        target_rho=0.65,
        prefill_tokens_per_s=8341.0,
        b_star_bytes_per_s=2.5e7,
        asked_bits_per_s=1.33e8,
        achieved_bits_per_s=1.36e8,
        rho=0.664,
        limit=limit,
    )


def test_a_tuned_link_is_a_line_and_stands_beside_rho() -> None:
    state = fold(*start(), tuned("a100-7b@10gbe"), *stats(1010.0))
    assert (
        "link tuned for rho 0.65 of a100-7b@10gbe: asked 133.00 Mb/s at 8,341 prefill tokens/s, rho here 0.66"
        in (texts(state, NOTABLE))
    )
    wide, panel = (
        header_lines(state, 1010.0, 160, OwnCost()).plain,
        "\n".join(line.plain for line in worker_lines(state, 1010.0, 120, 20, ascii_mode=True)),
    )
    assert f"rho {fit(format_ratio(state.rho), 4)}/0.65" in wide
    assert f"rho {format_ratio(state.rho)} (a100-7b@10gbe: 0.65)" in panel
    narrow = header_lines(state, 1010.0, 80, OwnCost()).plain.split("\n")
    assert f"rho {fit(format_ratio(state.rho), 4)}/0.65 | " in narrow[0]
    assert [len(line) for line in narrow] == [80, 80]
    untuned = fold(*start(), *stats(1010.0))
    for width in (80, 160):
        assert "/0.65" not in header_lines(untuned, 1010.0, width, OwnCost()).plain


def test_a_link_that_is_changed_stands_for_no_target() -> None:
    state = fold(*start(), tuned("a100-7b@10gbe"))
    asked = state.topology.asked
    assert asked is not None
    state.fold(msgspec.structs.replace(asked, at=1005.0, limit="reached less"))
    assert state.tuned is not None, "only described anew"
    state.fold(msgspec.structs.replace(asked, at=1006.0, asked_bits_per_s=1e6))
    assert state.tuned is None


def test_a_tuned_link_that_was_not_reached_warns() -> None:
    line = feed_line(tuned("", limit="this host reached less"))
    assert line is not None
    assert line.level == "warn"
    assert line.text.startswith("link tuned for rho 0.65: asked ")
    assert line.text.endswith("rho here 0.66; this host reached less")


def test_stranded_blocks_are_those_nobody_works_for() -> None:
    state = fold(
        *start(), WorkerStats(at=1010.0, worker_id="decode-0", role="decode", running=1, held_blocks=5)
    )
    assert (state.topology.held_blocks(), state.topology.stranded_blocks()) == (5, 0)
    state.fold(WorkerStats(at=1011.0, worker_id="decode-0", role="decode", held_blocks=5))
    assert state.topology.stranded_blocks() == 5


def test_totals() -> None:
    state = fold(
        *start(),
        *(RequestArrived(at=1010.0, request_id=f"r{i}", prompt_tokens=1, max_tokens=1) for i in range(4)),
        RequestRetried(at=1010.1, request_id="r0", attempt=2, reason="prefill_died"),
        RequestMigrated(at=1010.2, request_id="r0", attempt=3, from_worker="decode-0", delivered_tokens=3),
        RequestFailed(at=1010.3, request_id="r1", reason="broken"),
        RequestFailed(at=1010.3, request_id="r1", reason="told twice"),
        RequestCancelled(at=1010.4, request_id="r2", phase="decode"),
        RequestRejected(at=1010.5, reason="queue full", status=429),
    )
    book = state.requests
    assert (book.retries, book.migrations, book.failed, book.cancelled) == (1, 1, 1, 1)
    assert book.rejected == {429: 1}
    assert book.get("r0") is not None
    assert [r.outcome for r in book][:1] == ["MIGRATED 1 RETRY 1"]
    assert book.num_waiting == 2


def test_a_flood_of_refusals_is_one_line() -> None:
    refused = [RequestRejected(at=1010.0 + i / 10, reason="queue full", status=429) for i in range(30)]
    later = RequestRejected(at=1021.0, reason="queue full", status=429)
    other = RequestRejected(at=1021.1, reason="no worker", status=503)
    state = fold(*start(), *refused, later, other)
    told = [entry.text for entry in state.feed.newest("requests")]
    assert told == [
        "a request rejected 503: no worker",
        "a request rejected 429: queue full",
        "a request rejected 429: queue full (30 in 2.9 s)",
    ]
    assert state.requests.rejected == {429: 31, 503: 1}


def test_the_routers_death_ends_what_it_served() -> None:
    state = fold(
        *start(),
        RequestArrived(at=1010.0, request_id="r1", prompt_tokens=1, max_tokens=1),
        WorkerExited(at=1011.0, worker_id="router", role="router", pid=1, signal=9),
    )
    assert state.requests.live == {}
    assert state.requests.failed == 1


def test_operator_changes() -> None:
    state = fold(
        *start(),
        ModeChanged(at=1010.0, mode="colocated", cause="operator, key m"),
        CodecChanged(at=1011.0, codec="int8", cause="operator, key i"),
        LoadStarted(at=1012.0, name="steady"),
        NoteAdded(at=1013.0, text="look"),
    )
    assert (state.mode, state.codec, list(state.loads)) == ("colocated", "int8", ["steady"])
    assert [mark.letter for mark in state.marks] == ["m", "i", "s", "a"]
    state.fold(LoadStopped(at=1014.0, name="steady"))
    assert state.loads == {}


def test_time_stands_still_after_the_run() -> None:
    state = fold(*start(), RunStopped(at=1200.0))
    assert state.now(99999.0) == 1200.0
    assert state.since_start(1200.0) == 200.0


def test_kv_rate_is_spread_over_the_transfer() -> None:
    state = fold(*start(), *numbered(request("r1", 1010.0, prompt_tokens=8000)))
    total = state.requests.kv_bytes.total(1020.0, 20.0)
    assert total == pytest.approx(8000 * KV_BYTES_PER_TOKEN)


def arrival(request_id: str) -> RequestArrived:
    return RequestArrived(at=1009.0, request_id=request_id, prompt_tokens=1, max_tokens=1)


def test_readiness_probes_show_nowhere() -> None:
    probe = [*numbered(request("p1", 1010.0))]
    labelled = [
        msgspec.structs.replace(event, label="probe") if isinstance(event, RequestArrived) else event
        for event in probe
    ]
    state = fold(*start(), *labelled)
    assert state.requests.finished == state.requests.transfers == 0
    assert list(state.requests) == []


def test_the_feed_keeps_faults_whatever_else_happens() -> None:
    state = fold(*start(), arrival("bad"), RequestFailed(at=1010.0, request_id="bad", reason="broken"))
    for index in range(3 * KEPT_LINES):
        state.fold(RequestArrived(at=1011.0, request_id=f"r{index}", prompt_tokens=1, max_tokens=1))
    assert len(texts(state, REQUESTS)) == KEPT_LINES
    assert any("bad FAILED" in text for text in texts(state, NOTABLE))


def test_routine_lines_show_only_under_their_category() -> None:
    state = fold(*start(), *numbered(request("r1", 1010.0)))
    assert not any("r1 " in text for text in texts(state, NOTABLE))
    assert any("transferred" in text for text in texts(state, TRANSFERS))
    assert any("finished" in text for text in texts(state, REQUESTS))


def test_everything_of_a_long_run_is_bounded() -> None:
    state = fold(*story(seconds=60.0, rate_per_s=20.0))
    assert len(state.requests.done) <= KEPT_DONE
    assert state.requests.finished > KEPT_DONE
    assert state.requests.failed == 0


def test_a_whole_story_balances() -> None:
    events = story(seconds=39.0)
    state = fold(*events)
    arrived = sum(isinstance(event, RequestArrived) for event in events)
    live = sum(1 for r in state.requests if r.live)
    assert arrived == state.requests.finished + live
    assert state.num_events == len(events)
    assert sum(isinstance(event, FirstToken) for event in events) > 50


def plainest(kind: type[msgspec.Struct]) -> Event:
    """An event of that kind with the least in it."""
    values = {"int": 1, "float": 1000.0, "str": "x", "tuple": ()}
    fields = [field for field in msgspec.structs.fields(kind) if field.required]
    given = {field.name: values[getattr(field.type, "__name__", "tuple")] for field in fields}
    return msgspec.convert({"type": kind.__struct_config__.tag, **given}, Event)


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_every_kind_of_event_can_be_folded(kind: type[msgspec.Struct]) -> None:
    event = plainest(kind)
    before = [arrival(event.request_id)] if isinstance(event, RequestEvent) else []
    state = fold(*before)  # as the first of a log
    lines = state.feed.count
    state.fold(event)
    assert state.num_events == len(before) + 1
    line = feed_line(event)
    assert (line is not None) == (state.feed.count == lines + 1)
    fold(*story(seconds=5.0), event)


def test_picks_keep_their_reasons() -> None:
    state = fold(
        *start(),
        arrival("r1"),
        RequestDispatched(
            at=1010.0, request_id="r1", attempt=1, mode="disagg", codec="raw", decode_worker="decode-0",
            decode_reason="most free blocks (9)", prefill_worker="prefill-0", prefill_reason="least queued (0)",
        ),
    )  # fmt: skip
    assert state.picks[-1].decode_reason == "most free blocks (9)"


def test_a_transfers_progress_is_told_while_it_lasts() -> None:
    events = request("r1", 1010.0, prompt_tokens=8000)
    begun = [event for event in events if not isinstance(event, TransferCompleted) and event.at < 1012.8]
    state = fold(*start(), *begun)
    state.fold(TransferProgressed(at=1012.8, request_id="r1", attempt=1, sent_bytes=12 * 2**20))
    (line,) = [
        line.plain for line in worker_lines(state, 1012.9, 98, 20, ascii_mode=True) if "`->" in line.plain
    ]
    assert "12.0/23.4 MiB [####....] raw r1" in line


def test_a_drain_shows_and_ends() -> None:
    state = fold(*start(), WorkerDraining(at=1010.0, worker_id="prefill-0", reason="drain"))
    worker = state.topology.workers["prefill-0"]
    assert worker.word == ("~", "draining")
    state.fold(WorkerDrained(at=1011.0, worker_id="prefill-0", after_s=1.0))
    assert worker.word == ("~", "drained")
    state.fold(WorkerResumed(at=1012.0, worker_id="prefill-0"))
    assert worker.word == ("*", "ready")
    state.fold(RoleChanged(at=1013.0, worker_id="prefill-0", from_role="prefill", role="both"))
    assert [w.role for w in state.topology.by_role()] == ["router", "both", "decode"]
    state.fold(WorkerRemoved(at=1014.0, worker_id="prefill-0"))
    assert "prefill-0" not in state.topology.workers
    assert [text for _, text, _ in worker.story][2:4] == [
        "prefill-0 DRAINING: no new requests", "prefill-0 drained in 1.0 s: nothing is left on it",
    ]  # fmt: skip


def test_throughput_is_what_changed_between_two_samples() -> None:
    def sample(at: float, prefill: int, decode: int, busy_s: float) -> WorkerStats:
        return WorkerStats(
            at=at,
            worker_id="decode-0",
            role="decode",
            prefill_tokens=prefill,
            decode_tokens=decode,
            busy_s=busy_s,
        )

    state = fold(
        *start(), sample(1010.0, 0, 100, 1.0), sample(1010.5, 0, 150, 1.4), sample(1011.0, 512, 150, 1.9)
    )
    rates = state.topology.workers["decode-0"].rates
    assert [(rate.prefill_tokens_per_s, rate.decode_tokens_per_s) for rate in rates] == [
        (0.0, 100.0),
        (1024.0, 0.0),
    ]
    assert [rate.busy_share for rate in rates] == [pytest.approx(0.8), pytest.approx(1.0)]
    text = "\n".join(
        line.plain
        for line in fact_lines(
            state, state.topology.workers["decode-0"], WorkerBlocks("decode-0", (
                Holder("r213abcdef", 1, "running", 500, 4.2, "decode", "prefill-0", True),
                Holder("r214abcdef", 2, "running", 3, 60.0, "", "", False),
            )), 1011.0, 100, ascii_mode=True,
        )
    )  # fmt: skip
    assert "prefill        1,024 tok/s     |" in text
    assert "r213abc    1 running        500   4.20 s  decode   prefill-0" in text
    assert "r214abc    2 running          3   60.0 s  STRANDED -  no longer wanted: being freed" in text


def test_text_is_shown_where_the_log_has_it() -> None:
    state = fold(*start(), *request("r1", 1010.0))
    shown = state.requests.get("r1")
    assert shown is not None
    page = "\n".join(line.plain for line in detail_lines(state, shown, 1020.0, 78))
    assert "text     not in the log; up --set router.log_text=true keeps it there" in page
    state.fold(TextDelivered(at=1021.0, request_id="r1", text="    return [", prompt="def read(p):\n"))
    state.fold(TextDelivered(at=1021.1, request_id="r1", text="x]\n\x1b[31m", prompt=""))
    page = "\n".join(line.plain for line in detail_lines(state, shown, 1022.0, 78))
    assert "prompt (13 characters)\n  def read(p):" in page
    assert "    return [x]\n  ?[31m" in page


def test_the_gaps_of_an_ended_request_keep_their_shape() -> None:
    events = request("r1", 1010.0, output_tokens=400, gap_ms=10.0)
    live = fold(*start(), *events[:-1]).requests.get("r1")
    ended = fold(*start(), *events).requests.get("r1")
    assert live is not None
    assert ended is not None
    assert ended.gap_columns(60) == [max(live.gap_columns(120)[i : i + 2]) for i in range(0, 120, 2)]
    assert len(ended.gap_columns(1000)) == 120


def test_a_process_that_did_not_start_in_time_is_said_to_be_one() -> None:
    missed = HeartbeatMissed(at=1001.0, worker_id="prefill-0", silent_s=60.0, part="start")
    state = fold(*start(), missed)
    words = "did not start within 60 s (supervisor.start_timeout_s)"
    assert state.topology.workers["prefill-0"].detail == words
    assert state.feed.newest("faults")[0].line.text == f"prefill-0 {words}"


def test_the_parts_of_a_row_are_those_that_sum_to_its_ttft() -> None:
    events = request("r1", 1010.0)
    first = next(event for event in events if isinstance(event, FirstToken))
    acked = next(event for event in events if isinstance(event, TransferCompleted))
    before = fold(*start(), *(event for event in events if event.at < first.at)).requests.get("r1")
    assert before is not None
    assert before.exposed_ms == acked.exposed_s * 1000
    after = fold(
        *start(), *(msgspec.structs.replace(e, transfer_exposed_ms=5.0) if e is first else e for e in events)
    )
    row = after.requests.get("r1")
    assert row is not None
    assert row.exposed_ms == 5.0


def test_a_transfers_rate_is_of_busy_time_and_its_exposure_its_own() -> None:
    state = fold(*start(), *request("r1", 1010.0, prompt_tokens=3000))
    found = state.requests.get("r1")
    assert found is not None
    page = " ".join(line.plain for line in detail_lines(state, found, 1060.0, 200))
    assert "MB/s; transfer's own: exposed" in page
    (line,) = (
        entry.line.text for entry in state.feed.newest(TRANSFERS) if " transferred " in entry.line.text
    )
    assert line.endswith(", exposed 11 ms")
