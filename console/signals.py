"""SIGINT, SIGTERM and SIGHUP as something to wait for, in the event loop of a run without a console."""

import asyncio
import enum
import signal
from collections.abc import Coroutine
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Outcome(enum.Enum):
    """What came first."""

    DONE = "done"
    SIGNAL = "signal"
    TIMEOUT = "timeout"


class Signals:
    """Counts the signals that come while the running loop lives, in place of their default actions."""

    def __init__(self) -> None:
        self.count = 0
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        self.count += 1
        self._came.set()

    async def race(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Outcome:
        """Run ``work`` until it is done, a signal comes or the time is over. Work that is not done is cancelled;
        what it raises is raised here. A signal that nobody has waited for yet ends the next race at once."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait({working, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return Outcome.DONE
            if waiting.done():
                self._came.clear()
                return Outcome.SIGNAL
            return Outcome.TIMEOUT
        finally:
            working.cancel()
            waiting.cancel()
            await asyncio.wait({working, waiting})
