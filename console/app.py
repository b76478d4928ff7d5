"""The Textual app: reads the run's log, draws it, sends commands. It starts and stops no process.

The caller stops the cluster after the app has returned, in a ``finally``.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, Final

from textual.app import SystemCommand
from textual.binding import BindingType
from textual.command import Provider
from textual.screen import Screen

from console.actions import LIVE, actions_of, bindings
from console.collector import COLLECT_S, Collector
from console.commands import CommandSink, SendCommand
from console.config import Config
from console.detail_pages import DetailPages
from console.drill_verdict import DrillVerdict, read_verdict
from console.feed import Feed, LogFeed
from console.feed_text import Line
from console.operator_commands import DRILL_GROUP, OperatorCommands
from console.own_cost import CPU_LIMIT_PERCENT, CpuMeter, OwnCost, RedrawPace
from console.palette_provider import ActionsProvider
from console.run_export import RunExport
from console.screens.dialog import Dialog, QuitDialog
from console.screens.help import HelpScreen
from console.screens.main import VERDICT, MainScreen, RequestChosen, WorkerChosen
from console.terminal_app import TerminalApp
from console.text_format import clean
from console.view_state import ViewState

SECOND_INTERRUPT_S: Final = 3.0
TOAST_S: Final = 4.0


class ConsoleApp(TerminalApp, inherit_bindings=False):
    """``export`` writes the run in a format ("jsonl", "csv") and returns the path; it may block and runs in a thread.

    After the run ``quit_choice`` says what is to be done with the cluster: "stop", or "detach", which leaves it alone
    and is what an attached console (``owns_cluster`` False) does unless told otherwise. ``return_code`` says how
    the console ended: 0, 1 after an error in it, 128 + n after a signal or a vanished terminal.
    """

    CSS_PATH = Path(__file__).with_name("console.tcss")
    TITLE = "pdconsole"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionsProvider}
    COMMAND_PALETTE_BINDING = "f12"  # the action table binds the keys people know
    WHERE: ClassVar[str] = LIVE
    """Which rows of the action table there are."""
    READ_ONLY: ClassVar[str] = "this console is read-only"
    CPU_LIMIT_PERCENT: ClassVar[float] = CPU_LIMIT_PERCENT
    """Of one core; above it the console draws less often."""

    def __init__(
        self,
        events_path: Path,
        send_command: SendCommand,
        export: Callable[[str], Path],
        run_name: str,
        read_only: bool = False,
        ascii_only: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float | None = None,
        config: Config | None = None,
        owns_cluster: bool = True,
        out_dir: Path | None = None,
    ) -> None:
        super().__init__(events_path.parent / "logs" / "console.log")
        config = config or Config(Path())
        self.actions = actions_of(self.WHERE, config.keymap)
        self.set_keymap(dict(config.keymap))
        self.theme = config.theme
        self.owns_cluster = owns_cluster
        self.quit_choice = "stop" if owns_cluster else "detach"
        self.state = ViewState()
        self.feed: Feed = LogFeed(events_path, self.state, self._alert)
        self.animation_level = "none"
        self._events_path = events_path
        self._out_dir = out_dir or events_path.parent  # for pictures of the screen
        self._export = RunExport(self, export)
        self._run_name = run_name
        self._read_only = read_only
        self._clock = clock
        self._refresh_s = refresh_s or 1.0 / config.redraws_per_s
        self._main = MainScreen(ascii_mode=ascii_only, read_only=read_only, actions=self.actions)
        self.send_command = send_command
        self._commands = OperatorCommands(
            self,
            events_path.parent,
            CommandSink(send_command, read_only=self.READ_ONLY if read_only else ""),
            selected=lambda: self._main.selected_worker,
        )
        self._pages = DetailPages(
            self, events_path.parent, ascii_mode=ascii_only, asks_workers=self.WHERE == LIVE
        )
        self._draws = 0
        self._pace = RedrawPace(1.0 / self._refresh_s, self.CPU_LIMIT_PERCENT)
        self._interrupted_at = -SECOND_INTERRUPT_S
        self._frozen_now = 0.0
        self._cpu = CpuMeter()
        self._collector = Collector()
        self.set_class(ascii_only, "-ascii")

    def get_default_screen(self) -> Screen[None]:
        return self._main

    def on_mount(self) -> None:
        self.end_on_signals()
        self._main.show_drill(self.last_verdict())
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        self.set_interval(self._refresh_s, self.tick)
        self._collector.start()
        self.set_interval(COLLECT_S, self._collector.collect)
        self.call_after_refresh(self.tick)

    def on_unmount(self) -> None:
        self._collector.stop()

    def last_verdict(self) -> DrillVerdict | None:
        """Of the last drill that is over."""
        return read_verdict(self._events_path.parent)

    # --- drawing -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Draw what is visible as often as that may cost, charts every second time."""
        if self.check_terminal() and self._pace.due(time.monotonic(), self._cpu.percent(), self.feed.lag_s):
            self._draws += 1
            self.draw(charts=self._draws % 2 == 1 or self._pace.is_lowered)

    def draw(self, *, charts: bool = True) -> None:
        """Draw the main screen and the dialog over it, if any."""
        now, cost = self.now, self.own_cost()
        if not self.state.run:
            self.state.run = self._run_name
        self._main.draw(self.state, now, cost, charts=charts)
        if isinstance(self.screen, Dialog):
            self.screen.draw(self.state, now)

    def own_cost(self) -> OwnCost:
        """What the console itself costs now."""
        return OwnCost(
            cpu_percent=self._cpu.percent(),
            loop_lag_ms=self.feed.lag_s * 1000,
            log_bytes=self.feed.log_bytes,
            redraws_per_s=self._pace.redraws_per_s,
            skipped_redraws=self._pace.skipped,
            paused=self.feed.paused,
            read_only=self._read_only,
        )

    @property
    def now(self) -> float:
        """The moment that is shown, on the log's clock."""
        return self._frozen_now if self.feed.paused else self.state.now(self._clock())

    # --- telling the operator ------------------------------------------------------------------------------------

    def tell(self, text: str, *, ok: bool = True) -> None:
        """A toast; a failure is a line of the feed too."""
        self.notify(clean(text), severity="information" if ok else "error", timeout=TOAST_S, markup=False)
        if not ok:
            self.state.add_failure(self.state.now(self._clock()), text)
            self.draw(charts=False)

    def _alert(self, line: Line) -> None:
        self.notify(
            clean(line.text),
            severity="information" if line.level == "good" else "warning",
            timeout=TOAST_S,
            markup=False,
        )

    # --- actions of the table ------------------------------------------------------------------------------------

    def action_send(self, action_id: str) -> None:
        self._commands.send(action_id)

    def action_ask(self, action_id: str) -> None:
        self._commands.ask(action_id)

    def action_drill(self) -> None:
        self._commands.drill()

    def action_heal(self) -> None:
        self._commands.heal()

    def show_drill(self, drill: DrillVerdict | None) -> None:
        """How the drill goes, or its verdict."""
        self._main.show_drill(drill)

    def stop_drill(self) -> None:
        self.workers.cancel_group(self, DRILL_GROUP)

    def focus_verdict(self) -> None:
        self._main.action_panel(VERDICT)

    def action_pause(self) -> None:
        if not self.feed.paused:
            self._frozen_now = self.state.now(self._clock())
        self.feed.paused = not self.feed.paused
        self.draw()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.actions))

    def action_logs(self) -> None:
        self._pages.open_log(self._main.selected_worker)

    def action_follow_request(self) -> None:
        self._pages.ask_request()

    def action_copy_id(self) -> None:
        self._copy(self._main.selected_worker or self._main.selected_request)

    def action_copy_curl(self) -> None:
        body = '{"prompt": "def read_lines(path):", "max_tokens": 40, "stream": true}'
        self._copy(f"curl -N {self.state.url}/v1/completions -d '{body}'" if self.state.url else "")

    def action_copy_run_dir(self) -> None:
        self._copy(str(self._events_path.parent))

    def _copy(self, text: str) -> None:
        if not text:
            self.tell("Copy: nothing is selected", ok=False)
            return
        self.copy_to_clipboard(text)
        self.tell(f"copied: {text}")

    def action_last_fallback(self) -> None:
        self._pages.open_last_victim()

    def action_export(self) -> None:
        self._export.begin()

    def action_picture(self) -> None:
        path = self._out_dir / f"screen-{int(self.state.since_start(self.state.last_at))}s.svg"
        try:
            self.save_screenshot(path.name, str(path.parent))
        except OSError as error:
            self.tell(f"Screenshot: {path}: {error.strerror}", ok=False)
        else:
            self.tell(f"screen written: {path}")

    async def action_quit(self) -> None:
        if self.state.stopped:
            self.exit()
        elif not isinstance(self.screen, QuitDialog):
            self.push_screen(QuitDialog(owns_cluster=self.owns_cluster), self._quit_chosen)

    async def action_interrupt(self) -> None:
        now = time.monotonic()
        again = now - self._interrupted_at < SECOND_INTERRUPT_S
        self._interrupted_at = now
        if again or isinstance(self.screen, QuitDialog):
            self.exit()
        else:
            await self.action_quit()

    def on_request_chosen(self, message: RequestChosen) -> None:
        self._pages.open_request(message.request_id)

    def on_worker_chosen(self, message: WorkerChosen) -> None:
        self._pages.open_worker(message.worker_id)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """None: the action table is all there is."""
        return ()

    def _quit_chosen(self, choice: str | None) -> None:
        if choice is not None:
            self.quit_choice = choice
            self.exit()
