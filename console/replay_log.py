"""A finished run's log with random access: where in the file each moment and each kind of event lies.

Opening reads of every line only its time and its kind. Positions are byte offsets of line beginnings: the view at a
position is the fold of all lines before it. The time of a position is the latest ``at`` among those lines: lines of
different processes stand in the log in the order in which they were written, so a single ``at`` may lie behind.
"""

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import msgspec

from cluster.events import Event, RunReady, WorkerReady
from cluster.run_log import DamagedLine, decode_line
from console.chart_marks import mark_letter
from console.errors import UserError
from console.event_kinds import is_of_request
from console.feed_text import feed_line

CHUNK_BYTES: Final = 64 * 2**10
MAX_MARKS: Final = 10_000

KINDS: Final = tuple(sorted(kind.__struct_config__.tag for kind in get_args(Event)))
"""Every kind of event, by the name that it has in a log."""


class _Head(msgspec.Struct):
    at: float
    type: str


_decode_head: Final = msgspec.json.Decoder(_Head)


@dataclass(frozen=True, slots=True)
class LogMark:
    """What the view marks on its charts, of the whole run. ``offset`` is the position after its line."""

    offset: int
    at: float
    letter: str
    text: str


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole lines from ``offset`` on; ``lines`` and ``at`` (-inf at the beginning) are of everything before them."""

    offset: int
    lines: int
    at: float


class ReplayLog:
    """The log as it is when it is opened. Raises UserError when it cannot be read or holds no event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        self.marks: list[LogMark] = []
        self.rare: list[tuple[int, int]] = []
        """Where the lines begin and end that are about no request and are none of the frequent kinds."""
        self.first_at = float("inf")
        self.ready_at: float | None = None
        self.last_at = float("-inf")
        self.end = 0
        self.num_lines = 0
        self._chunks: list[_Chunk] = []
        self._chunk_times: list[float] = []
        self._chunk_offsets: list[int] = []
        self._mark_offsets: list[int] = []
        self._were_ready: set[str] = set()
        try:
            self._index()
        except OSError as error:
            self.close()
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        if self.first_at > self.last_at:
            self.close()
            raise UserError(f"{path} holds no event")
        self._chunk_times = [chunk.at for chunk in self._chunks]
        self._chunk_offsets = [chunk.offset for chunk in self._chunks]
        self._mark_offsets = [mark.offset for mark in self.marks]

    def close(self) -> None:
        os.close(self._fd)

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def bytes_at(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._fd, num_bytes, offset)

    def read(self, offset: int, max_bytes: int = CHUNK_BYTES) -> list[bytes]:
        """Whole lines (with their ends) from the position ``offset`` on: about ``max_bytes``, one at least; [] at the
        end."""
        size = max_bytes
        while True:
            chunk = os.pread(self._fd, min(size, self.end - offset), offset)
            cut = chunk.rfind(b"\n") + 1
            if cut or len(chunk) < size:
                return chunk[:cut].splitlines(keepends=True) if b"\r" not in chunk else _lines(chunk[:cut])
            size *= 2

    def lines_before(self, offset: int) -> int:
        """How many lines lie before that position."""
        chunk = self._chunks[max(bisect.bisect_right(self._chunk_offsets, offset) - 1, 0)]
        rest = os.pread(self._fd, offset - chunk.offset, chunk.offset)
        return chunk.lines + rest.count(b"\n")

    def offset_at(self, at: float) -> int:
        """The position of which ``at`` is the time: after the last line that is not later."""
        index = bisect.bisect_right(self._chunk_times, at) - 1
        if index < 0:
            return 0
        offset, newest = self._chunks[index].offset, self._chunks[index].at
        for end, head in self._heads(offset):
            newest = newest if head is None else max(newest, head.at)
            if newest > at:
                break
            offset = end
        return offset

    def time_at(self, offset: int) -> float:
        """The time of a position; that of the first event for the beginning of the log."""
        chunk = self._chunks[max(bisect.bisect_right(self._chunk_offsets, offset) - 1, 0)]
        newest = chunk.at
        for end, head in self._heads(chunk.offset):
            if end > offset:
                break
            newest = newest if head is None else max(newest, head.at)
        return max(newest, self.first_at)

    def after(self, offset: int) -> int:
        """The position one line later; the log's end at its end."""
        lines = self.read(offset, 4096)
        return offset + len(lines[0]) if lines else self.end

    def before(self, offset: int) -> int:
        """The position one line earlier."""
        size = 4096
        while offset > 0:
            begin = max(offset - size, 0)
            found = os.pread(self._fd, offset - 1 - begin, begin).rfind(b"\n")
            if found >= 0 or begin == 0:
                return begin + found + 1
            size *= 2
        return 0

    def kind_before(self, offset: int) -> str:
        """The kind of the last event before that position; "" where there is none."""
        begin = self.before(offset)
        for end, head in self._heads(begin):
            return head.type if head is not None and end == offset else ""
        return ""

    def find_kind(self, kind: str, offset: int) -> int | None:
        """The position after the first event of that kind from ``offset`` on; None: there is none."""
        wanted = b'{"type":"' + kind.encode() + b'"'
        while offset < self.end:
            chunk = os.pread(self._fd, min(64 * CHUNK_BYTES, self.end - offset), offset)
            cut = chunk.rfind(b"\n") + 1
            if not cut:  # a line longer than that
                offset = self.after(offset)
                continue
            found = 0 if chunk.startswith(wanted) else chunk.find(b"\n" + wanted, 0, cut) + 1
            if found or chunk.startswith(wanted):
                return offset + chunk.index(b"\n", found) + 1
            offset += cut
        return None

    def next_mark(self, offset: int) -> LogMark | None:
        index = bisect.bisect_right(self._mark_offsets, offset)
        return self.marks[index] if index < len(self.marks) else None

    def previous_mark(self, offset: int) -> LogMark | None:
        index = bisect.bisect_left(self._mark_offsets, offset) - 1
        return self.marks[index] if index >= 0 else None

    # --- opening ----------------------------------------------------------------------------------------------

    def _index(self) -> None:
        self.end = os.fstat(self._fd).st_size
        offset = 0
        while lines := self.read(offset):
            self._chunks.append(_Chunk(offset, self.num_lines, self.last_at))
            for line in lines:
                offset += len(line)
                head = _head(line)
                if head is not None:
                    self._note(line, head, offset)
            self.num_lines += len(lines)
        self.end = offset  # what follows was cut off by a crash

    def _note(self, line: bytes, head: _Head, end: int) -> None:
        if head.at > self.last_at:
            self.last_at = head.at
        if self.first_at == float("inf"):
            self.first_at = head.at
        if head.type in _PLAIN:
            return
        event = decode_line(line, 0)
        if isinstance(event, DamagedLine):
            return
        if not is_of_request(event):
            self.rare.append((end - len(line), end))
        letter = mark_letter(event)
        if isinstance(event, WorkerReady) and self._returned(event):
            letter = "R"
        if isinstance(event, RunReady):
            self.ready_at = event.at
        if letter and self.ready_at is not None and len(self.marks) < MAX_MARKS:
            told = feed_line(event)
            self.marks.append(LogMark(end, self.last_at, letter, told.text if told is not None else ""))

    def _returned(self, event: WorkerReady) -> bool:
        """This process was ready before: it is back."""
        was_here = event.worker_id in self._were_ready
        self._were_ready.add(event.worker_id)
        return was_here

    def _heads(self, offset: int) -> Iterator[tuple[int, _Head | None]]:
        """(position after the line, its time and kind; None: damaged) of every line from ``offset`` on."""
        while lines := self.read(offset):
            for line in lines:
                offset += len(line)
                yield offset, _head(line)


_PLAIN: Final = frozenset(
    {
        "tokens_delivered", "request_arrived", "request_dispatched", "prefill_started", "prefill_progressed",
        "prefill_finished", "transfer_started", "transfer_completed", "decode_admitted", "first_token",
        "request_finished", "worker_stats", "router_stats",
    }
)  # fmt: skip
"""Kinds that are never a mark and make up nearly all of a log."""


def _head(line: bytes) -> _Head | None:
    try:
        return _decode_head.decode(line)
    except msgspec.DecodeError:
        return None


def _lines(chunk: bytes) -> list[bytes]:
    """``splitlines`` ends a line at a carriage return too; a log does not."""
    return [line + b"\n" for line in chunk.split(b"\n")[:-1]]
