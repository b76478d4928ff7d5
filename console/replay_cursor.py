"""The view of a log at a position that can be moved: forwards by folding on, backwards and far ahead from snapshots.

A snapshot is the fold at a position, pickled and compressed; it never leaves this process. They are taken every
``spacing`` bytes of log by whoever folds past such a place first, so that a move folds at most that much.
"""

import bisect
import pickle
from typing import Final

import zstandard

from cluster.run_log import DamagedLine, decode_line
from console.replay_log import ReplayLog
from console.view_state import ViewState

SPACING_BYTES: Final = 6 * 2**20
"""Some 25,000 events: a quarter of a second of folding."""
MAX_SNAPSHOTS: Final = 40
"""Of a busy run each takes about 3 MiB."""
READ_BYTES: Final = 64 * 2**10


class Snapshots:
    """Folds of one log by position. Beyond MAX_SNAPSHOTS every second is dropped and the spacing doubled."""

    def __init__(self, spacing_bytes: int = SPACING_BYTES, limit: int = MAX_SNAPSHOTS) -> None:
        self.spacing_bytes = spacing_bytes
        self._limit = limit
        self._offsets: list[int] = []
        self._packed: list[bytes] = []

    @property
    def furthest(self) -> int:
        """The last position that has one; 0 where there is none."""
        return self._offsets[-1] if self._offsets else 0

    def nearest(self, offset: int) -> int:
        """The last position with one at or before ``offset``; 0: the fold of nothing."""
        index = bisect.bisect_right(self._offsets, offset)
        return self._offsets[index - 1] if index else 0

    def load(self, offset: int) -> ViewState:
        """The fold at a position that ``nearest`` or ``furthest`` gave."""
        if offset == 0:
            return ViewState()
        packed = self._packed[self._offsets.index(offset)]
        state: ViewState = pickle.loads(
            zstandard.decompress(packed)
        )  # made by ``offer`` below, in this process
        return state

    def offer(self, offset: int, state: ViewState) -> None:
        """Keep the fold at this position if it is the first in its stretch of the log."""
        if offset - self.nearest(offset) < self.spacing_bytes:
            return
        index = bisect.bisect_right(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] - offset < self.spacing_bytes:
            return
        self._offsets.insert(index, offset)
        self._packed.insert(index, zstandard.compress(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), 1))
        if len(self._offsets) > self._limit:
            self.spacing_bytes *= 2
            self._offsets, self._packed = self._offsets[1::2], self._packed[1::2]


class ReplayCursor:
    """``state`` is the fold of every line before ``offset``. ``aim`` says where to go, ``work`` goes, in pieces."""

    def __init__(self, log: ReplayLog, snapshots: Snapshots) -> None:
        self.log = log
        self.state = ViewState()
        self.offset = 0
        self._snapshots = snapshots
        self._target = 0
        self._draft: tuple[int, ViewState] | None = None  # a jump that has not arrived yet

    @property
    def reached(self) -> int:
        """How far folding has come: ``offset``, or that of what will be shown once it has arrived."""
        return self.offset if self._draft is None else self._draft[0]

    def aim(self, offset: int) -> None:
        """Go to this position: by folding on where that is nearest, else from a snapshot."""
        self._target = offset
        if offset == self.offset:
            self._draft = None
            return
        best = self._snapshots.nearest(offset)
        if offset < self.reached or best > self.reached:
            if self.offset <= offset and best <= self.offset:
                self._draft = None
            else:
                self._draft = (best, self._snapshots.load(best))
                self._swap()

    def work(self) -> bool:
        """Fold some hundred events towards the aim; True when it is reached (nothing is done then)."""
        if self._draft is None:
            if self.offset >= self._target:
                return True
            self.offset = self._fold(self.state, self.offset)
        else:
            offset, state = self._draft
            self._draft = (self._fold(state, offset), state)
            self._swap()
        return False

    def _swap(self) -> None:
        """A jump becomes visible when it arrives, as a whole."""
        if self._draft is not None and self._draft[0] >= self._target:
            self.offset, self.state = self._draft
            self._draft = None

    def _fold(self, state: ViewState, offset: int) -> int:
        first = -1
        for index, line in enumerate(self.log.read(offset, min(READ_BYTES, self._target - offset))):
            found = decode_line(line, 0)
            if isinstance(found, DamagedLine):
                first = self.log.lines_before(offset) - index if first < 0 else first
                state.pass_over(DamagedLine(first + index + 1, found.problem))
            else:
                state.fold(found)
            offset += len(line)
        self._snapshots.offer(offset, state)
        return offset
