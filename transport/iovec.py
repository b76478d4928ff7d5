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
        if not self.remaining_bytes:
            return []
        last = min(self._index + MAX_IOV, len(self._views)) - 1
        end = self._ends[last]
        if most_bytes is not None and end - self._position > most_bytes:
            end = self._position + most_bytes
            last = bisect_left(self._ends, end, self._index)
        return self._views_to(last, end)

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
        end = self._position + num_bytes
        last = bisect_left(self._ends, end, self._index)  # holds the byte before ``end``
        passed = self._views_to(last, end)
        self._index, self._position = last + (self._ends[last] == end), end
        return passed

    def _views_to(self, last: int, end: int) -> list[memoryview]:
        """From the next byte to the one before ``end``, which view ``last`` holds."""
        views = self._views[self._index : last + 1]
        if self._ends[last] != end:
            views[-1] = views[-1][: end - self._start(last)]
        if offset := self._position - self._start(self._index):
            views[0] = views[0][offset:]
        return views

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
