"""The console over a finished run: the same screen and the same fold, moved along by a clock that obeys the operator.

Nothing here reaches a cluster: keys that would change one say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input, Static

from cluster.control import Command, CommandDone
from console.actions import REPLAY, Action, bindings, footer_text
from console.app import TOAST_S, ConsoleApp
from console.config import Config
from console.drill_verdict import PASS, DrillVerdict, end_of_drill, read_verdict
from console.own_cost import OwnCost
from console.replay_bar import bar_line
from console.replay_clock import GO_TO_HINT, ReplayClock
from console.replay_compare import CompareScreen, Side
from console.replay_feed import ReplayFeed, overlay
from console.replay_log import LogMark, ReplayLog
from console.screens.dialog import TextDialog
from console.screens.help import HelpScreen
from console.screens.main import MainScreen
from console.text_format import clean, format_stamp
from console.view_snapshot import Store

_WHEN_ALONE: Final = frozenset({"step_time", "go_end"})
"""Actions on keys that dialogs and fields for text need for themselves."""


class ReplayScreen(MainScreen):
    """The main screen with the replay's line above the footer."""

    DEFAULT_CSS = "#replay { height: 1; } .-tiny #replay { display: none; }"

    def __init__(self, *, ascii_mode: bool, read_only: bool, actions: Sequence[Action]) -> None:
        super().__init__(ascii_mode=ascii_mode, read_only=read_only, actions=actions)
        self._bar = Static("", id="replay", markup=False)

    def compose(self) -> ComposeResult:
        for widget in super().compose():
            if widget is self._footer:
                yield self._bar
            yield widget

    def show_name(self, run: str) -> None:
        """Whose run is shown; the header has no room for it on a small terminal."""
        self._workers.border_title = Text(f"1 workers and links   replay of {clean(run)}")

    def show_bar(self, line: Text) -> None:
        self._bar.update(line, layout=False)


class ReplayApp(ConsoleApp, inherit_bindings=False):
    """``logs``: one run, or two to compare; ``stores``: where each one's snapshots are kept. The caller closes them."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(REPLAY)]
    WHERE: ClassVar[str] = REPLAY
    CPU_LIMIT_PERCENT: ClassVar[float] = float("inf")  # nobody is disturbed
    READ_ONLY: ClassVar[str] = "this is a replay; nothing in it can be changed"

    def __init__(
        self,
        logs: list[ReplayLog],
        export: Callable[[str], Path],
        run_names: list[str],
        ascii_only: bool = False,
        *,
        refresh_s: float | None = None,
        config: Config | None = None,
        stores: Sequence[Store | None] = (),
    ) -> None:
        super().__init__(
            logs[0].path, _refuse, export, run_names[0], read_only=True, ascii_only=ascii_only,
            refresh_s=refresh_s, config=config,
        )  # fmt: skip
        self._run_names = run_names
        tracks = overlay(logs, stores)
        length_s = max(track.log.last_at - track.zero_at for track in tracks)
        self.replay = ReplayFeed(tracks, ReplayClock(length_s), self._moved)
        self.feed = self.replay
        self._screen = ReplayScreen(ascii_mode=ascii_only, read_only=True, actions=self.actions)
        self._main = self._screen
        self._compare = CompareScreen(run_names, ascii_mode=ascii_only) if len(logs) > 1 else None
        self._shown = 0  # which run's screen is drawn where both are not
        self._marks = [
            [(mark.at - track.zero_at, mark.letter) for mark in track.log.marks] for track in tracks
        ]

        self._verdicts = [_verdict_of(track.log) for track in tracks]
        self._verdict = self.last_verdict()

    @property
    def now(self) -> float:
        return self.replay.tracks[self._shown].zero_at + self.replay.clock.position_s

    def begin(self, where: str | None) -> None:
        """Where the replay starts; None: when the cluster was ready. Raises ValueError with one line for the user."""
        first = self.replay.tracks[0]
        if where is not None:
            self.replay.go_where(where)
        elif first.log.ready_at is not None:
            self.replay.seek(first.log.ready_at - first.zero_at)
        self.replay.paused = False

    def on_mount(self) -> None:
        """Textual calls that of ``ConsoleApp`` too."""
        if self._compare is not None:
            self.push_screen(self._compare)

    def draw(self, *, charts: bool = True) -> None:
        self.state = self.replay.glimpse or self.replay.tracks[self._shown].cursor.state
        is_under_way = self.replay.progress is not None and self.replay.glimpse is None
        if is_under_way and self.replay.tracks[0].cursor.offset:
            self._show_bar()  # the rest of the screen waits for the moment that is sought
        elif self._compare is not None and self._compare in self.screen_stack:
            self._draw_both(self._compare)
        else:
            if self.last_verdict() != self._verdict:
                self._verdict = self.last_verdict()
                self._screen.show_drill(self._verdict)
            super().draw(charts=charts)
            self._screen.show_name(self._run_names[self._shown])
            self._show_bar()

    def last_verdict(self) -> DrillVerdict | None:
        """The one that the run's directory has, from the moment on at which it was said."""
        verdict, at = self._verdicts[self._shown]
        return verdict if self.now >= at else None

    def own_cost(self) -> OwnCost:
        share = self.replay.progress if self.replay.glimpse is not None else None
        return replace(super().own_cost(), replay=True, read_share=share)

    def tell(self, text: str, *, ok: bool = True) -> None:
        """A toast only: the feed is the log's."""
        self.notify(clean(text), severity="information" if ok else "error", timeout=TOAST_S, markup=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        is_alone = self.screen in (self._screen, self._compare) and not isinstance(self.focused, Input)
        if action in _WHEN_ALONE and not is_alone:
            return False
        return super().check_action(action, parameters)

    # --- actions of the table ------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Without the keys that would change a cluster."""
        self.push_screen(HelpScreen([action for action in self.actions if not action.changes_cluster]))

    def action_play(self) -> None:
        self.replay.clock.toggle()
        self.draw()

    def action_speed(self, steps: int) -> None:
        self.replay.clock.change_speed(steps)
        self.draw(charts=False)

    def action_step_time(self, seconds: int) -> None:
        self._seek(self.replay.clock.position_s + seconds)

    def action_step_event(self, step: int) -> None:
        log, position = self.replay.tracks[0].log, self.replay.position
        self._go_to(log.after(position) if step > 0 else log.before(position))

    def action_step_mark(self, step: int) -> None:
        log, position = self.replay.tracks[0].log, self.replay.position
        mark = log.next_mark(position) if step > 0 else log.previous_mark(position)
        if mark is None:
            self.tell(f"no mark {'after' if step > 0 else 'before'} this", ok=False)
        else:
            self._tell_mark(mark)
            self._go_to(mark.offset)

    def action_go_end(self, share: int) -> None:
        self._seek(share * self.replay.clock.length_s)

    def action_go_to(self) -> None:
        self.push_screen(TextDialog(f"Go to ({GO_TO_HINT})"), self._go_where)

    def action_compare(self) -> None:
        """Both, the first alone, the second alone."""
        if self._compare is None:
            self.tell("Compare: start with two runs: pdconsole replay RUN --with RUN", ok=False)
            return
        if self._compare in self.screen_stack:
            self.pop_screen()
            self._shown = 0
        elif self._shown == 0:
            self._shown = 1
        else:
            self._shown = 0
            self.push_screen(self._compare)
        self.call_after_refresh(self.draw)

    async def action_quit(self) -> None:
        self.exit()

    # --- moving --------------------------------------------------------------------------------------------------

    def _go_where(self, text: str | None) -> None:
        if not text:
            return
        try:
            note = self.replay.go_where(text)
        except ValueError as error:
            self.tell(str(error), ok=False)
            return
        if note:
            self.tell(note)
        self.draw(charts=False)

    def _seek(self, position_s: float) -> None:
        self.replay.clock.playing = self.replay.clock.playing and position_s < self.replay.clock.length_s
        self.replay.seek(position_s)
        self.draw(charts=False)

    def _go_to(self, offset: int) -> None:
        self.replay.clock.playing = False
        self.replay.go_to(offset)
        self.draw(charts=False)

    def _moved(self) -> None:
        self.draw()

    def _tell_mark(self, mark: LogMark) -> None:
        at = format_stamp(mark.at - self.replay.tracks[0].zero_at)
        self.tell(f"{at} {mark.text or mark.letter}")

    def _draw_both(self, screen: CompareScreen) -> None:
        at_s = self.now - self.replay.tracks[self._shown].zero_at
        sides = [
            Side(track.cursor.state, track.zero_at + at_s, goes_on=track.cursor.offset < track.log.end)
            for track in self.replay.tracks
        ]
        footer = footer_text(self.size.width, read_only=True, actions=self.actions)
        screen.show(sides, Text(footer, no_wrap=True))
        self._show_bar()

    def _show_bar(self) -> None:
        for screen in (self._screen, self._compare):
            if screen is not None and screen.is_running:
                screen.show_bar(self._bar())

    def _bar(self) -> Text:
        replay, clock = self.replay, self.replay.clock
        progress = replay.progress
        shown = replay.tracks[self._shown]
        word = (
            f"SEEK {progress * 100:3.0f}%" if progress is not None
            else "PLAYING" if clock.playing else "END" if clock.at_end else "PAUSED"
        )  # fmt: skip
        indexed = min(track.indexed for track in replay.tracks)
        kind = shown.log.kind_before(shown.cursor.offset)
        note = (
            f"indexing {indexed * 100:.0f}%"
            if indexed < 0.98
            else f"#{shown.cursor.state.num_events:,} {kind}"
        )
        return bar_line(
            self.size.width, word=word, speed=clock.speed, position_s=clock.position_s, length_s=clock.length_s,
            marks=self._marks[self._shown], note=note, ascii_mode=self.has_class("-ascii"),
        )  # fmt: skip


def _verdict_of(log: ReplayLog) -> tuple[DrillVerdict | None, float]:
    """The run's last verdict and when it was said: by a note where the cluster went on, else with the log's end."""
    verdict = read_verdict(log.path.parent)
    if verdict is None:
        return None, log.last_at
    end = end_of_drill(verdict.drill, is_pass=verdict.verdict == PASS)
    said = [mark.at for mark in log.marks if end in mark.text]
    return verdict, said[-1] if said else log.last_at


async def _refuse(command: Command) -> CommandDone:
    """Nothing gets here: the sink of a read-only console refuses first."""
    return CommandDone(command_id=0, ok=False, message=f"{type(command).__name__}: {ReplayApp.READ_ONLY}")
