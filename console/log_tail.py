"""The end of a text file that grows: what a process printed."""

import os
from collections import deque
from pathlib import Path
from typing import Final

from console.text_format import clean

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
