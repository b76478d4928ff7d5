"""The log file of one process, followed as it grows."""

import os
from collections import deque
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.panels.line_view import LineView
from console.screens.dialog import Dialog, titled
from console.text_format import clean
from console.view_state import ViewState

TAIL_BYTES: Final = 128 * 2**10
KEPT_LINES: Final = 1000
MAX_LINE: Final = 2000


class LogTailText:
    """Last lines of a text file that grows; starts at most TAIL_BYTES before its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._offset: int | None = None
        self._rest = b""

    def read_new(self) -> bool:
        """Take in what was appended; whether there was anything. A missing file is an empty one."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if self._offset is None or size < self._offset:
                    self._offset, self._rest = max(size - TAIL_BYTES, 0), b""
                file.seek(self._offset)
                chunk = file.read(TAIL_BYTES)
        except FileNotFoundError:
            return False
        self._offset += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-MAX_LINE:]
        for line in whole:
            self.lines.append(clean(line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r").expandtabs()))
        return bool(whole)


class LogScreen(Dialog[None]):
    """Left and right change the process; the end is followed while it is in view."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,L", "dismiss_empty", "Close"),
        Binding("left", "turn(-1)", "Previous", priority=True),
        Binding("right", "turn(1)", "Next", priority=True),
    ]

    def __init__(self, log_dir: Path, worker_ids: list[str], selected: str) -> None:
        super().__init__()
        self._log_dir = log_dir
        self._view = LineView(id="log", classes="page")
        self._worker_ids = worker_ids
        self._index = worker_ids.index(selected)
        self._tail = LogTailText(self._path())

    def compose(self) -> ComposeResult:
        yield self._view

    def on_mount(self) -> None:
        self._view.focus()
        self._show()

    def draw(self, state: ViewState, now: float) -> None:
        self._show()

    def action_turn(self, step: int) -> None:
        self._index = (self._index + step) % len(self._worker_ids)
        self._tail = LogTailText(self._path())
        self._show()

    def _path(self) -> Path:
        return self._log_dir / f"{self._worker_ids[self._index]}.log"

    def _show(self) -> None:
        view = self._view
        at_end = view.scroll_offset.y >= view.max_scroll_y
        self._tail.read_new()
        others = " ".join(
            f"[{name}]" if i == self._index else name for i, name in enumerate(self._worker_ids)
        )
        view.border_title = titled(f"log  {others}   left right  escape back")
        view.show([Text(line) for line in self._tail.lines] or [Text(f"{self._tail.path} has no lines yet")])
        if at_end:
            view.scroll_end(animate=False)
