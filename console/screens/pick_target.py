"""On what, and which deed: a list of targets, one key per deed, and the exact line that each would be by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from cluster.control import Command
from console.screens.dialog import Dialog
from console.text_format import clean, fit
from console.view_state import ViewState

DURATIONS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
FIRST_DURATION: Final = 2
_BOX_CELLS: Final = 74


@dataclass(frozen=True, slots=True)
class Target:
    """``kind`` decides which deeds it can suffer."""

    target_id: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Deed:
    """``command(target id, seconds)`` is what is sent, ``dry_run`` with the same arguments the line to read first.

    ``asks`` True: not sent, the caller asks more first.
    """

    key: str
    word: str
    kinds: tuple[str, ...]
    command: Callable[[str, float], Command]
    dry_run: Callable[[str, float], str]
    takes_seconds: bool = False
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Picked:
    deed: Deed
    target: Target
    command: Command


class PickTarget(Dialog[Picked]):
    """Dismisses with what was picked, or None. Enter, and the key that opened it, do a target's first deed.

    Left and right change how long a deed lasts; ``y`` copies the first deed's line.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "duration(-1)", "Shorter", priority=True),
        Binding("right", "duration(1)", "Longer", priority=True),
        Binding("y", "copy", "Copy the line"),
    ]

    def __init__(
        self, question: str, key: str, targets: Sequence[Target], deeds: Sequence[Deed], chosen: str = ""
    ) -> None:
        super().__init__()
        self._question = question
        self._key = key
        self._targets = targets
        self._deeds = deeds
        self._chosen = chosen
        self._duration = FIRST_DURATION
        self._lines = Static("", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="box wide"):
            yield Static(self._question, markup=False)
            yield OptionList(
                *[Option(Text(fit(target.text, _BOX_CELLS - 4))) for target in self._targets], markup=False
            )
            yield self._lines

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        ids = [target.target_id for target in self._targets]
        options.highlighted = ids.index(self._chosen) if self._chosen in ids else 0 if ids else None
        options.focus()
        self._explain()

    def draw(self, state: ViewState, now: float) -> None:
        self._explain()

    def on_option_list_option_highlighted(self) -> None:
        self._explain()

    def on_option_list_option_selected(self) -> None:
        self._pick(self._first())

    def on_key(self, event: Key) -> None:
        for deed in self._possible():
            if event.key == deed.key:
                event.stop()
                self._pick(deed)
                return
        if event.key == self._key or event.character == self._key:
            event.stop()
            self._pick(self._first())

    def action_duration(self, step: int) -> None:
        self._duration = min(max(self._duration + step, 0), len(DURATIONS_S) - 1)
        self._explain()

    def action_copy(self) -> None:
        deed, target = self._first(), self._target()
        if deed is not None and target is not None:
            self.app.copy_to_clipboard(deed.dry_run(target.target_id, self._seconds(deed)))

    def _pick(self, deed: Deed | None) -> None:
        target = self._target()
        if deed is not None and target is not None:
            self.dismiss(Picked(deed, target, deed.command(target.target_id, self._seconds(deed))))

    def _target(self) -> Target | None:
        index = self.query_one(OptionList).highlighted
        return None if index is None else self._targets[index]

    def _possible(self) -> list[Deed]:
        target = self._target()
        return [] if target is None else [deed for deed in self._deeds if target.kind in deed.kinds]

    def _first(self) -> Deed | None:
        return next(iter(self._possible()), None)

    def _seconds(self, deed: Deed) -> float:
        return DURATIONS_S[self._duration] if deed.takes_seconds else 0.0

    def _explain(self) -> None:
        target = self._target()
        if target is None:
            self._lines.update(Text("there is nothing to choose; escape back"))
            return
        lines = []
        lasting = False
        for place, deed in enumerate(self._possible()):
            keys = f"{self._key}, enter" if place == 0 else deed.key
            seconds = self._seconds(deed)
            lasting = lasting or deed.takes_seconds
            lasts = f" {seconds:g} s" if deed.takes_seconds else ""
            lines.append(Text(f"{keys:<9} {deed.word}{lasts}", "bold"))
            lines.append(Text(f"          $ {clean(deed.dry_run(target.target_id, seconds))}", "dim"))
        hint = "left right: how long   " if lasting else ""
        lines.append(Text(f"{hint}y copy the first line   escape back"))
        self._lines.update(Text("\n").join(lines))
