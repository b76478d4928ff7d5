"""Whether disaggregation pays, said from what was measured; and what failures cost."""

import pytest

from cluster.events import (
    FaultHealed,
    FaultInjected,
    LoadStarted,
    ModeChanged,
    RequestMigrated,
    TransferCompleted,
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
        for number in range(200):
            book.add_gaps(mode, [(1000.0 + number / 10, itl_ms)])
            book.add_ttft(mode, 1000.0 + number / 10, ttft_ms)
    return book


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
        "ITL p99 31 ms, co-located 212 ms (6.8x better); TTFT p50 450 ms, co-located 56 ms (8.0x worse)"
    )


def test_a_mode_that_was_not_measured_is_named() -> None:
    book = measured((31.0, 50.0), (0.0, 0.0))
    book.modes["colocated"].gaps.clear()
    judged = judge(book, "disagg", 0.0, None)
    assert judged.answer == OPEN
    assert judged.modes == "disagg ITL p99 31 ms, TTFT p50 50 ms; co-located not measured: m switches"
    assert judge(ModeBook(), "disagg", 0.0, None).modes == "disagg and co-located not measured: run a load"


def test_different_loads_are_told() -> None:
    state = fold(*start())
    assert state.requests.modes.loads == "off"
    state.fold(LoadStarted(at=1010.0, name="mixed"))
    assert state.requests.modes.loads == "mixed"
    book = measured((31.0, 50.0), (212.0, 50.0))
    book.modes["disagg"].loads, book.modes["colocated"].loads = "mixed", "steady"
    assert judge(book, "disagg", 0.0, None).modes.endswith("; loads differ: mixed | steady")


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
    state = fold(*start(), *request("r1", 1010.0, output_tokens=120))
    state.fold(ModeChanged(at=1020.0, mode="colocated"))
    assert len(state.requests.modes.modes["disagg"].gaps) == 119
    assert not state.requests.modes.modes["colocated"].gaps
    assert len(state.requests.modes.transfers) == 1


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
    assert text.startswith(" P/D OPEN: disagg ITL p99 30 ms")
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
