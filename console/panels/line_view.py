"""A scrolling list of lines that draws only what is visible, so that a long list costs nothing."""

from collections.abc import Sequence

from rich.segment import Segment
from rich.text import Text
from textual.geometry import Size
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

    def render_line(self, y: int) -> Strip:
        """The y-th visible line."""
        width = self.size.width
        index = y + self.scroll_offset.y
        if index >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        segments = [Segment(text, style) for text, style, _ in self._lines[index].render(self.app.console)]
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)
