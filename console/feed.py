"""Reads the run's log as it grows and folds it into the view state, in slices, so that keys are never kept waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from cluster.events import Event, WorkerExited, WorkerFailed, WorkerReady
from cluster.run_log import DamagedLine, LogTail
from console.feed_text import Line, feed_line
from console.own_cost import LoopLag
from console.view_state import ViewState

SLICE_BYTES: Final = 64 * 2**10
"""A few hundred events: some milliseconds of work between two turns of the event loop."""
POLL_S: Final = 0.1


class Feed(Protocol):
    """What the app needs of whatever brings events into the view state. ``run`` is its task."""

    paused: bool
    slices: int

    @property
    def caught_up(self) -> bool:
        """Everything that is to be shown by now has been folded."""

    @property
    def lag_s(self) -> float:
        """How late the event loop was at worst lately."""

    @property
    def log_bytes(self) -> int:
        """Size of the log."""

    async def run(self) -> None:
        """Until cancelled."""

    async def read_available(self) -> None:
        """Fold everything that is to be shown now."""


class LogFeed:
    """One asyncio task (``run``) that owns ``state``; everybody else only reads it.

    While ``paused`` nothing is read: the file keeps what happens meanwhile.
    """

    def __init__(self, path: Path, state: ViewState, on_alert: Callable[[Line], None]) -> None:
        self.state = state
        self.paused = False
        self.log_bytes = 0
        self.slices = 0
        self.caught_up = False
        self._path = path
        self._tail = LogTail(path)
        self._on_alert = on_alert
        self._lag = LoopLag()

    @property
    def lag_s(self) -> float:
        return self._lag.worst_s

    async def run(self) -> None:
        """Until cancelled. Raises OSError for a log that is not readable."""
        while True:
            if not self.paused:
                await self.read_available()
            await self._lag.sleep(POLL_S)

    async def read_available(self) -> None:
        """Fold everything the log holds now, giving way to other tasks after each slice."""
        while not self.paused:
            found = self._tail.read_lines(SLICE_BYTES)
            if not found:
                break
            self.slices += 1
            for event in found:
                if isinstance(event, DamagedLine):
                    self.state.pass_over(event)
                    continue
                self.state.fold(event)
                if self.caught_up:
                    self._alert(event)
            await self._lag.sleep(0.0)
        self.caught_up = True
        if self._path.exists():
            self.log_bytes = self._path.stat().st_size

    def _alert(self, event: Event) -> None:
        """A process's death or return deserves more than its line in the feed."""
        match event:
            case WorkerExited() if event.cause != "stop":
                pass
            case WorkerFailed():
                pass
            case WorkerReady() if self.state.topology.workers[event.worker_id].restarts:
                pass
            case _:
                return
        line = feed_line(event)
        if line is not None:
            self._on_alert(line)
