"""The view of a log at a position that can be moved: forwards by folding on, backwards and far ahead from snapshots."""

from typing import Final

from cluster.run_log import DamagedLine, decode_line
from console.replay_log import ReplayLog
from console.view_snapshot import Snapshots, collector_paused
from console.view_state import ViewState

READ_BYTES: Final = 64 * 2**10


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
                self._draft = self._snapshots.load(best)
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
        with collector_paused():
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
