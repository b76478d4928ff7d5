"""Base of the console's dialogs, and the two small ones: leave, and choose by one key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from console.text_format import clean
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
    """Dismisses with "stop", "detach" or, to stay, None. Enter does what loses nothing: a console that owns the
    cluster stays, an attached one leaves."""

    def __init__(self, *, owns_cluster: bool) -> None:
        super().__init__()
        self._question = "Stop the cluster?" if owns_cluster else "Leave the cluster?"
        self._rows = (
            ("q ctrl+c", "stop", "stop the cluster and leave"),
            ("d", "detach", "detach: leave, the cluster goes on"),
            ("enter s n escape", "", "stay"),
        ) if owns_cluster else (
            ("enter q d ctrl+c", "detach", "leave; the cluster goes on"),
            ("x", "stop", "stop the cluster and leave"),
            ("s n escape", "", "stay"),
        )  # fmt: skip

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Static("", markup=False)
            for keys, _, text in self._rows:
                yield Static(f"{keys:<17} {text}", markup=False)

    def on_mount(self) -> None:
        for keys, choice, _ in self._rows:
            for key in keys.split():
                if key not in ("ctrl+c", "escape"):  # the app's, and every dialog's
                    self._bindings.bind(key, f"choose('{choice}')")

    def action_choose(self, choice: str) -> None:
        self.dismiss(choice or None)


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
    """One line of text; an empty one counts as leaving.

    ``explain`` says under the line what the text would do, and raises ValueError, saying what is allowed, for a text
    that cannot be used: that one is not taken.
    """

    def __init__(
        self,
        question: str,
        max_length: int = 200,
        *,
        initial: str = "",
        explain: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self._question = question
        self._max_length = max_length
        self._initial = initial
        self._explain = explain
        self._answer = Static("", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="box wide"):
            yield Static(self._question, markup=False)
            yield Input(self._initial, max_length=self._max_length, compact=True)
            if self._explain is not None:
                yield self._answer

    def on_input_changed(self, event: Input.Changed) -> None:
        self._check(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if not text or self._check(text):
            self.dismiss(text or None)

    def _check(self, text: str) -> bool:
        if self._explain is None:
            return True
        try:
            said = self._explain(text.strip()) if text.strip() else ""
            self._answer.update(Text("\n".join(map(clean, said.split("\n")))))
        except ValueError as error:
            self._answer.update(Text(clean(str(error)), "bold"))
            return False
        return True


def titled(text: str) -> Text:
    """A title that is never read as markup."""
    return Text(text)
