"""Which process gets which signal."""

from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from cluster.control import KillWorker
from console.screens.dialog import Dialog
from console.text_format import fit
from console.view_state import ViewState

SIGNALS: Final = (("k", "KILL"), ("t", "TERM"), ("s", "STOP"), ("c", "CONT"))


class PickTarget(Dialog[KillWorker]):
    """Dismisses with the command, or None. ``k`` or enter sends SIGKILL to the highlighted process."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, f"send('{name}')", name) for key, name in SIGNALS]

    def __init__(self, state: ViewState) -> None:
        super().__init__()
        self._workers = state.topology.by_role()

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Send a signal to", markup=False)
            yield OptionList(
                *[Option(self._label(index)) for index in range(len(self._workers))], markup=False
            )
            yield Static("k, enter KILL   t TERM   s STOP   c CONT   escape back", markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        first = next((i for i, worker in enumerate(self._workers) if worker.role == "prefill"), 0)
        options.highlighted = first if self._workers else None
        options.focus()

    def on_option_list_option_selected(self) -> None:
        self.action_send("KILL")

    def action_send(self, signal: str) -> None:
        """Send by name to the highlighted process; nothing while there is none."""
        index = self.query_one(OptionList).highlighted
        if index is not None:
            worker_id = self._workers[index].worker_id
            self.dismiss(KillWorker(worker_id=worker_id, signal=signal, cause="operator, key k"))

    def _label(self, index: int) -> Text:
        worker = self._workers[index]
        glyph, word = worker.word
        return Text(
            f"{fit(worker.worker_id, 12)} {glyph} {word:<8} {fit(worker.role, 8)} pid {worker.pid:>7}"
        )
