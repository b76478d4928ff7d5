"""Base of the console's dialogs, and the two small ones: leave, and choose by one key."""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from console.view_state import ViewState

Result = TypeVar("Result")


class Dialog(ModalScreen[Result], Generic[Result]):
    """A box in the middle. Escape leaves without a result; ``draw`` is called at every refresh of the console."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_empty", "Back")]

    def draw(self, state: ViewState, now: float) -> None:
        """Bring what the dialog shows up to date. Most dialogs show nothing that changes."""

    def action_dismiss_empty(self) -> None:
        self.dismiss(None)


class QuitDialog(Dialog[str]):
    """Dismisses with "stop" or, to stay, None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,enter", "stop", "Stop"),
        Binding("s,n", "dismiss_empty", "Stay"),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Stop the cluster and leave?", markup=False)
            yield Static("", markup=False)
            yield Static("q, enter, ctrl+c   stop", markup=False)
            yield Static("s, escape          stay", markup=False)

    def action_stop(self) -> None:
        self.dismiss("stop")


@dataclass(frozen=True, slots=True)
class Choice:
    key: str
    value: str
    text: str


class ChoiceDialog(Dialog[str]):
    """One key per choice; enter takes the first."""

    def __init__(self, question: str, choices: tuple[Choice, ...]) -> None:
        super().__init__()
        self._question = question
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Static("", markup=False)
            for index, choice in enumerate(self._choices):
                keys = f"{choice.key}, enter" if index == 0 else choice.key
                yield Static(f"{keys:<10} {choice.text}", markup=False)

    def on_mount(self) -> None:
        for index, choice in enumerate(self._choices):
            keys = f"{choice.key},enter" if index == 0 else choice.key
            for key in keys.split(","):
                self._bindings.bind(key, f"choose('{choice.value}')")

    def action_choose(self, value: str) -> None:
        self.dismiss(value)


class TextDialog(Dialog[str]):
    """One line of text; an empty one counts as leaving."""

    def __init__(self, question: str, max_length: int = 200) -> None:
        super().__init__()
        self._question = question
        self._max_length = max_length

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Input(max_length=self._max_length, compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


def titled(text: str) -> Text:
    """A title that is never read as markup."""
    return Text(text)
