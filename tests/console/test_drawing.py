"""Numbers as text, series and charts: pure functions."""

from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from cluster.events import RequestDispatched, WorkerStats
from console.actions import ACTIONS, LIVE, REPLAY, actions_of, footer_text, help_rows, readme_key_table
from console.charts import itl_chart, kv_chart, plot_chart, strip_columns, strip_line, ttft_chart
from console.own_cost import OwnCost
from console.panels.header import header_lines
from console.panels.workers import worker_lines
from console.series import BUCKET_S, MAX_VALUES, NUM_BUCKETS, BucketSeries, ColumnGrid
from console.text_format import (
    bar,
    block_strip,
    clean,
    fit,
    format_clock,
    format_ms,
    format_rate_pair,
    format_stamp,
    short_worker,
)
from console.view_state import ViewState
from tests.console.harness import END_OF_STORY
from tests.console.history import story


@pytest.fixture(scope="module")
def state() -> ViewState:
    folded = ViewState()
    for event in story():
        folded.fold(event)
    return folded


@pytest.mark.parametrize(
    "value", [0.0, 0.04, 9.96, 9.99, 99.95, 999.4, 999.6, 9_994, 9_996, 99_949, 99_951, 500_000]
)
def test_times_stay_within_their_width(value: float) -> None:
    assert len(format_ms(value)) <= 7


def test_times_as_text() -> None:
    assert [format_ms(v) for v in (None, 0.42, 61.2, 2710.0, 95_000.0)] == [
        "-",
        "0.4 ms",
        "61 ms",
        "2.71 s",
        "95.0 s",
    ]
    assert format_clock(252.4) == "00:04:12"
    assert format_stamp(247.94) == "04:07.9"
    assert format_stamp(59.98) == "01:00.0"
    assert format_stamp(3847.0) == "1:04:07"


def test_rates_asked_and_achieved_share_a_unit() -> None:
    assert format_rate_pair(9.42e9, 1e10) == "9.42/10 Gb/s"
    assert format_rate_pair(0.0, 1e8) == "-/100 Mb/s"
    assert format_rate_pair(22.3e9, 0.0) == "22.30 Gb/s"


@pytest.mark.parametrize(
    "text", ["plain", "wide 漢字漢字漢字", "esc \x1b[31m red\x07", "new\nline", "", "x" * 99]
)
@pytest.mark.parametrize("width", [0, 1, 7, 20])
def test_fit_gives_exactly_the_width_and_no_control_characters(text: str, width: int) -> None:
    for right in (False, True):
        fitted = fit(text, width, right=right)
        assert cell_len(fitted) == width
        assert "\x1b" not in fitted
        assert "\n" not in fitted


def test_clean_removes_what_moves_or_hides_text() -> None:
    assert clean("a\x1b]0;title\x07b\u202ec\u200bd") == "a?]0;title?b?c?d"


def test_bars_and_strips() -> None:
    assert bar(0.5, 12, ascii_mode=True) == "[#####.....]"
    assert bar(7.0, 4, ascii_mode=False) == "[██]"
    assert block_strip([None, 0.0, 4.0, 8.0], 8.0, ascii_mode=False) == " ▁▄█"
    assert block_strip([None, 1.0], 0.0, ascii_mode=True).isascii()


def test_short_worker() -> None:
    assert [short_worker(w) for w in ("prefill-0", "decode-12", "router")] == ["P0", "D12", "router"]


def test_series_percentiles_look_at_the_window_only() -> None:
    series = BucketSeries()
    for index in range(100):
        series.add(1000.0 + index, float(index))
    assert series.percentiles(1099.4, 10.0, 0.0, 1.0) == (90.0, 99.0)
    assert series.percentiles(2000.0, 10.0, 0.5) == (None,)


def test_series_memory_is_bounded() -> None:
    series = BucketSeries()
    for index in range(4 * MAX_VALUES):
        series.add(1000.0, float(index))
    assert len(series.window(1000.0, 1.0)) < MAX_VALUES
    assert series.percentiles(1000.0, 1.0, 0.5)[0] == pytest.approx(2 * MAX_VALUES, rel=0.02)
    for index in range(2 * NUM_BUCKETS):
        series.add(1000.0 + index * BUCKET_S, 1.0)
    assert series.total(1000.0 + 2 * NUM_BUCKETS * BUCKET_S, 1e6) == pytest.approx(NUM_BUCKETS, abs=2)


def test_a_span_is_spread_without_loss() -> None:
    series = BucketSeries()
    series.spread(1000.2, 1003.9, 370.0)
    assert series.total(1004.0, 10.0) == pytest.approx(370.0)
    assert series.total(1001.9, 1.0) == pytest.approx(100.0)
    series.spread(1010.0, 1010.0, 5.0)
    assert series.total(1010.0, 1.0) == pytest.approx(5.0)


def test_columns_move_by_whole_columns_only() -> None:
    first, later = ColumnGrid(1000.0, 120.0, 50), ColumnGrid(1000.9, 120.0, 50)
    assert set(later.firsts) & set(first.firsts)
    assert all((a - b) % first.buckets == 0 for a in later.firsts for b in first.firsts[:1])
    assert len(first.firsts) <= 50
    assert first.column_of(1000.0) == len(first.firsts) - 1
    assert first.column_of(800.0) is None


@pytest.mark.parametrize("ascii_mode", [False, True])
@pytest.mark.parametrize("make", [itl_chart, ttft_chart, kv_chart])
def test_charts_fill_exactly_their_size(state: ViewState, make: object, ascii_mode: bool) -> None:
    assert callable(make)
    for width, height in ((36, 7), (58, 12), (200, 60)):
        text = plot_chart(make(state, END_OF_STORY, 2 * width), width, height, ascii_mode=ascii_mode)
        lines = text.plain.split("\n")
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        assert text.plain.isascii() == ascii_mode
        assert all(letter in lines[0] for letter in "bs")
    strip = strip_line(make(state, END_OF_STORY, strip_columns(80)), 80, ascii_mode=ascii_mode)
    assert strip.cell_len == 80
    assert {"b", "K", "s"} <= set(strip.plain.split("|")[1])


def test_an_empty_chart_can_be_drawn() -> None:
    text = plot_chart(itl_chart(ViewState(), 0.0, 100), 60, 10, ascii_mode=False)
    assert len(text.plain.split("\n")) == 10


def places(lines: list[str], words: list[str]) -> list[tuple[str, int, int]]:
    return [(word, y, line.index(word)) for word in words for y, line in enumerate(lines) if word in line]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_header_stands_still_when_numbers_change(state: ViewState, width: int) -> None:
    words = ["wait", "done", "fail", "fallback", "retry", "migr", "rho"]
    before = header_lines(ViewState(), 0.0, width, OwnCost()).plain.split("\n")
    after = header_lines(state, END_OF_STORY, width, OwnCost(99.0, 1234.0, 10**9)).plain.split("\n")
    assert places(before, words) == places(after, words)
    assert len(places(after, words)) >= len(words)
    assert max(map(len, before + after)) <= width


def test_worker_lines_fit_and_say_the_state_in_words(state: ViewState) -> None:
    for width in (78, 98, 158):
        lines = worker_lines(state, END_OF_STORY, width, 12, ascii_mode=True)
        assert all(line.cell_len <= width for line in lines)
        assert all(line.plain.isascii() for line in lines)
    narrow = worker_lines(state, END_OF_STORY, 78, 4, ascii_mode=True)
    assert [line.plain.split()[0] for line in narrow] == ["router", "prefill-0", "`->", "decode-0"]
    assert len(worker_lines(state, END_OF_STORY, 78, 3, ascii_mode=True)) == 3  # the link line gives way
    assert isinstance(narrow[0], Text)


def test_a_worker_says_how_often_it_preempted() -> None:
    folded = ViewState()
    for event in story():
        folded.fold(event)
    for width in (98, 158):
        lines = worker_lines(folded, END_OF_STORY, width, 20, ascii_mode=True)
        assert not any("preempted" in line.plain for line in lines)
    folded.fold(
        WorkerStats(at=END_OF_STORY, worker_id="decode-0", role="decode", total_blocks=9, preemptions=12)
    )
    for width in (98, 158):
        lines = worker_lines(folded, END_OF_STORY, width, 20, ascii_mode=True)
        (told,) = (line.plain for line in lines if "preempted" in line.plain)
        assert "preempted 12" in told
        assert len(told) <= width


def test_the_action_table_is_whole() -> None:
    for where in (LIVE, REPLAY):
        for page in {action.page for action in ACTIONS}:
            there = [action for action in actions_of(where) if action.page == page and action.keys]
            keys = [key for action in there for key in action.keys.split(",")]
            assert len(keys) == len(set(keys)), (where, page)
    keys = [key for action in actions_of(LIVE) for key in action.keys.split(",")]
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    assert {"b", "k", "i", "m", "s", "e", "q", "p", "z", "a", "L", "question_mark", "ctrl+c"} <= set(keys)
    assert not {"ctrl+q", "ctrl+z"} & set(keys)


def test_the_footer_fits_and_has_the_fixed_keys() -> None:
    for width in (80, 120, 160):
        text = footer_text(width, read_only=False)
        assert len(text) == width
        assert all(f" {key} " in f" {text} " for key in "?bkimseq")
    assert " b " not in footer_text(160, read_only=True)


def test_the_readme_has_the_action_tables_keys() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert readme_key_table() in readme  # else: make pictures
    only_replay = readme_key_table(REPLAY).splitlines()
    assert len(only_replay) == sum(action.where == REPLAY for action in ACTIONS) + 2
    assert "| `space` `p` | Play, pause: go on from here, or stop here |" in only_replay


@pytest.mark.parametrize("where", [LIVE, REPLAY])
def test_help_has_a_row_per_action(where: str) -> None:
    actions = actions_of(where)
    assert len(help_rows(actions)) == len(actions)
    assert {action.title for action in actions if not action.page} <= {row[1] for row in help_rows(actions)}


def test_reasons_of_a_pick_that_are_too_long_for_one_line_stand_in_two() -> None:
    folded = ViewState()
    for event in story():
        folded.fold(event)
    folded.picks.append(
        RequestDispatched(
            at=1.0, request_id="rfa29ef00", attempt=1, mode="disagg", codec="raw", prefill_worker="prefill-0",
            prefill_reason="only prefill worker (4500 tokens queued)", decode_worker="decode-0",
            decode_reason="only decode worker with room (10922 blocks free)",
        )
    )  # fmt: skip
    plain = [line.plain.rstrip() for line in worker_lines(folded, END_OF_STORY, 98, 12, ascii_mode=False)]
    assert plain[-2:] == [
        " picks rfa29ef P0: only prefill worker (4500 tokens queued)",
        "               D0: only decode worker with room (10922 blocks free)",
    ]
