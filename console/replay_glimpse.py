"""A moment far ahead, to be looked at while the log before it is still being read.

It folds the rare lines of everything before that moment (which processes there are, how they are linked, which mode,
what was broken), and every line of the last stretch. What is shown of the last minute is right then; what counts from
the beginning of the run is not there yet, and whoever draws this has to say so.
"""

import bisect
from typing import Final

from cluster.run_log import DamagedLine, decode_line
from console.replay_log import ReplayLog
from console.view_snapshot import SPACING_BYTES, collector_paused
from console.view_state import ViewState

FAR_BYTES: Final = SPACING_BYTES
"""How much there has to be to read before a glimpse is worth its time."""
STRETCH_BYTES: Final = 4 * 2**20
"""Of a busy run some 18,000 events, folded in 0.15 to 0.3 s."""
PIECE_BYTES: Final = 64 * 2**10
PIECE_LINES: Final = 300


class ReplayGlimpse:
    """Of the position ``offset`` of ``log``. ``work`` makes it in pieces; ``state`` is to be drawn once it is made."""

    def __init__(self, log: ReplayLog, offset: int) -> None:
        self.state = ViewState()
        self._log = log
        self._end = offset
        self._offset = log.before(max(offset - STRETCH_BYTES, 1))
        rare = log.rare
        self._rare = rare[: bisect.bisect_left(rare, (self._offset, 0))]
        self._num_folded = 0

    @property
    def is_made(self) -> bool:
        return self._offset >= self._end

    def work(self) -> None:
        """Some hundred lines of it."""
        with collector_paused():
            if self._num_folded < len(self._rare):
                for begin, end in self._rare[self._num_folded : self._num_folded + PIECE_LINES]:
                    self._fold(self._log.bytes_at(begin, end - begin))
                self._num_folded += PIECE_LINES
                return
            for line in self._log.read(self._offset, min(PIECE_BYTES, self._end - self._offset)):
                self._fold(line)
                self._offset += len(line)

    def _fold(self, line: bytes) -> None:
        found = decode_line(line, 0)
        if not isinstance(found, DamagedLine):
            self.state.fold(found)
