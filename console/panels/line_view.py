"""A scrolling list of lines that draws only what is visible, so that a long list costs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip


class LineView(ScrollView, can_focus=True):
    """Show ``lines`` (rich Text, never markup); arrows and page keys scroll.

    With ``newest_first`` lines come in at the top, and a reader who has scrolled down keeps their place.
    """

    DEFAULT_CSS = "LineView { overflow-x: hidden; overflow-y: auto; }"

    def __init__(
        self, *, id: str | None = None, newest_first: bool = False, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._newest_first = newest_first
        self._lines: list[Text] = []

    @property
    def plain(self) -> str:
        """All lines as text."""
        return "\n".join(line.plain for line in self._lines)

    @property
    def text_width(self) -> int:
        """Cells a line has, beside the scrollbar."""
        return self.scrollable_content_region.width

    def show(self, lines: Sequence[Text], *, added: int = 0) -> None:
        """Replace the lines; repaints only if they differ. ``added``: how many of them are new at the top."""
        if list(lines) == self._lines:
            return
        self._lines = list(lines)
        self.virtual_size = Size(self.size.width, len(self._lines))
        if self._newest_first and added and self.scroll_offset.y > 0:
            self.scroll_to(y=self.scroll_offset.y + added, animate=False)
        self.refresh()

    def line_style(self, index: int) -> Style | None:
        """What is laid over a whole line."""
        return None

    def render_line(self, y: int) -> Strip:
        """The y-th visible line."""
        width = self.size.width
        index = y + self.scroll_offset.y
        if index >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        segments = [Segment(text, style) for text, style, _ in self._lines[index].render(self.app.console)]
        strip = Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)
        over = self.line_style(index)
        return strip if over is None else strip.apply_style(over)


class ChoiceLines(LineView):
    """Lines with a cursor that stays on its key while lines come and go. Enter posts ``Chosen``.

    The cursor is drawn in reverse and only while the list has the focus.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Open", show=False)]
    _CURSOR: ClassVar[Style] = Style(reverse=True)

    @dataclass
    class Chosen(Message):
        """Enter on the line with this key; ``view`` is the list."""

        view: "ChoiceLines"
        key: str

    def __init__(
        self, *, id: str | None = None, newest_first: bool = False, classes: str | None = None
    ) -> None:
        super().__init__(id=id, newest_first=newest_first, classes=classes)
        self._keys: list[str] = []
        self.chosen_key = ""
        """Key under the cursor; "" before it was moved: then the first line's."""

    @property
    def key(self) -> str:
        """What enter would choose, "" = nothing."""
        chosen = self.chosen_key
        return chosen if chosen and chosen in self._keys else next(filter(None, self._keys), "")

    def show_choices(self, lines: Sequence[Text], keys: Sequence[str], *, added: int = 0) -> None:
        """``keys``: one a line, "" for a line that cannot be chosen; several lines may share one."""
        self._keys = list(keys)
        self.show(lines, added=added)

    def line_style(self, index: int) -> Style | None:
        return self._CURSOR if self.has_focus and index == self._cursor_line() else None

    def action_scroll_up(self) -> None:
        self._move(-1)

    def action_scroll_down(self) -> None:
        self._move(1)

    def action_choose(self) -> None:
        if self.key:
            self.post_message(self.Chosen(self, self.key))

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def _cursor_line(self) -> int:
        return self._keys.index(self.key) if self.key else -1

    def _move(self, step: int) -> None:
        keys = list(dict.fromkeys(filter(None, self._keys)))
        if not keys:
            return
        place = min(max(keys.index(self.key) + step, 0), len(keys) - 1)
        self.chosen_key = keys[place]
        line = self._cursor_line()
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if line < top:
            self.scroll_to(y=line, animate=False)
        elif line >= top + height:
            self.scroll_to(y=line - height + 1, animate=False)
        self.refresh()
