"""The run's directory and its append-only event log: ``events.jsonl``, one event a line, readable after a crash.

A log is written by one process (the supervisor) and read by any number. A reader that meets half a line at the end
waits for the rest; a reader of a finished log that ends in half a line (the writer was killed) drops it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from cluster.events import SCHEMA, Event, decode_event, encode_event

EVENTS_FILE: Final = "events.jsonl"


class RunLogError(Exception):
    """A log holds a line that is not an event; the message is one line naming the file and the line."""


class RunLog:
    """Appends events, giving each its index. ``flush`` is the caller's (the supervisor does it every 50 ms).

    A log that exists is continued: half a line at its end, left by a killed writer, is cut off first. What a full disk
    does not take is kept, in order, until it does.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS_FILE
        self._file = open(self.path, "a+b", opener=_open_private)  # noqa: SIM115 (open for the run's life)
        self._next_index = _cut_half_line(self._file)
        self._unwritten = bytearray()

    @property
    def unwritten_bytes(self) -> int:
        return len(self._unwritten)

    def append(self, event: Event) -> Event:
        """Take one event, to be written by the next ``flush``; returns it with its index."""
        numbered = msgspec.structs.replace(event, index=self._next_index)
        self._next_index += 1
        self._unwritten += encode_event(numbered) + b"\n"
        return numbered

    def flush(self) -> None:
        """Hand what was appended to the kernel, where it outlives this process. Raises OSError, and loses nothing."""
        while self._unwritten:
            written = os.write(self._file.fileno(), self._unwritten)
            del self._unwritten[:written]

    def close(self) -> None:
        """Flush what can be, and close. Raises OSError when the end of the log is lost."""
        try:
            self.flush()
        finally:
            self._file.close()


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A whole line that holds no event this program knows; ``number`` counts from 1."""

    number: int
    problem: str


@dataclass(slots=True)
class PassedOver:
    """Counts the damaged lines of one log, however often it is read: the ``on_damaged`` of who only says so."""

    numbers: set[int] = field(default_factory=set)

    def __call__(self, line: DamagedLine) -> None:
        self.numbers.add(line.number)

    def __str__(self) -> str:
        """Empty when there was none."""
        if not self.numbers:
            return ""
        count = len(self.numbers)
        return f"{count} damaged line{'s' * (count > 1)} passed over (first: line {min(self.numbers)})"


class LogTail:
    """Reads a log as it grows. Not a thread: call it when it suits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._line = 0
        self._rest = b""

    def read_new(self, max_bytes: int = 4 * 2**20) -> list[Event]:
        """Whole events appended since the last call, at most about ``max_bytes`` of them; [] when none.

        Raises RunLogError for a line that is not one.
        """
        events = []
        for found in self.read_lines(max_bytes):
            if isinstance(found, DamagedLine):
                raise RunLogError(_complaint(self._path, found))
            events.append(found)
        return events

    def read_lines(self, max_bytes: int = 4 * 2**20) -> list[Event | DamagedLine]:
        """As ``read_new``, for a reader that goes on whatever a line holds."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(max_bytes)
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        first = self._line + 1
        self._line += len(lines)
        return [decode_line(line, number) for number, line in enumerate(lines, first)]


def read_events(path: Path, on_damaged: Callable[[DamagedLine], None] | None = None) -> Iterator[Event]:
    """Every whole event of a log, in order; a last line cut off by a crash is dropped.

    Raises RunLogError for a damaged line; with ``on_damaged``, which is told of each, only for a log without one event.
    """
    first: DamagedLine | None = None
    any_event = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            found = decode_line(line, number)
            if not isinstance(found, DamagedLine):
                any_event = True
                yield found
            elif on_damaged is None:
                raise RunLogError(_complaint(path, found))
            else:
                first = first or found
                on_damaged(found)
    if first is not None and not any_event:
        raise RunLogError(_complaint(path, first))


def decode_line(line: bytes, number: int) -> Event | DamagedLine:
    """What a line, with or without its end, says."""
    try:
        return decode_event(line)
    except msgspec.DecodeError as error:
        return DamagedLine(number, f"not an event of schema {SCHEMA}: {error}")


def write_events(path: Path, events: Iterable[Event]) -> None:
    """A log from events that already have their index (tests, tools)."""
    with path.open("wb") as file:
        for event in events:
            file.write(encode_event(event) + b"\n")


def _complaint(path: Path, damaged: DamagedLine) -> str:
    return f"{path}, line {damaged.number}: {damaged.problem}"


def _cut_half_line(file: BinaryIO) -> int:
    """Leave only whole lines, ready to append; returns how many there are."""
    file.seek(0)
    num_lines = 0
    end = 0
    for line in file:
        if line.endswith(b"\n"):
            num_lines += 1
            end += len(line)
    file.truncate(end)
    file.seek(end)
    return num_lines


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
