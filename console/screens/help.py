"""All keys, from the action table."""

import textwrap
from collections.abc import Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize

from console.actions import Action, help_rows
from console.panels.line_view import LineView
from console.screens.dialog import Dialog, titled
from console.text_format import fit

_TEXT_AT: Final = 34
_MORE: Final = (
    "",
    "Glyphs   * running   ~ on its way   - down   ! silent or failed",
    "Marks    b burst  K broken  h healed  R ready again  f fallback  g migration  D drain or role  m mode  i codec  "
    "s load  l link  a note",
    "",
    "In a list: arrows, page keys, home, end. Enter on a request shows it in detail.",
    "strand: blocks a worker holds although it works on nothing.",
    "rho: link bandwidth / B*, where B* = KV bytes per token x prefill tokens per second. Above 1, moving KV is "
    "faster than computing it again.",
)


class HelpScreen(Dialog[None]):
    """Scrolls; any of escape, q, ? closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,question_mark,f1", "dismiss_empty", "Close")]

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__()
        self._actions = actions

    def compose(self) -> ComposeResult:
        yield LineView(id="help", classes="page")

    def on_mount(self) -> None:
        view = self.query_one(LineView)
        view.border_title = titled("keys   escape back")
        view.focus()

    def on_resize(self, event: Resize) -> None:
        width = max(event.size.width - 4 - _TEXT_AT, 20)
        lines: list[str] = []
        for keys, title, what in help_rows(self._actions):
            first, *rest = textwrap.wrap(what, width)
            lines.append(f"{fit(keys, 10)} {fit(title, 22)} {first}")
            lines.extend(" " * _TEXT_AT + line for line in rest)
        for text in _MORE:
            lines.extend(textwrap.wrap(text, width + _TEXT_AT) or [""])
        self.query_one(LineView).show([Text(line) for line in lines])
