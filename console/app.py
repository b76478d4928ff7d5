"""The Textual app: reads the run's log, draws it, sends commands. It starts and stops no process.

The caller stops the cluster after the app has returned, in a ``finally``.
"""

import asyncio
import contextlib
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from rich.console import RenderableType
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.command import Provider
from textual.screen import Screen

from cluster.control import Command, HealFaults
from cluster.export import FORMATS
from cluster.run_dir import TOKEN_FILE
from console.actions import LIVE, actions_of, bindings, find_action
from console.commands import CommandSink, SendCommand
from console.config import Config
from console.crash import describe_crash
from console.drill_verdict import DrillVerdict, read_verdict
from console.feed import Feed, LogFeed
from console.feed_text import Line
from console.held_blocks import HeldBlocks, fetch_held_blocks
from console.operator_dialogs import OperatorDialogs
from console.own_cost import CPU_LIMIT_PERCENT, CpuMeter, OwnCost, RedrawPace
from console.palette_provider import ActionsProvider
from console.screens.dialog import Choice, ChoiceDialog, Dialog, QuitDialog
from console.screens.help import HelpScreen
from console.screens.main import VERDICT, MainScreen, RequestChosen, WorkerChosen
from console.screens.request_detail import RequestDetail
from console.screens.worker_page import WorkerPage
from console.terminal import ConsoleDriver
from console.text_format import clean
from console.view_state import ViewState

if TYPE_CHECKING:
    from console.drill_here import DrillHere

SECOND_INTERRUPT_S: Final = 3.0
TOAST_S: Final = 4.0
EXIT_GONE: Final = 128 + signal.SIGHUP
SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_FORMAT_TEXTS: Final = {
    "jsonl": "JSON lines: every event",
    "csv": "CSV: one row per request",
    "parquet": "Parquet: the same table",
    "perfetto": "Perfetto: a trace of processes and requests",
    "vllm-bench": "vLLM: the result file of vllm bench serve",
}


def format_choices(formats: Sequence[str]) -> tuple[Choice, ...]:
    """One key per export format: the first letter of its name that no earlier one has."""
    keys: dict[str, str] = {}
    for name in formats:
        keys[next(letter for letter in name if letter.isalpha() and letter not in keys)] = name
    return tuple(Choice(key, name, _FORMAT_TEXTS.get(name, name)) for key, name in keys.items())


class ConsoleApp(App[None], inherit_bindings=False):
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
        super().__init__(driver_class=ConsoleDriver)
        config = config or Config(Path())
        self.actions = actions_of(self.WHERE, config.keymap)
        self.set_keymap(dict(config.keymap))
        self.theme = config.theme
        self.owns_cluster = owns_cluster
        self.quit_choice = "stop" if owns_cluster else "detach"
        self.crash = ""
        self.state = ViewState()
        self.feed: Feed = LogFeed(events_path, self.state, self._alert)
        self.sink = CommandSink(send_command, read_only=self.READ_ONLY if read_only else "")
        self.animation_level = "none"
        self._events_path = events_path
        self._out_dir = out_dir or events_path.parent  # for pictures of the screen
        self._export = export
        self._export_format = ""
        self._run_name = run_name
        self._read_only = read_only
        self._clock = clock
        self._refresh_s = refresh_s or 1.0 / config.redraws_per_s
        self._main = MainScreen(ascii_mode=ascii_only, read_only=read_only, actions=self.actions)
        self._dialogs = OperatorDialogs(
            str(events_path.parent / TOKEN_FILE),
            push=self.push_screen,
            deliver=self._deliver,
            selected=lambda: self._main.selected_worker,
        )
        self.send_command = send_command
        self._drills: DrillHere | None = None
        self._ascii_only = ascii_only
        self._ticks = 0
        self._draws = 0
        self._pace = RedrawPace(1.0 / self._refresh_s, self.CPU_LIMIT_PERCENT)
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
        self._main.show_drill(read_verdict(self._events_path.parent))
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        self.set_interval(self._refresh_s, self.tick)
        self.call_after_refresh(self.tick)

    # --- drawing -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Draw what is visible as often as that may cost, charts every second time."""
        self._ticks += 1
        if self.terminal_gone:
            self.exit(return_code=EXIT_GONE)
            return
        if isinstance(self._driver, ConsoleDriver) and self._driver.writer.take_recovered():
            self.screen.refresh(layout=True)
        if self._pace.due(time.monotonic(), self._cpu.percent(), self.feed.lag_s):
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

    def action_ask(self, action_id: str) -> None:
        """Ask what that row of the table needs to know, then send its command."""
        if not self._refuse(action_id):
            self._dialogs.begin(action_id, self.state)

    def action_drill(self) -> None:
        """Choose a drill and run it on this cluster."""
        if self._refuse("drill"):
            return
        if self._drills is None:
            # Imported when first wanted: a drill needs what takes longer to import than the console.
            self._drills = importlib.import_module("console.drill_here").DrillHere(
                self, self._events_path.parent
            )
        self._drills.choose(self.state)

    def show_drill(self, drill: DrillVerdict | None) -> None:
        """How the drill goes, or its verdict."""
        self._main.show_drill(drill)

    def focus_verdict(self) -> None:
        self._main.action_panel(VERDICT)

    def action_heal(self) -> None:
        """End every fault, and the drill that may be causing them."""
        if not self._refuse("heal"):
            if self._drills is not None and self._drills.running:
                self.workers.cancel_group(self, "drill")
                self.tell("the drill is stopped, without a verdict")
            self._deliver(HealFaults(cause="operator, key x"), "Heal all")

    def action_pause(self) -> None:
        if not self.feed.paused:
            self._frozen_now = self.state.now(self._clock())
        self.feed.paused = not self.feed.paused
        self.draw()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.actions))

    def action_logs(self) -> None:
        """The log of the process under the cursor, else of the one that something happened to last."""
        workers = self.state.topology.by_role()
        if not workers:
            self.tell("Logs: no process has started yet", ok=False)
            return
        newest = max(workers, key=lambda worker: (worker.state != "ready", worker.state_at))
        self._open_worker(self._main.selected_worker or newest.worker_id, log_only=True)

    def _open_worker(self, worker_id: str, *, log_only: bool = False) -> None:
        ids = [worker.worker_id for worker in self.state.topology.by_role()]
        if worker_id not in ids:
            self.tell(f"{worker_id} is no process of the cluster now", ok=False)
            return
        run_dir = self._events_path.parent

        def fetch(url: str) -> HeldBlocks:
            return fetch_held_blocks(url, run_dir)

        asks = self.WHERE == LIVE and not self.state.stopped
        self.push_screen(
            WorkerPage(
                run_dir / "logs", ids, worker_id, fetch if asks else None,
                ascii_mode=self._ascii_only, log_only=log_only,
            )
        )  # fmt: skip
        self.call_after_refresh(self.draw, charts=False)

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
        victim = self.state.requests.ledger.last_victim
        if victim:
            self.on_request_chosen(RequestChosen(victim))
        else:
            self.tell("no fallback, retry or migration in this run")

    def action_export(self) -> None:
        if self._export_format:
            self._write_export(self._export_format)
        else:
            self.push_screen(ChoiceDialog("Export the run as", format_choices(FORMATS)), self._write_export)

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
        self.push_screen(RequestDetail(message.request_id, ascii_mode=self._ascii_only))
        self.call_after_refresh(self.draw, charts=False)

    def on_worker_chosen(self, message: WorkerChosen) -> None:
        self._open_worker(message.worker_id)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """None: the action table is all there is."""
        return ()

    # --- what the dialogs chose ----------------------------------------------------------------------------------

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
