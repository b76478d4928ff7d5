"""A log as a list to read: search with marks, follow, wrapped or cut lines. Fed with lines; knows no file."""

import re
import textwrap
from collections.abc import Sequence

from rich.text import Text

from console.palette import LEVEL_STYLES
from console.panels.line_view import LineView
from console.text_format import format_stamp

MARK_STYLE = "reverse"


class LogLines(LineView):
    """``fill`` replaces the lines: (seconds since the run's start or None, text, level).

    While ``follow`` is on the end stays in view; scrolling up turns it off, the end key turns it on again.
    """

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.follow = True
        self.wrap = False
        self.wanted = ""
        self._source: list[tuple[float | None, str, str]] = []
        self._first_rows: list[int] = []  # of each source line, among the rows shown
        self._filled: tuple[int, int, bool, str] | None = None

    @property
    def matches(self) -> list[int]:
        """Rows that begin a source line with the wanted text."""
        wanted = self.wanted.lower()
        return [
            row
            for row, (_, text, _) in zip(self._first_rows, self._source, strict=True)
            if wanted and wanted in text.lower()
        ]

    def fill(self, source: Sequence[tuple[float | None, str, str]]) -> None:
        """Show these lines; keeps the place unless the end is followed."""
        now = (len(source), self.text_width, self.wrap, self.wanted)
        if (
            now == self._filled
            and list(source[-1:]) == self._source[-1:]
            and list(source[:1]) == self._source[:1]
        ):
            return
        self._filled = now
        self._source = list(source)
        rows: list[Text] = []
        self._first_rows = []
        for since_s, text, level in self._source:
            self._first_rows.append(len(rows))
            head = f"{format_stamp(since_s):>7} " if since_s is not None else ""
            whole = head + text
            parts = [whole]
            if self.wrap and self.text_width:
                parts = textwrap.wrap(whole, self.text_width, subsequent_indent=" " * len(head)) or [""]
            for part in parts:
                row = Text(part, LEVEL_STYLES[level], no_wrap=True)
                if self.wanted:
                    row.highlight_regex(re.compile(re.escape(self.wanted), re.IGNORECASE), MARK_STYLE)
                rows.append(row)
        self.show(rows)
        if self.follow:
            self.scroll_end(animate=False)

    def go_to_match(self, step: int) -> bool:
        """To the next (1) or previous (-1) line with the wanted text, round the ends; whether there is one."""
        found = self.matches
        if not found:
            return False
        top = self.scroll_offset.y
        later = [row for row in found if row > top] if step > 0 else [row for row in found if row < top]
        self._go(later[0 if step > 0 else -1] if later else found[0 if step > 0 else -1])
        return True

    def go_to_time(self, since_s: float) -> bool:
        """To the first line at or after that moment of the run; whether lines have times."""
        timed = [
            (at, row)
            for row, (at, _, _) in zip(self._first_rows, self._source, strict=True)
            if at is not None
        ]
        if not timed:
            return False
        self._go(next((row for at, row in timed if at >= since_s), timed[-1][1]))
        return True

    def toggle_follow(self) -> None:
        self.follow = not self.follow
        if self.follow:
            self.scroll_end(animate=False)

    def action_scroll_up(self) -> None:
        self.follow = False
        super().action_scroll_up()

    def action_page_up(self) -> None:
        self.follow = False
        super().action_page_up()

    def action_scroll_home(self) -> None:
        self.follow = False
        super().action_scroll_home()

    def action_scroll_end(self) -> None:
        self.follow = True
        super().action_scroll_end()

    def on_mouse_scroll_up(self) -> None:
        self.follow = False

    def _go(self, row: int) -> None:
        self.follow = False
        self.scroll_to(y=row, animate=False)
