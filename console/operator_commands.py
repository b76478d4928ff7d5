"""What the operator does to the cluster: commands, those that ask something first, drills, and ending all faults."""

import importlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from textual.screen import Screen

from cluster.control import Command, HealFaults
from cluster.run_dir import TOKEN_FILE
from console.actions import find_action
from console.commands import CommandSink, SendCommand
from console.drill_verdict import DrillVerdict
from console.operator_dialogs import OperatorDialogs
from console.view_state import ViewState

DRILL_GROUP: Final = "drill"
"""Of the worker in which a drill runs."""


class OperatorApp(Protocol):
    """What this, its dialogs and its drills need of the app."""

    send_command: SendCommand
    state: ViewState

    def tell(self, text: str, *, ok: bool = True) -> None: ...
    def show_drill(self, drill: DrillVerdict | None) -> None: ...
    def focus_verdict(self) -> None: ...
    def stop_drill(self) -> None: ...
    def push_screen(self, screen: Screen[Any], callback: Callable[[Any], None]) -> object: ...
    def run_worker(self, work: Coroutine[None, None, None], *, group: str, exit_on_error: bool) -> object: ...


class Drills(Protocol):
    """See ``DrillHere``."""

    running: str

    def choose(self, state: ViewState) -> None: ...


class OperatorCommands:
    """``selected`` is the process under the cursor, "" = none. Every answer of the cluster is told to the app."""

    def __init__(
        self, app: OperatorApp, run_dir: Path, sink: CommandSink, *, selected: Callable[[], str]
    ) -> None:
        self._app = app
        self._run_dir = run_dir
        self._sink = sink
        self._drills: Drills | None = None
        self._dialogs = OperatorDialogs(
            str(run_dir / TOKEN_FILE), push=app.push_screen, deliver=self.deliver, selected=selected
        )

    def send(self, action_id: str) -> None:
        """The command of that row of the table."""
        action = find_action(action_id)
        if action.command is not None:
            self.deliver(action.command(self._app.state), action.title)

    def ask(self, action_id: str) -> None:
        """Ask what that row of the table needs to know, then send its command."""
        if not self._refuse(action_id):
            self._dialogs.begin(action_id, self._app.state)

    def drill(self) -> None:
        """Choose a drill and run it on this cluster."""
        if self._refuse("drill"):
            return
        if self._drills is None:
            # Imported when first wanted: a drill needs what takes longer to import than the console.
            self._drills = importlib.import_module("console.drill_here").DrillHere(self._app, self._run_dir)
        self._drills.choose(self._app.state)

    def heal(self) -> None:
        """End every fault, and the drill that may be causing them."""
        if self._refuse("heal"):
            return
        if self._drills is not None and self._drills.running:
            self._app.stop_drill()
            self._app.tell("the drill is stopped, without a verdict")
        self.deliver(HealFaults(cause="operator, key x"), "Heal all")

    def deliver(self, command: Command, title: str) -> None:
        self._app.run_worker(self._send(command, title), group="default", exit_on_error=True)

    async def _send(self, command: Command, title: str) -> None:
        answer = await self._sink.deliver(command, title)
        self._app.tell(answer.message, ok=answer.ok)

    def _refuse(self, action_id: str) -> bool:
        reason = self._sink.refusal(find_action(action_id).title)
        if reason:
            self._app.tell(reason, ok=False)
        return bool(reason)
