"""A list of byte views treated as one long buffer that is filled or drained bit by bit. Copies nothing."""

from collections.abc import Iterable

MAX_IOV = (
    128  # views per system call: each costs something on every call, while a call moves a few 100 KB at most
)


class IoVec:
    def __init__(self, views: Iterable[bytes | bytearray | memoryview]) -> None:
        self._views: list[memoryview] = []
        self._index = 0
        self._offset = 0  # within the view at _index
        num_bytes = 0
        for view in views:
            flat = memoryview(view)
            if flat.format != "B" or flat.ndim != 1:
                flat = flat.cast("B")
            if flat.nbytes:
                self._views.append(flat)
                num_bytes += flat.nbytes
        self.num_bytes = num_bytes
        self.remaining_bytes = num_bytes

    def head(self) -> list[memoryview]:
        """The next views to hand to the kernel, at most MAX_IOV of them."""
        head = self._views[self._index : self._index + MAX_IOV]
        if head and self._offset:
            head[0] = head[0][self._offset :]
        return head

    def advance(self, num_bytes: int) -> list[memoryview]:
        """Moves past ``num_bytes`` and returns the views of just these bytes."""
        if num_bytes > self.remaining_bytes:
            raise ValueError(f"advance by {num_bytes} bytes; allowed is at most {self.remaining_bytes}")
        self.remaining_bytes -= num_bytes
        views, index, offset = self._views, self._index, self._offset
        passed: list[memoryview] = []
        while num_bytes:
            view = views[index]
            left = view.nbytes - offset
            if num_bytes < left:
                passed.append(view[offset : offset + num_bytes])
                offset += num_bytes
                break
            passed.append(view[offset:] if offset else view)
            num_bytes -= left
            index += 1
            offset = 0
        self._index, self._offset = index, offset
        return passed


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
