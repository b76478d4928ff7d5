"""The end of a process's log file, for people. A file that is missing or cannot be read has no lines."""

from collections import deque
from pathlib import Path


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
