"""Reports peers that were turned away, without letting a flood of them fill the run log. Any thread may add."""

import threading
import time
from collections.abc import Callable
from typing import Final

from cluster.events import Event, PeerRefused
from transport.errors import AuthError

INTERVAL_S: Final = 1.0


class RefusalLog:
    """At most one event a second for each port; what came in between is counted into the next."""

    def __init__(
        self, worker_id: str, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker_id = worker_id
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def add(self, port: str, peer: str, error: AuthError) -> None:
        """A peer on ``port`` (kv | request) did not prove itself."""
        now = self._clock()
        with self._lock:
            count = self._untold.get(port, 0) + 1
            is_due = now - self._told_at.get(port, -INTERVAL_S) >= INTERVAL_S
            self._untold[port] = 0 if is_due else count
            if is_due:
                self._told_at[port] = now
        if is_due:
            self._emit(
                PeerRefused(
                    at=now,
                    source=self._worker_id,
                    worker_id=self._worker_id,
                    port=port,
                    peer=peer,
                    reason=str(error),
                    count=count,
                )
            )
