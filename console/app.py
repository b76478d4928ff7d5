"""The Textual app: reads the run's log, draws it, sends commands. It starts and stops no process.

The caller stops the cluster after the app has returned, in a ``finally``.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from rich.console import RenderableType
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.command import Provider
from textual.screen import Screen

from cluster.control import AddNote, Command, KillWorker
from console.actions import bindings, find_action
from console.commands import CommandSink, SendCommand
from console.crash import describe_crash
from console.feed import LogFeed
from console.feed_text import Line
from console.own_cost import CpuMeter, OwnCost
from console.palette_provider import ActionsProvider
from console.screens.dialog import Choice, ChoiceDialog, Dialog, QuitDialog, TextDialog
from console.screens.help import HelpScreen
from console.screens.logs import LogScreen
from console.screens.main import MainScreen, RequestChosen
from console.screens.pick_target import PickTarget
from console.screens.request_detail import RequestDetail
from console.terminal import ConsoleDriver
from console.text_format import clean
from console.view_state import ViewState

REFRESH_S: Final = 0.5
SLOW_LAG_S: Final = 0.15
"""From this loop lag on the console draws half as often: the cluster needs the cores."""
SECOND_INTERRUPT_S: Final = 3.0
TOAST_S: Final = 4.0
EXIT_GONE: Final = 128 + signal.SIGHUP
SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_FORMATS: Final = (
    Choice("j", "jsonl", "JSON lines: every event"),
    Choice("c", "csv", "CSV: one row per request"),
)


class ConsoleApp(App[None], inherit_bindings=False):
    """``export`` writes the run in a format ("jsonl", "csv") and returns the path; it may block and runs in a thread.

    After the run ``quit_choice`` says what the operator wants done with the cluster ("stop"), ``return_code`` how
    the console ended: 0, 1 after an error in it, 128 + n after a signal or a vanished terminal.
    """

    CSS_PATH = Path(__file__).with_name("console.tcss")
    TITLE = "pdconsole"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionsProvider}
    COMMAND_PALETTE_BINDING = "f12"  # the action table binds the keys people know

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
        refresh_s: float = REFRESH_S,
    ) -> None:
        super().__init__(driver_class=ConsoleDriver)
        self.quit_choice = "stop"
        self.crash = ""
        self.state = ViewState()
        self.feed = LogFeed(events_path, self.state, self._alert)
        self.sink = CommandSink(send_command, read_only=read_only)
        self.animation_level = "none"
        self._events_path = events_path
        self._export = export
        self._export_format = ""
        self._run_name = run_name
        self._read_only = read_only
        self._clock = clock
        self._refresh_s = refresh_s
        self._main = MainScreen(ascii_mode=ascii_only, read_only=read_only)
        self._ticks = 0
        self._interrupted_at = -SECOND_INTERRUPT_S
        self._frozen_now = 0.0
        self._cpu = CpuMeter()
        self.set_class(ascii_only, "-ascii")

    def get_default_screen(self) -> Screen[None]:
        return self._main

    def on_mount(self) -> None:
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in SIGNALS:
                loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        self.set_interval(self._refresh_s, self.tick)
        self.call_after_refresh(self.tick)

    # --- drawing -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Draw what is visible: text twice a second, charts once."""
        self._ticks += 1
        if self.terminal_gone:
            self.exit(return_code=EXIT_GONE)
            return
        if isinstance(self._driver, ConsoleDriver) and self._driver.writer.take_recovered():
            self.screen.refresh(layout=True)
        if self._ticks % 2 and self.feed.lag_s > SLOW_LAG_S and self._ticks > 1:
            return
        self.draw(charts=self._ticks % 2 == 1 or self.feed.lag_s > SLOW_LAG_S)

    def draw(self, *, charts: bool = True) -> None:
        """Draw the main screen and the dialog over it, if any."""
        now = self._frozen_now if self.feed.paused else self.state.now(self._clock())
        cost = OwnCost(
            cpu_percent=self._cpu.percent(),
            loop_lag_ms=self.feed.lag_s * 1000,
            log_bytes=self.feed.log_bytes,
            paused=self.feed.paused,
            read_only=self._read_only,
        )
        if not self.state.run:
            self.state.run = self._run_name
        self._main.draw(self.state, now, cost, charts=charts)
        if isinstance(self.screen, Dialog):
            self.screen.draw(self.state, now)

    @property
    def terminal_gone(self) -> bool:
        """The terminal that the app draws on was closed."""
        driver = self._driver
        if not isinstance(driver, ConsoleDriver):
            return False
        return driver.terminal_gone

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
        """Send the command of that row of the table."""
        action = find_action(action_id)
        if action.command is not None:
            self._deliver(action.command(self.state), action.title)

    def action_kill(self) -> None:
        if not self._refuse("kill"):
            self.push_screen(PickTarget(self.state), self._kill)

    def action_note(self) -> None:
        if not self._refuse("note"):
            self.push_screen(TextDialog("Note"), self._note)

    def action_pause(self) -> None:
        if not self.feed.paused:
            self._frozen_now = self.state.now(self._clock())
        self.feed.paused = not self.feed.paused
        self.draw()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_logs(self) -> None:
        workers = self.state.topology.by_role()
        if not workers:
            self.tell("Logs: no process has started yet", ok=False)
            return
        newest = max(workers, key=lambda worker: (worker.state != "ready", worker.state_at))
        ids = [worker.worker_id for worker in workers]
        self.push_screen(LogScreen(self._events_path.parent / "logs", ids, newest.worker_id))

    def action_export(self) -> None:
        if self._export_format:
            self._write_export(self._export_format)
        else:
            self.push_screen(ChoiceDialog("Export the run as", _FORMATS), self._write_export)

    def action_picture(self) -> None:
        path = self._events_path.parent / f"screen-{int(self.state.since_start(self.state.last_at))}s.svg"
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
            self.push_screen(QuitDialog(), self._quit_chosen)

    async def action_interrupt(self) -> None:
        now = time.monotonic()
        again = now - self._interrupted_at < SECOND_INTERRUPT_S
        self._interrupted_at = now
        if again or isinstance(self.screen, QuitDialog):
            self.exit()
        else:
            await self.action_quit()

    def on_request_chosen(self, message: RequestChosen) -> None:
        self.push_screen(RequestDetail(message.request_id))
        self.call_after_refresh(self.draw, charts=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """None: the action table is all there is."""
        return ()

    # --- what the dialogs chose ----------------------------------------------------------------------------------

    def _kill(self, command: KillWorker | None) -> None:
        if command is not None:
            self._deliver(command, f"{command.signal} {command.worker_id}")

    def _note(self, text: str | None) -> None:
        if text:
            self._deliver(AddNote(text=text), "Note")

    def _quit_chosen(self, choice: str | None) -> None:
        if choice is not None:
            self.quit_choice = choice
            self.exit()

    def _write_export(self, wanted: str | None) -> None:
        if wanted:
            self._export_format = wanted
            self.run_worker(self._export_in_thread(wanted), exit_on_error=True)

    async def _export_in_thread(self, wanted: str) -> None:
        try:
            path = await asyncio.to_thread(self._export, wanted)
        except OSError as error:
            self.tell(f"Export: {error}", ok=False)
        else:
            self.tell(f"export written: {path}")

    def _refuse(self, action_id: str) -> bool:
        reason = self.sink.refusal(find_action(action_id).title)
        if reason:
            self.tell(reason, ok=False)
        return bool(reason)

    def _deliver(self, command: Command, title: str) -> None:
        self.run_worker(self._send(command, title), exit_on_error=True)

    async def _send(self, command: Command, title: str) -> None:
        answer = await self.sink.deliver(command, title)
        self.tell(answer.message, ok=answer.ok)

    # --- leaving -------------------------------------------------------------------------------------------------

    def panic(self, *renderables: RenderableType) -> None:
        """Textual's reader of the terminal failed (it is gone), or an error that draws itself came up."""
        if self.terminal_gone:
            self.exit(return_code=EXIT_GONE)
        else:
            super().panic(*renderables)

    def _fatal_error(self) -> None:
        """One line for the operator; the traceback, without values of variables, goes to the run's logs."""
        if self._exception is not None:
            self.crash = describe_crash(self._exception, self._events_path.parent / "logs" / "console.log")
        self._close_messages_no_wait()

    def _print_error_renderables(self) -> None:
        """Textual's own way cuts the line to the terminal's width."""
        if self.crash and sys.__stderr__ is not None:
            with contextlib.suppress(OSError):
                print(self.crash, file=sys.__stderr__, flush=True)
            self.crash = ""
        super()._print_error_renderables()
