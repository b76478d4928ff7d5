"""A process's log file, for people: its next line, and its end. A full disk or a missing file is no error here."""

import contextlib
from collections import deque
from pathlib import Path


def log_line(text: str) -> None:
    """Write to this process's log, which is its standard output. A disk that is full must not end the process."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a text file, without ends; [] when it is missing or empty."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except OSError:
        return []


def last_text(path: Path, count: int) -> str:
    """The same as one text, without blanks at its end."""
    return "\n".join(last_lines(path, count)).rstrip()
