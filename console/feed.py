"""Reads the run's log as it grows and folds it into the view state, in slices, so that keys are never kept waiting."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.events import Event, WorkerExited, WorkerFailed, WorkerReady
from cluster.run_log import LogTail
from console.feed_text import Line, feed_line
from console.view_state import ViewState

SLICE_BYTES: Final = 64 * 2**10
"""A few hundred events: some milliseconds of work between two turns of the event loop."""
POLL_S: Final = 0.1
LAG_WINDOW: Final = 50
"""The shown loop lag is the worst of so many polls (5 s)."""


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
        self._lags_s = [0.0] * LAG_WINDOW
        self._polls = 0

    @property
    def lag_s(self) -> float:
        """How late the event loop was at worst lately."""
        return max(self._lags_s)

    async def run(self) -> None:
        """Until cancelled. Raises msgspec.DecodeError for a log that is not one, OSError for one not readable."""
        while True:
            if not self.paused:
                await self.read_available()
            before = time.monotonic()
            await asyncio.sleep(POLL_S)
            self._lags_s[self._polls % LAG_WINDOW] = max(time.monotonic() - before - POLL_S, 0.0)
            self._polls += 1

    async def read_available(self) -> None:
        """Fold everything the log holds now, giving way to other tasks after each slice."""
        while not self.paused:
            events = self._tail.read_new(SLICE_BYTES)
            if not events:
                break
            self.slices += 1
            for event in events:
                self.state.fold(event)
                if self.caught_up:
                    self._alert(event)
            await asyncio.sleep(0)
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
