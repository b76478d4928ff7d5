"""The drills there are, what each promises and expects, and what this cluster has otherwise."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from cluster.drill import Drill
from cluster.drill_judge import expectations_of
from console.palette import WARN
from console.screens.dialog import Dialog
from console.text_format import clean, fit

_MAX_CELLS: Final = 106
"""Of a drill's line: the box is 114 wide where the terminal is."""
_BESIDE_CELLS: Final = 10


class PickDrill(Dialog[Drill]):
    """Dismisses with the drill under the cursor (enter, or ``d`` again), or None. ``before`` is what happens first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("d", "run_it", "Run")]

    def __init__(
        self, drills: Sequence[Drill], differences: Callable[[Drill], Sequence[str]], before: str = ""
    ) -> None:
        super().__init__()
        self._drills = drills
        self._differences = differences
        self._before = before
        self._about = Static("", markup=False)

    @property
    def _width(self) -> int:
        """Of a drill's line."""
        return min(self.app.size.width - _BESIDE_CELLS, _MAX_CELLS)

    def compose(self) -> ComposeResult:
        with Vertical(classes="box wide"):
            yield Static("Run a drill on this cluster   d, enter run   escape back", markup=False)
            yield OptionList(
                *[Option(Text(fit(_row(drill), self._width))) for drill in self._drills],
                markup=False,
            )
            yield self._about

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.highlighted = 0 if self._drills else None
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        drill = self._drills[event.option_index]
        expected = "; ".join(f"{e.name} {e.text}" for e in expectations_of(drill))
        cut = f"{clean(drill.title)}. " if len(_row(drill)) > self._width else ""
        about = Text(f"{cut}{clean(drill.promise)}\n")
        about.append(f"expects {clean(expected)}\n", "dim")
        found = self._differences(drill)
        if found:
            about.append(f"this cluster differs: {clean('; '.join(found))}\n", WARN)
        if self._before:
            about.append(clean(self._before), WARN)
        self._about.update(about)

    def on_option_list_option_selected(self) -> None:
        self.action_run_it()

    def action_run_it(self) -> None:
        index = self.query_one(OptionList).highlighted
        self.dismiss(None if index is None else self._drills[index])


def _row(drill: Drill) -> str:
    return f"{drill.name:<17} {drill.title}"
