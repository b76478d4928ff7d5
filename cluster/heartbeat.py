"""Which children have been silent for too long. Pure: times in, names out."""

from collections.abc import Mapping
from typing import Final

PING_INTERVAL_S: Final = 0.5


class Heartbeats:
    """Judges silence, and does not mistake the judge's own pause for everybody else's death.

    When a tick comes late (the machine slept, the judging process was stopped), the answers of that time are still
    unread: silence counts from that tick on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_tick_at: float | None = None
        self._amnesty_at = 0.0

    def silent(self, heard_at: Mapping[str, float], now: float) -> dict[str, float]:
        """Names and their seconds of silence, of those beyond the limit. Call it about every PING_INTERVAL_S."""
        if self._last_tick_at is not None and now - self._last_tick_at > 2 * PING_INTERVAL_S:
            self._amnesty_at = now
        self._last_tick_at = now
        silences = {name: now - max(at, self._amnesty_at) for name, at in heard_at.items()}
        return {name: silent_s for name, silent_s in silences.items() if silent_s > self._timeout_s}
