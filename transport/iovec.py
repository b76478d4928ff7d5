"""A list of byte views treated as one long buffer that is filled or drained bit by bit. Copies nothing."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import attrgetter

MAX_IOV = (
    128  # views per system call: each costs something on every call, while a call moves a few 100 KB at most
)


_SIZE = attrgetter("nbytes")


def total_bytes(views: Iterable[memoryview]) -> int:
    return sum(map(_SIZE, views))


class IoVec:
    """Scattered KV comes as thousands of views: what is done to each of them is left to loops inside Python."""

    def __init__(self, views: Iterable[bytes | bytearray | memoryview]) -> None:
        flat = [view if type(view) is memoryview else memoryview(view) for view in views]
        sizes = list(map(_SIZE, flat))
        if list(map(len, flat)) != sizes:
            flat = [view if len(view) == view.nbytes else view.cast("B") for view in flat]
        if 0 in sizes:
            flat = [view for view in flat if view.nbytes]
            sizes = list(map(_SIZE, flat))
        self._views = flat
        self._ends = list(accumulate(sizes))
        self._index = 0  # of the view that the next byte is in
        self._position = 0
        self.num_bytes = self._ends[-1] if flat else 0

    @property
    def remaining_bytes(self) -> int:
        return self.num_bytes - self._position

    def head(self, most_bytes: int | None = None) -> list[memoryview]:
        """The next views to hand to the kernel, at most MAX_IOV of them, and of no more than ``most_bytes``."""
        first, position = self._index, self._position
        head = self._views[first : first + MAX_IOV]
        if most_bytes is not None and head and self._ends[first + len(head) - 1] - position > most_bytes:
            end = position + most_bytes
            last = bisect_left(self._ends, end, first)
            del head[last - first + 1 :]
            head[-1] = head[-1][: end - self._start(last)]
        if head and (offset := position - self._start(first)):
            head[0] = head[0][offset:]
        return head

    def skip(self, num_bytes: int) -> None:
        """Moves past ``num_bytes``. Raises ValueError if there are fewer."""
        if num_bytes > self.remaining_bytes:
            raise ValueError(f"skip of {num_bytes} bytes; allowed is at most {self.remaining_bytes}")
        self._position += num_bytes
        self._index = bisect_right(self._ends, self._position, self._index)

    def advance(self, num_bytes: int) -> list[memoryview]:
        """Moves past ``num_bytes`` and returns the views of just these bytes."""
        if num_bytes > self.remaining_bytes:
            raise ValueError(f"advance by {num_bytes} bytes; allowed is at most {self.remaining_bytes}")
        if not num_bytes:
            return []
        first, offset = self._index, self._position - self._start(self._index)
        end = self._position + num_bytes
        last = bisect_left(self._ends, end, first)  # holds the byte before ``end``
        passed = self._views[first : last + 1]
        is_whole = self._ends[last] == end
        if not is_whole:
            passed[-1] = passed[-1][: end - self._start(last)]
        if offset:
            passed[0] = passed[0][offset:]
        self._index, self._position = last + is_whole, end
        return passed

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0


def split_views(views: Iterable[memoryview], sizes: Iterable[int]) -> list[list[memoryview]]:
    """Cuts a list of views into consecutive pieces of the given sizes in bytes, which must add up."""
    vector = IoVec(views)
    pieces = [vector.advance(size) for size in sizes]
    if vector.remaining_bytes:
        raise ValueError(f"{vector.remaining_bytes} bytes are left over after the last piece")
    return pieces


class Scratch:
    """A byte buffer that grows and is reused. A view of it is good until the next call of ``view``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def view(self, num_bytes: int) -> memoryview:
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]
