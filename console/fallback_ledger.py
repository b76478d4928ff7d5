"""What failures cost: one row per cause, with tokens computed again, time lost and whom it hurt. A fold; pure data."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

KEPT_VICTIMS: Final = 4


@dataclass(slots=True)
class LedgerRow:
    """``lost_ms``: from the start of the attempts that came to nothing to the moment they were given up.

    ``beside`` counts streams that were decoding on a worker at the moment it got a prompt to compute: they stalled.
    """

    kind: str  # fallback | retry | migration
    cause: str
    count: int = 0
    tokens: int = 0
    lost_ms: float = 0.0
    beside: int = 0
    workers: set[str] = field(default_factory=set)
    victims: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_VICTIMS))
    last_at: float = 0.0


class FallbackLedger:
    """Rows by (kind, cause)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], LedgerRow] = {}
        self.last_victim = ""
        """Id of the newest request that was hurt."""

    def add(
        self,
        kind: str,
        cause: str,
        *,
        at: float,
        request_id: str,
        tokens: int,
        lost_s: float,
        worker_id: str = "",
        beside: int = 0,
    ) -> None:
        """One failure survived. ``tokens`` must be computed again on ``worker_id`` ("": not known yet)."""
        row = self._rows.get((kind, cause))
        if row is None:
            row = self._rows[kind, cause] = LedgerRow(kind, cause)
        self.last_victim = request_id
        row.count += 1
        row.tokens += tokens
        row.lost_ms += max(lost_s, 0.0) * 1000
        row.beside += beside
        row.last_at = at
        row.victims.append(request_id)
        if worker_id:
            row.workers.add(worker_id)

    def rows(self) -> list[LedgerRow]:
        """The costliest first."""
        return sorted(self._rows.values(), key=lambda row: (-row.lost_ms, -row.tokens, row.cause))
