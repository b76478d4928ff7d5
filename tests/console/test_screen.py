"""The screen at its sizes, as text."""

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from textual.widgets import DataTable

from cluster.events import (
    Event,
    FaultInjected,
    NoteAdded,
    RequestArrived,
    RequestFinished,
    RunStopped,
    WorkerExited,
)
from console.feed import SLICE_BYTES
from console.panels.line_view import ChoiceLines
from console.screens.main import layout_for
from tests.console.harness import END_OF_STORY, console
from tests.console.history import numbered, request, start, story


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return story()


@pytest.mark.parametrize(
    ("size", "layout"),
    [((79, 24), "tiny"), ((80, 23), "tiny"), ((80, 24), "narrow"), ((119, 50), "narrow"), ((160, 29), "narrow"),
     ((120, 30), "wide"), ((160, 45), "wide")],
)  # fmt: skip
def test_layout_for(size: tuple[int, int], layout: str) -> None:
    assert layout_for(*size) == layout


async def test_80x24_is_complete(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events) as shown:
        lines = shown.lines
        assert [len(line) for line in lines] == [80] * 24
        assert lines[0].startswith("pdconsole 10gbe    | DISAGG | raw  | netns  9.42/10 Gb/s")
        assert lines[0].endswith("00:00:40")
        assert "fallback   1" in lines[1]
        assert "strand   0" in lines[1]
        text = shown.text
        for panel in ("1 workers and links", "2 requests", "4 events"):
            assert panel in text
        for strip in ("ITL p99 ms", "TTFT p99 s", "KV MB/s"):
            assert strip in text
        assert "router     * busy" in text
        assert "└─> decode-0  9.42/10 Gb/s" in text
        assert "rd00000 prefill   8,000" in lines[10]
        assert lines[-1].startswith(" ? help  b burst  k kill")
        assert "q quit" in lines[-1]


@pytest.mark.parametrize("size", [(120, 36), (160, 45)])
async def test_wide_screens_have_charts(tmp_path, events, size) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events, size) as shown:
        lines = shown.lines
        assert [len(line) for line in lines] == [size[0]] * size[1]
        text = shown.text
        assert "3 ITL ms  p50" in text
        assert text.count("-120s") == 3
        assert "ITL p99 ms" not in text  # no strips beside charts
        assert "own cpu" in lines[1]
        assert "lag" in lines[1]
        chart_rows = [line[-30:] for line in lines if "┤" in line[-60:]]
        assert any("b" in row and "K" in row for row in chart_rows)


async def test_160x45_uses_its_room(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events, (160, 45)) as shown:
        text = shown.text
        for word in (
            "WAIT",
            "PREFILL",
            "EXPOSED",
            "pid 4399",
            "restarts 1",
            "B* 9.1 MB/s = 3,072 B/token x 2,961 tok/s",
        ):
            assert word in text
        assert "P0: least queued (0) | D0: most free blocks (1245)" in text


async def test_too_small_says_what_it_needs_and_has(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events, (60, 20)) as shown:
        assert "pdconsole needs 80x24; this terminal is 60x20" in shown.text
        assert "q quit" in shown.text
        await shown.press("q")
        assert "Stop the cluster?" in shown.text


async def test_resizing_changes_the_layout_and_back(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events) as shown:
        for width, height in ((160, 45), (60, 20), (120, 36), (80, 24)):
            await shown.pilot.resize_terminal(width, height)
            await shown.settle()
            await shown.settle(charts=True)
            assert [len(line) for line in shown.lines] == [width] * height
            assert ("-120s" in shown.text) == (width >= 120)
            assert ("needs 80x24" in shown.text) == (width < 80)
            assert ("rd00000" in shown.text) == (width >= 80)


async def test_ascii_mode_draws_nothing_else(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events, (160, 45), ascii_only=True) as shown:
        assert {c for c in shown.text if not c.isascii()} == set()
        shown.app.tell("a toast")
        await shown.wait_for("a toast")
        await shown.pilot.resize_terminal(80, 24)
        for key in ("question_mark", "k", "l", "B", "q", "enter", "a", "e", "L", "slash", "5"):
            await shown.press(key)
            assert {c for c in shown.text if not c.isascii()} == set()
            await shown.press("escape")
        await shown.press("1", "down", "enter")
        assert "held 512 of 2,048 [####" in shown.text
        assert {c for c in shown.text if not c.isascii()} == set()


async def test_states_are_words_without_colour(tmp_path, events, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("NO_COLOR", "1")
    more = WorkerExited(at=1039.9, worker_id="decode-0", role="decode", pid=4303, signal=9, cause="crash")
    async with console(tmp_path, [*events, more], (80, 24)) as shown:
        assert "decode-0   - down" in shown.text
        assert "signal 9" in shown.text
        drawn = [segment.style for strip in shown.app.screen._compositor.render_strips() for segment in strip]
        colours = [
            colour
            for style in drawn
            if style is not None
            for colour in (style.color, style.bgcolor)
            if colour
        ]
        assert {colour.name for colour in colours} == {"default"}


async def test_markup_and_control_characters_in_data_are_harmless(tmp_path) -> None:  # type: ignore[no-untyped-def]
    evil = "[/x][bold]\x1b[31m\x07\r\n"
    history = [
        *start(),
        *request(f"{evil}r1", 1010.0, label=evil),
        NoteAdded(at=1011.0, text=evil),
        FaultInjected(at=1011.1, fault="kill", target=evil, cause=evil),
        RequestArrived(
            at=1012.0, request_id="[/x]", prompt_tokens=5, max_tokens=5, label=evil, client_id=evil
        ),
    ]
    async with console(tmp_path, numbered(history), (160, 45)) as shown:
        assert "note: [/x][bold]?[31m???" in shown.text
        assert "[/x]" in shown.text
        shown.app.tell(evil, ok=False)
        await shown.settle()
        await shown.wait_for("[/x][bold]?[31m")
        await shown.press("enter")
        assert "client id [/x][bold]?" in shown.page()
        assert "\x1b" not in shown.text


async def test_a_long_backlog_is_read_in_slices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    history: list[Event] = start()
    for index in range(2000):
        history += request(f"r{index:05d}", 1010.0 + index * 0.05, output_tokens=128)
    assert len(history) > 45_000
    async with console(tmp_path, numbered(history)) as shown:
        size = shown.path.stat().st_size
        assert shown.app.state.num_events == len(history)
        assert shown.app.feed.slices >= size // SLICE_BYTES
        assert shown.app.screen.query_one(DataTable).row_count <= 200
        assert "done  2000" in shown.lines[1]
        await shown.press("question_mark")
        assert "Break a process" in shown.text


async def test_other_tasks_run_between_two_slices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, start()) as shown:
        history: list[Event] = []
        for index in range(400):
            history += request(f"r{index:05d}", 1010.0 + index * 0.05, output_tokens=64)
        seen: list[int] = []

        async def watch() -> None:
            while "r00399" not in shown.app.state.requests.done:
                seen.append(shown.app.state.num_events)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        await shown.append(numbered(history))
        await watcher
        steps = [b - a for a, b in pairwise(seen)]
        assert max(steps) < 1000  # a slice, never the whole backlog at once
        assert len(set(seen)) > 5


async def test_the_log_may_appear_later_and_grow(tmp_path) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, []) as shown:
        assert "waiting for the first process" in shown.text
        assert shown.lines[0].startswith("STARTING")
        await shown.append(numbered(start()))
        assert "cluster READY after 3.0 s" in shown.text
        await shown.append(request("r1", 1010.0)[:3])
        assert "r1      prefill" in shown.text
        await shown.append(request("r1", 1010.0)[3:])
        assert "r1      done" in shown.text


async def test_a_worker_without_news_says_so(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events, now=END_OF_STORY + 10) as shown:
        assert "prefill-0  * busy     no news for 11 s" in shown.text


async def test_the_cursor_stays_on_its_request(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events) as shown:
        await shown.press("down", "down")
        panel = shown.app.screen.query_one("#requests")
        selected = panel.selected_id  # type: ignore[attr-defined]
        await shown.append([RequestArrived(at=1039.99, request_id="rnew", prompt_tokens=3, max_tokens=1)])
        assert "rnew" in shown.text
        assert panel.selected_id == selected  # type: ignore[attr-defined]


async def test_nothing_moves_sideways(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, events) as shown:
        before = shown.lines
        big = msgspec.structs.replace
        finished = RequestFinished(
            at=1039.99, request_id="rd0000012345", finish_reason="stop", output_tokens=99_999, e2el_ms=1e6
        )
        await shown.append([big(finished, tpot_ms=999.0)])
        after = shown.lines
        for words in ("PHASE", "PROMPT", "ITL50/99", "OUTCOME"):
            where = [line.index(words) for line in before if words in line]
            assert where == [line.index(words) for line in after if words in line]


async def test_after_the_run_quit_does_not_ask(tmp_path, events) -> None:  # type: ignore[no-untyped-def]
    async with console(tmp_path, [*events, RunStopped(at=1040.0)]) as shown:
        assert shown.lines[0].startswith("STOPPED")
        await shown.pilot.press("q")
        await shown.pilot.pause()
        assert not shown.app.is_running or shown.app._exit


@pytest.mark.parametrize("height", [24, 28, 31, 34, 44])
async def test_toasts_leave_the_verdict_free(tmp_path: Path, events: list[Event], height: int) -> None:
    async with console(tmp_path, events, (80, height)) as shown:
        await shown.press("5")
        shown.app.tell(
            "drill kill-prefill FAIL: 6/6 finished, 5 fell back, 0 tokens differ, recovered after 3.10 s"
        )
        await shown.settle()
        toast = shown.app.screen.query_one("Toast")
        verdict = shown.app.screen.query_one("#verdict")
        assert toast.region.height > 0
        assert not toast.region.overlaps(verdict.region)


async def test_a_long_event_goes_on_in_a_second_line_where_lines_are_long(
    tmp_path: Path, events: list[Event]
) -> None:
    note = NoteAdded(at=END_OF_STORY, text=f"{'word ' * 22}end")
    async with console(tmp_path, [*events, note], (160, 45)) as shown:
        assert "word end" in shown.text
        assert shown.app.screen.query_one("#events", ChoiceLines).key
        await shown.press("4", "down", "up")
        await shown.press("f", "f")
        assert "word" not in shown.text
