"""Whether disaggregation pays, said from what was measured; and what failures cost."""

import pytest

from cluster.events import (
    Event,
    FaultHealed,
    FaultInjected,
    LinkConfigured,
    LoadStarted,
    ModeChanged,
    NoteAdded,
    RequestMigrated,
    RunStopping,
    TransferCompleted,
    WorkerExited,
    WorkerReady,
    WorkerStats,
)
from console.drill_verdict import DrillVerdict, JudgedLine
from console.judgement import MIXED, OPEN, PAYS, PAYS_NOT, ModeBook, judge
from console.panels.verdict import verdict_lines
from console.view_state import ViewState
from tests.console.history import killed_request, request, start, story
from tests.console.test_view_state import fold


def measured(disagg: tuple[float, float], colocated: tuple[float, float]) -> ModeBook:
    """(ITL, TTFT) in ms that every request of a mode had."""
    book = ModeBook()
    for mode, (itl_ms, ttft_ms) in (("disagg", disagg), ("colocated", colocated)):
        add(book, mode, itl_ms, ttft_ms)
    return book


def add(
    book: ModeBook,
    mode: str,
    itl_ms: float,
    ttft_ms: float,
    *,
    load: str = "steady",
    at: float = 1000.0,
    num: int = 200,
) -> None:
    """``num`` gaps and first tokens, ten a second from ``at`` on."""
    for number in range(num):
        book.add_gaps(mode, load, [(at + number / 10, itl_ms)])
        book.add_ttft(mode, load, at + number / 10, ttft_ms)


@pytest.mark.parametrize(
    ("disagg", "colocated", "answer"),
    [
        ((31.0, 50.0), (212.0, 50.0), PAYS),
        ((31.0, 450.0), (212.0, 56.0), MIXED),
        ((30.0, 56.0), (30.5, 55.0), PAYS_NOT),
        ((60.0, 90.0), (30.0, 55.0), PAYS_NOT),
    ],
)
def test_the_answer_follows_both_modes(
    disagg: tuple[float, float], colocated: tuple[float, float], answer: str
) -> None:
    judged = judge(measured(disagg, colocated), "disagg", 0.0, None)
    assert judged.answer == answer


def test_factors_are_said_beside_the_figures() -> None:
    judged = judge(measured((31.0, 450.0), (212.0, 56.0)), "disagg", 0.0, None)
    assert judged.modes == (
        "steady: ITL p99 31 ms, co-located 212 ms (6.8x better); TTFT p50 450 ms, co-located 56 ms (8.0x worse)"
    )


def test_a_mode_that_was_not_measured_is_named() -> None:
    book = ModeBook()
    add(book, "disagg", 31.0, 50.0)
    judged = judge(book, "disagg", 0.0, None)
    assert judged.answer == OPEN
    assert judged.modes == "steady: disagg ITL p99 31 ms, TTFT p50 50 ms; co-located not measured: m switches"
    assert judge(ModeBook(), "disagg", 0.0, None).modes == "disagg and co-located not measured: run a load"


def test_too_little_of_a_mode_is_not_judged() -> None:
    book = ModeBook()
    add(book, "disagg", 31.0, 50.0)
    add(book, "colocated", 212.0, 50.0, at=1020.0, num=20)
    judged = judge(book, "colocated", 0.0, None)
    assert judged.answer == OPEN
    assert judged.modes.endswith("; co-located has 20 of 200 gaps, 2 of 5 s")
    add(book, "colocated", 212.0, 50.0, at=1022.0, num=180)
    assert judge(book, "colocated", 0.0, None).answer == PAYS


def test_only_one_and_the_same_load_is_compared() -> None:
    book = ModeBook()
    add(book, "disagg", 31.0, 50.0, load="steady")
    add(book, "colocated", 212.0, 50.0, load="mixed", at=1020.0)
    assert judge(book, "colocated", 0.0, None).answer == OPEN
    add(book, "colocated", 31.0, 50.0, load="steady", at=1040.0)
    book.loads = "steady"
    assert judge(book, "colocated", 0.0, None).answer == PAYS_NOT
    book.loads = "off"  # the load was stopped: what it gave still stands
    assert judge(book, "colocated", 0.0, None).answer == PAYS_NOT


def test_a_burst_in_one_mode_only_is_left_out() -> None:
    book = ModeBook()
    add(book, "disagg", 30.0, 50.0)
    book.bursts.begin("b1", 1020.0)
    add(book, "disagg", 900.0, 2000.0, at=1020.5, num=50)
    book.bursts.end("b1", 1026.0)
    add(book, "colocated", 30.0, 50.0, at=1030.0)
    judged = judge(book, "colocated", 0.0, None)
    assert judged.answer == PAYS_NOT
    assert judged.modes.startswith("steady: ITL p99 30 ms, co-located 30 ms (equal)")
    assert judged.modes.endswith("; bursts only in disagg: left out")


def test_bursts_are_compared_with_bursts() -> None:
    book = ModeBook()
    for at, mode, itl_ms, burst_itl_ms in (
        (1000.0, "disagg", 30.0, 35.0),
        (1060.0, "colocated", 30.0, 500.0),
    ):
        add(book, mode, itl_ms, 50.0, at=at)
        book.bursts.begin("b", at + 22.0)
        add(book, mode, burst_itl_ms, 50.0, at=at + 23.0, num=100)
        assert "beside bursts" not in judge(book, mode, 0.0, None).modes.partition("left out")[2]
        add(book, mode, burst_itl_ms, 50.0, at=at + 33.0, num=100)
        book.bursts.end("b", at + 50.0)
    judged = judge(book, "colocated", 0.0, None)
    assert judged.answer == PAYS
    assert "; beside bursts ITL p99 35 ms, co-located 500 ms (14x better)" in judged.modes


def test_a_running_burst_counts_until_its_prompts_have_their_first_token() -> None:
    state = fold(*start(), LoadStarted(at=1004.0, name="steady"))
    steady = request("r1", 1010.0, output_tokens=200)
    burst = request("b1", 1011.0, prompt_tokens=3000, output_tokens=4, label="burst")
    for event in sorted([*steady, *burst], key=lambda event: event.at):
        state.fold(event)
    book = state.requests.modes
    assert not book.bursts.open
    calm, beside = (book.figures("disagg", "steady", beside_burst=each) for each in (False, True))
    assert len(calm.gaps_ms) + len(beside.gaps_ms) == 199
    assert 60 < len(beside.gaps_ms) < 90  # some 1.02 s of gaps of 14 ms


BROKEN = FaultInjected(at=1009.0, fault="stall", target="prefill-0", cause="test", seconds=5.0)


@pytest.mark.parametrize(
    ("events", "is_counted"),
    [
        ([BROKEN], False),
        ([BROKEN, FaultHealed(at=1009.5, fault="stall", target="prefill-0", after_s=0.5)], False),  # it settles
        ([NoteAdded(at=1009.0, text="drill burst begins")], False),
        ([NoteAdded(at=1000.0, text="drill burst begins"), NoteAdded(at=1003.0, text="drill burst PASS: fine")], True),
        ([NoteAdded(at=1009.0, text="a drill begins")], True),
        ([FaultInjected(at=1003.0, fault="kill", target="decode-0", cause="test")], True),
        ([WorkerExited(at=1005.0, worker_id="prefill-0", role="prefill", pid=4302, signal=9)], False),
        ([WorkerExited(at=1005.0, worker_id="prefill-0", role="prefill", pid=4302, signal=9),
          WorkerReady(at=1006.0, worker_id="prefill-0", role="prefill", pid=4303, after_s=1.0)], True),
    ],
)  # fmt: skip
def test_what_was_measured_while_something_was_broken_is_left_out(
    events: list[Event], is_counted: bool
) -> None:
    state = fold(*start(), LoadStarted(at=1004.0, name="steady"), *events, *request("r1", 1010.0))
    assert bool(state.requests.modes.pools) is is_counted
    assert len(state.requests.modes.transfers) == int(is_counted)


def test_what_disturbs_now_is_said() -> None:
    state = fold(*start(), LoadStarted(at=1004.0, name="steady"), BROKEN)
    assert state.judgement().modes.endswith("; stall prefill-0: left out")


def test_a_drill_whose_end_nobody_told_ends_by_itself() -> None:
    state = fold(
        *start(), NoteAdded(at=1009.0, text="drill burst begins"), NoteAdded(at=1700.0, text="later")
    )
    assert not state.requests.modes.disturbed.now


def test_processes_that_stop_with_the_run_disturb_nothing() -> None:
    stopped = WorkerExited(at=1009.1, worker_id="prefill-0", role="prefill", pid=4302, cause="stop")
    state = fold(*start(), RunStopping(at=1009.0, reason="operator"), stopped)
    assert not state.requests.modes.disturbed.now


def test_only_the_streams_of_a_load_count() -> None:
    foreign = request("r1", 1010.0, label="client")
    assert not fold(*start(), LoadStarted(at=1004.0, name="steady"), *foreign).requests.modes.pools
    assert not fold(*start(), *request("r1", 1010.0)).requests.modes.pools  # no load ran


@pytest.mark.parametrize(
    ("busy_s", "verdict"),
    [
        (0.1, "transfer wins by 3.4x: 10,000 tok/s moved, 2,961 computed; rho 2.0; exposed 20 ms (n 1)"),
        (1.0, "transfer LOSES by 3.0x, computing again is faster: 1,000 tok/s moved"),
        (1 / 2.961, "transfer and computing again take the same time"),
    ],
)
def test_moving_against_computing_again(busy_s: float, verdict: str) -> None:
    book = ModeBook()
    book.transfers.append(
        TransferCompleted(
            at=1000.0, request_id="r", attempt=1, from_worker="prefill-0", to_worker="decode-0", codec="raw",
            tokens=1000, raw_bytes=1, wire_bytes=1, duration_s=1.0, exposed_s=0.02, busy_s=busy_s,
        )
    )  # fmt: skip
    assert judge(book, "disagg", 2961.0, 2.0).transfer.startswith(verdict)


def test_before_a_transfer_rho_only_promises() -> None:
    assert judge(ModeBook(), "disagg", 100.0, 0.4).transfer == (
        "rho 0.40: transfer should lose; no transfer measured yet"
    )
    assert judge(ModeBook(), "disagg", 0.0, None).transfer == "rho not known; no transfer measured yet"


def test_requests_count_for_the_mode_they_ran_in() -> None:
    load = LoadStarted(at=1004.0, name="steady")
    events = request("r1", 1010.0, output_tokens=120)
    state = fold(*start(), load, *events)
    assert len(state.requests.modes.figures("disagg", "steady", beside_burst=False).gaps_ms) == 119
    assert len(state.requests.modes.transfers) == 1
    switched = fold(*start(), load, events[0], ModeChanged(at=1010.0, mode="colocated"), *events[1:])
    assert not switched.requests.modes.pools  # it was sent before and ran beside requests of the other mode


def test_transfers_far_below_the_link_are_said_to_be() -> None:
    book = ModeBook()
    for number, busy_s in enumerate((1.0, 1.0, 50.0)):  # the median: one that was held up moves nothing
        book.add_transfer(
            TransferCompleted(
                at=1000.0, request_id=f"r{number}", attempt=1, from_worker="prefill-0", to_worker="decode-0",
                codec="raw", tokens=1000, raw_bytes=1, wire_bytes=1, duration_s=1.0, exposed_s=0.02, busy_s=busy_s,
            )
        )  # fmt: skip
    assert judge(book, "disagg", 2000.0, 10.0, 20_000.0).transfer == (
        "transfer LOSES by 2.0x, computing again is faster: 1,000 tok/s moved, 2,000 computed; "
        "rho 10 by the link alone, of which transfers reach 0.05; exposed 20 ms (n 3)"
    )


def test_transfers_move_no_more_than_the_link_carries_but_for_their_codec() -> None:
    """A shaper lets a first burst through at once: by the socket's time alone a small transfer beats any link."""
    raw, halved = ModeBook(), ModeBook()
    for book, codec, wire_bytes in ((raw, "raw", 2), (halved, "int8", 1)):
        book.add_transfer(
            TransferCompleted(
                at=1000.0, request_id="r", attempt=1, from_worker="prefill-0", to_worker="decode-0", codec=codec,
                tokens=1000, raw_bytes=2, wire_bytes=wire_bytes, duration_s=1.0, exposed_s=0.02, busy_s=0.1,
            )
        )  # fmt: skip
    assert "500 tok/s moved, 800 computed; rho 0.62; " in judge(raw, "disagg", 800.0, 0.62, 500.0).transfer
    assert "1,000 tok/s moved" in judge(halved, "disagg", 800.0, 0.62, 500.0).transfer
    assert "for raw KV, of which transfers move 2.0x" in judge(halved, "disagg", 800.0, 0.62, 500.0).transfer


def test_transfers_over_another_link_are_forgotten() -> None:
    state = fold(*start(), *request("r1", 1010.0))
    assert len(state.requests.modes.transfers) == 1
    state.fold(LinkConfigured(at=1020.0, backend="netns", asked_bits_per_s=1e9))
    assert not state.requests.modes.transfers


def test_the_prefill_rate_is_a_median() -> None:
    state = fold(*start())
    for number, rate in enumerate((3000.0, 3000.0, 0.0, 100.0, 3000.0)):
        state.fold(
            WorkerStats(at=1010.0 + number, worker_id="prefill-0", role="prefill", prefill_tokens_per_s=rate)
        )
    assert state.topology.prefill_tokens_per_s() == 3000.0


def test_the_ledger_says_what_a_death_cost_and_whom() -> None:
    beside = request("r1", 1028.0, output_tokens=200)
    state = fold(
        *sorted([*start(), *beside, *killed_request("r9", 1029.2, 1030.0)], key=lambda event: event.at)
    )
    (row,) = state.requests.ledger.rows()
    assert (row.kind, row.cause, row.count, row.tokens, row.workers) == (
        "fallback", "prefill_died", 1, 8000, {"decode-0"},
    )  # fmt: skip
    assert row.lost_ms == pytest.approx(819.0)  # dispatched 1 ms after 1029.2, given up at 1030.02
    assert row.beside == 1
    assert state.requests.ledger.last_victim == "r9"


def test_a_migration_computes_prompt_and_answer_again() -> None:
    events = request("r1", 1010.0, output_tokens=40)
    cut = [event for event in events if event.at < 1010.4]
    state = fold(*start(), *cut)
    state.fold(
        RequestMigrated(at=1010.5, request_id="r1", attempt=2, from_worker="decode-0", delivered_tokens=16)
    )
    (row,) = state.requests.ledger.rows()
    assert (row.kind, row.cause, row.tokens) == ("migration", "decode-0 lost", 128 + 16)
    assert 0 < row.lost_ms < 500


def panel(state: ViewState, wanted: str = "all", drill: DrillVerdict | None = None, width: int = 98) -> str:
    lines = verdict_lines(state, 1040.0, width, wanted, drill)
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain.rstrip() for line in lines)


def test_the_panel_shows_judgement_and_ledger() -> None:
    state = fold(*story())
    text = panel(state)
    assert text.startswith(" P/D OPEN: steady: disagg ITL p99 17 ms")
    assert "fallback  prefill_died             1        8,000    819 ms  rc00000 on D0 beside" in text
    assert "P/D" not in panel(state, "ledger")
    assert panel(state, "drill") == " no drill in this run yet"
    assert "no fallback, no retry, no migration" in panel(fold(*start()), "ledger")


@pytest.mark.parametrize("width", [60, 78, 98, 158])
def test_no_line_is_wider_than_the_panel(width: int) -> None:
    panel(fold(*story()), width=width)


def test_what_is_broken_stands_first_until_it_is_healed() -> None:
    broken = FaultInjected(at=1039.0, fault="slow", target="link", cause="test", seconds=5.0)
    state = fold(*start(), broken)
    first, *_ = panel(state).split("\n")
    assert first == " ! broken now: slow link for 1 s, heals in 4 s (x heals all)"
    state.fold(FaultHealed(at=1044.0, fault="slow", target="link", after_s=5.0))
    assert "broken" not in panel(state)


def test_a_drills_verdict_has_what_failed_first_and_where_to_look() -> None:
    drill = DrillVerdict(
        drill="kill-prefill",
        verdict="fail",
        headline="6/6 finished",
        expectations=(
            JudgedLine("finished", "all", True, "6/6 finished"),
            JudgedLine("restarts", "1", False, "2 restarts", ("logs/prefill-0.log",)),
        ),
    )
    lines = panel(fold(*start()), drill=drill).split("\n")
    assert lines[:3] == [
        " drill kill-prefill FAIL 1/2: 6/6 finished",
        " XX restarts: 2 restarts (expected 1); look at logs/prefill-0.log",
        " ok 6/6 finished",
    ]
    running = DrillVerdict(drill="burst", headline="disturbed round")
    assert panel(fold(*start()), drill=running).startswith(" drill burst RUNNING: disturbed round\n P/D")
