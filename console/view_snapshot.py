"""Folds of one log by position, packed: what makes a jump cost the fold of a stretch of the log, and not of all before.

They are taken every ``spacing`` bytes of log by whoever folds past such a place first. With a store they lie on disk
and outlive this process; without one, and where the disk is full, they lie in memory.
"""

import bisect
import contextlib
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any, Final, Protocol

import zstandard

from console.view_state import ViewState

SPACING_BYTES: Final = 6 * 2**20
"""Some 25,000 events: a quarter of a second of folding."""
MAX_SNAPSHOTS: Final = 40
"""Of a busy run each takes about 3 MiB."""

_OWN_PACKAGES: Final = ("console.", "cluster.")
_OTHERS: Final = (
    ("array", "_array_reconstructor"),
    ("array", "array"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("msgspec._utils", "rebuild"),
)
"""What a packed view is made of besides this program's own classes."""


class Store(Protocol):
    """Where packed folds of one log are kept, by position. Nothing of it raises: what it cannot do, it does not do."""

    def offsets(self) -> list[int]: ...
    def read(self, offset: int) -> bytes | None: ...
    def write(self, offset: int, packed: bytes) -> bool: ...
    def drop(self, offset: int) -> None: ...


def pack(state: ViewState) -> bytes:
    with collector_paused():
        return zstandard.compress(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), 1)


def unpack(packed: bytes) -> ViewState:
    """Inverse of :func:`pack`. Raises UnpicklingError or ZstdError for what is no packed view."""
    with collector_paused():
        state: ViewState = _ViewUnpickler(io.BytesIO(zstandard.decompress(packed))).load()
        return state


class Snapshots:
    """Beyond ``limit`` snapshots every second is dropped and the spacing doubled."""

    def __init__(
        self, spacing_bytes: int = SPACING_BYTES, limit: int = MAX_SNAPSHOTS, store: Store | None = None
    ) -> None:
        self.spacing_bytes = spacing_bytes
        self._limit = limit
        self._store = store
        self._offsets = sorted(store.offsets()) if store is not None else []
        self._in_memory: dict[int, bytes] = {}

    @property
    def furthest(self) -> int:
        """The last position that has one; 0 where there is none."""
        return self._offsets[-1] if self._offsets else 0

    def nearest(self, offset: int) -> int:
        """The last position with one at or before ``offset``; 0: the fold of nothing."""
        index = bisect.bisect_right(self._offsets, offset)
        return self._offsets[index - 1] if index else 0

    def load(self, offset: int) -> tuple[int, ViewState]:
        """The nearest fold at or before ``offset``, and its position; one that the store has lost is forgotten."""
        while place := self.nearest(offset):
            packed = self._in_memory.get(place)
            if packed is None and self._store is not None:
                packed = self._store.read(place)
            if packed is not None:
                with contextlib.suppress(pickle.UnpicklingError, zstandard.ZstdError):
                    return place, unpack(packed)
            self._offsets.remove(place)
        return 0, ViewState()

    def offer(self, offset: int, state: ViewState) -> None:
        """Keep the fold at this position if it is the first in its stretch of the log."""
        if offset - self.nearest(offset) < self.spacing_bytes:
            return
        index = bisect.bisect_right(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] - offset < self.spacing_bytes:
            return
        self._offsets.insert(index, offset)
        packed = pack(state)
        if self._store is None or not self._store.write(offset, packed):
            self._in_memory[offset] = packed
        if len(self._offsets) > self._limit:
            self._thin()

    def _thin(self) -> None:
        self.spacing_bytes *= 2
        for offset in self._offsets[::2]:
            if self._in_memory.pop(offset, None) is None and self._store is not None:
                self._store.drop(offset)
        self._offsets = self._offsets[1::2]


class _ViewUnpickler(pickle.Unpickler):
    """Knows the classes that a view is made of and nothing else that a pickle might ask for."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_other = (module_name, global_name) in _OTHERS
        if is_other or module_name.startswith(_OWN_PACKAGES):
            found = super().find_class(module_name, global_name)
            if is_other or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of a view")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A view is made of some 100,000 objects, none of them garbage: not looked at after every 700 new ones, they are
    folded faster by a tenth and unpacked in half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
