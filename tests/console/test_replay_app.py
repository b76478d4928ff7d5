"""The replay as an operator drives it: keys, jumps, two runs, and that nothing in it can be changed."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from textual.pilot import Pilot

from cluster.events import Event, NoteAdded, encode_event
from cluster.run_log import write_events
from console.drill_verdict import VERDICT_FILE
from console.replay_app import ReplayApp
from console.replay_compare import CompareScreen
from console.replay_log import ReplayLog
from console.screens.help import HelpScreen
from tests.console.history import KILL_AT_S, numbered, story
from tests.console.plain import plain
from tests.console.test_replay_cursor import folded

EVENTS = story()


@dataclass
class Replay:
    app: ReplayApp
    pilot: Pilot[None]
    exported: list[str]

    @property
    def text(self) -> str:
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    @property
    def at_s(self) -> float:
        return self.app.replay.clock.position_s

    async def press(self, *keys: str) -> None:
        """Press keys, then let the replay arrive where they lead and be drawn."""
        await self.pilot.press(*keys)
        await self.arrive()

    async def type(self, text: str) -> None:
        """Answer a dialog."""
        for letter in text:
            await self.pilot.press({" ": "space"}.get(letter, letter))
        await self.press("enter")

    async def arrive(self) -> None:
        await self.pilot.pause()
        while self.app.replay.progress is not None:
            await self.pilot.pause(0.01)
        self.app.draw()
        await self.pilot.pause()

    def told(self, text: str) -> bool:
        return any(text in note.message for note in self.app._notifications)


@asynccontextmanager
async def replay(
    tmp_path: Path,
    *runs: Iterable[Event] | bytes,
    size: tuple[int, int] = (80, 24),
    at: str | None = "0",
    verdict: bytes = b"",
) -> AsyncIterator[Replay]:
    """Paused at ``at``; ``verdict`` lies beside the first run's log."""
    logs = []
    for number, events in enumerate(runs):
        path = tmp_path / f"run-{number}" / "events.jsonl"
        path.parent.mkdir()
        if isinstance(events, bytes):
            path.write_bytes(events)
        else:
            write_events(path, events)
        if verdict and not number:
            (path.parent / VERDICT_FILE).write_bytes(verdict)
        logs.append(ReplayLog(path))
    exported = list[str]()

    def export(wanted: str) -> Path:
        exported.append(wanted)
        return tmp_path / f"run.{wanted}"

    app = ReplayApp(logs, export, [log.path.parent.name for log in logs], refresh_s=3600.0)
    app.begin(at)
    app.replay.paused = True
    async with app.run_test(size=size, notifications=True) as pilot:
        shown = Replay(app, pilot, exported)
        await shown.arrive()
        yield shown
    for log in logs:
        log.close()


async def test_it_begins_when_the_cluster_was_ready(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS, at=None) as shown:
        assert shown.at_s == 3.0
        assert "prefill-0" in shown.text
        assert "PAUSED" in shown.text


@pytest.mark.parametrize("at", ["0", "100%"])
async def test_the_smallest_screen_says_that_it_is_a_replay_and_of_which_run(tmp_path: Path, at: str) -> None:
    async with replay(tmp_path, EVENTS, at=at) as shown:
        assert shown.text.startswith("REPLAY")
        assert "replay of run-0" in shown.text


async def test_it_shows_what_a_live_console_showed_at_that_moment(tmp_path: Path) -> None:
    content = b"".join(encode_event(event) + b"\n" for event in EVENTS)
    async with replay(tmp_path, EVENTS) as shown:
        for where in ("0:20", "0:35", "0:05", "100%"):
            await shown.press("g")
            await shown.type(where)
            log = shown.app.replay.tracks[0].log
            expected = folded(content[: log.offset_at(1000.0 + shown.at_s)])
            for state in (shown.app.state, expected):
                assert [request.itl_ms() for request in state.requests]  # computed when it is first looked at
            assert plain(shown.app.state) == plain(expected)
            assert shown.app.now == 1000.0 + shown.at_s


async def test_space_plays_and_pauses(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS) as shown:
        await shown.pilot.press("space")
        while shown.at_s < 0.2:
            await shown.pilot.pause(0.01)
        shown.app.draw()
        assert shown.app.state.num_events > 0
        await shown.press("space")
        stopped_at = shown.at_s
        await shown.pilot.pause(0.05)
        assert shown.at_s == stopped_at
        assert "PAUSED" in shown.text


async def test_one_task_moves_the_clock(tmp_path: Path) -> None:
    """A second one would play everything twice as fast as it says."""
    async with replay(tmp_path, EVENTS) as shown:
        assert [worker.name for worker in shown.app.workers] == ["feed"]


async def test_it_stops_at_the_end_and_plays_from_the_beginning_again(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS, at="100%") as shown:
        assert "END" in shown.text
        await shown.pilot.press("space")
        assert shown.at_s < shown.app.replay.clock.length_s


async def test_arrows_go_by_seconds_and_home_and_end_to_the_ends(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS, at="10") as shown:
        await shown.press("right", "right", "left")
        assert shown.at_s == 11.0
        await shown.press("end")
        assert shown.at_s == pytest.approx(shown.app.replay.clock.length_s)
        assert shown.app.state.num_events == len(EVENTS)
        await shown.press("home")
        assert shown.at_s == 0.0


async def test_comma_and_full_stop_go_by_one_event(tmp_path: Path) -> None:
    together = [*EVENTS[:50], *(NoteAdded(at=EVENTS[49].at, text=f"note {n}") for n in range(3))]
    async with replay(tmp_path, together, size=(160, 45)) as shown:
        await shown.press("home")
        counts = []
        for _ in together:
            await shown.press("full_stop")
            counts.append(shown.app.state.num_events)
        first = counts[0]
        assert counts[:-1] == [min(first + n, len(together)) for n in range(len(together) - 1)]
        await shown.press("comma", "comma")
        assert shown.app.state.num_events == len(together) - 2
        assert "#51 note_added" in shown.text


async def test_brackets_go_from_mark_to_mark_and_say_which(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS, at="20") as shown:
        await shown.press("right_square_bracket")
        assert shown.at_s == pytest.approx(KILL_AT_S - 0.01)
        assert shown.told("kill prefill-0")
        await shown.press("left_square_bracket")
        assert shown.at_s == 15.0
        await shown.press("end", "right_square_bracket")
        assert shown.told("no mark after this")


async def test_g_goes_to_the_next_event_of_a_kind(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS) as shown:
        await shown.press("g")
        await shown.type("fell")
        assert sum(shown.app.state.requests.fallbacks.values()) == 1
        assert shown.at_s == pytest.approx(KILL_AT_S + 0.02)
        await shown.press("g")
        await shown.type("fell_back")
        assert shown.told("no fell_back after this")
        await shown.press("g")
        await shown.type("request_failed")
        assert shown.told("this run has no event request_failed")
        await shown.press("g")
        await shown.type("never")
        assert shown.told("'never' is no place in the run; allowed: 1:23")


async def test_plus_and_minus_change_the_speed(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS) as shown:
        await shown.press("plus", "plus", "equals_sign", "minus")
        assert "x4 " in shown.text


@pytest.mark.parametrize("key", ["b", "m", "i", "s", "k", "a", "x"])
async def test_keys_that_would_change_a_cluster_say_that_this_is_a_replay(tmp_path: Path, key: str) -> None:
    async with replay(tmp_path, EVENTS, at="30") as shown:
        await shown.press(key)
        for worker in list(shown.app.workers):
            if worker.name != "feed":
                await worker.wait()
        assert shown.told("this is a replay; nothing in it can be changed")
        assert len(shown.app.screen_stack) == 1
        assert not shown.app.state.feed.newest("faults", text="this is a replay")


async def test_the_panels_work_as_live(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS, at="100%") as shown:
        await shown.press("2", "z")
        assert "2 requests" in shown.text
        await shown.press("escape", "question_mark")
        assert isinstance(shown.app.screen, HelpScreen)
        assert "Play, pause" in shown.text
        assert "Burst" not in shown.text  # nor anything else that does nothing here
        assert "Break a process" not in shown.text
        await shown.press("escape", "e", "c")
        assert shown.exported == ["csv"]


async def test_two_runs_stand_side_by_side_at_the_same_time_after_ready(tmp_path: Path) -> None:
    slow_start = [event for event in story(20.0, rate_per_s=4.0, at=5000.0)]
    late = [NoteAdded(at=4990.0, text="a long start"), *slow_start]
    async with replay(tmp_path, EVENTS, late, at="100%") as shown:
        assert isinstance(shown.app.screen, CompareScreen)
        first, second = shown.app.replay.tracks
        assert first.log.ready_at is not None
        assert second.log.ready_at is not None
        assert first.log.ready_at - first.zero_at == second.log.ready_at - second.zero_at == 13.0
        assert "ended at" in shown.text
        finished = [track.cursor.state.requests.finished for track in shown.app.replay.tracks]
        row = next(line for line in shown.text.splitlines() if "  finished" in line)
        assert row.split()[2:4] == [str(count) for count in finished]
        await shown.press("c")
        assert "2 requests" in shown.text
        assert shown.app.state is first.cursor.state
        await shown.press("c")
        assert shown.app.state is second.cursor.state
        await shown.press("c")
        assert isinstance(shown.app.screen, CompareScreen)


async def test_compare_without_a_second_run_says_how(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS) as shown:
        await shown.press("c")
        assert shown.told("pdconsole replay RUN --with RUN")


async def test_damage_hostile_text_and_unknown_kinds_are_survived_and_told(tmp_path: Path) -> None:
    lines = [encode_event(event) + b"\n" for event in EVENTS]
    lines.insert(30, b'{"type":"from_the_future","at":1004}\n')
    lines.insert(60, b"\xff\xfe[red]\x1b[2J\n")
    lines.append(encode_event(NoteAdded(at=1040.0, text="[/bold] [link=x]\x1b]0;own\x07 \u202e[red")) + b"\n")
    async with replay(tmp_path, b"".join(lines) + b'{"type":"note_ad', at="100%", size=(160, 45)) as shown:
        assert shown.app.state.num_events == len(EVENTS) + 1
        await shown.press("4", "f", "z")
        assert "log line 31 passed over" in shown.text
        assert "log line 61 passed over" in shown.text
        assert "\x1b" not in shown.text


async def test_q_leaves_without_asking(tmp_path: Path) -> None:
    async with replay(tmp_path, EVENTS) as shown:
        await shown.pilot.press("q")
        await shown.pilot.pause()
    assert shown.app.return_code == 0


VERDICT = b'{"drill": "burst", "verdict": "pass", "headline": "all is well"}'


@pytest.mark.parametrize("has_note", [True, False])
async def test_a_verdict_is_shown_from_when_it_was_said(tmp_path: Path, has_note: bool) -> None:
    """Never one from the future, though the run's directory has it from the start."""
    said = NoteAdded(at=EVENTS[0].at + 20.0, text="drill burst PASS: all is well")
    events = numbered([*EVENTS, said] if has_note else EVENTS)
    async with replay(tmp_path, events, size=(160, 45), at="19", verdict=VERDICT) as shown:
        panel = shown.app._screen._verdict
        assert panel.drill is None
        await shown.press("g")
        await shown.type("21")
        assert (panel.drill is not None) == has_note
        await shown.press("end")
        assert panel.drill is not None
        assert "burst PASS" in shown.text
        await shown.press("home")
        assert panel.drill is None
