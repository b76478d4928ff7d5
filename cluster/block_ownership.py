"""Who holds the KV blocks of a worker, and whether somebody will free them. Runs in the engine's thread only.

Between two engine steps every sequence that holds blocks belongs to a job of the prefill or the decode side, whose end
frees them. One without a job is a defect, and its blocks are *stranded*; so are blocks held by no sequence at all.
"""

import time
from collections.abc import Callable

from cluster.attempt import split_key
from cluster.control import BlockHolder, BlocksReported
from cluster.events import BlocksStranded, Event
from cluster.worker_sides import WorkerSides
from engine.engine import Engine


class BlockOwnership:
    """``emit`` gets a BlocksStranded whenever the number of stranded blocks has grown."""

    def __init__(
        self, worker_id: str, engine: Engine, sides: WorkerSides, emit: Callable[[Event], None]
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._sides = sides
        self._emit = emit
        self.stranded_blocks = 0  # as of the last check

    def check(self) -> int:
        """Count stranded blocks now, and tell of more than before; cheap enough for every idle moment."""
        stats = self._engine.stats()
        ownerless = 0
        num_owned = 0
        for owner in self._engine.owners():
            num_owned += owner.num_blocks
            if not self._sides.owner_of(owner.request_id)[0]:
                ownerless += owner.num_blocks
        stranded = ownerless + max(stats.held_blocks - num_owned, 0)
        if stranded > self.stranded_blocks:
            holders = [holder for holder in self._holders(time.monotonic()) if not holder.owner]
            names = ", ".join(f"{h.request_id}#{h.attempt} ({h.status}, {h.blocks} blocks)" for h in holders)
            self._emit(
                BlocksStranded(
                    at=time.monotonic(),
                    source=self._worker_id,
                    worker_id=self._worker_id,
                    blocks=stranded,
                    holders=names or "no sequence",
                )
            )
        self.stranded_blocks = stranded
        return stranded

    def report(self, report_id: int) -> BlocksReported:
        """Everything held now."""
        stranded = self.check()
        stats = self._engine.stats()
        return BlocksReported(
            report_id=report_id,
            worker_id=self._worker_id,
            total_blocks=stats.total_blocks,
            held_blocks=stats.held_blocks,
            stranded_blocks=stranded,
            holders=tuple(self._holders(time.monotonic())),
        )

    def _holders(self, now: float) -> list[BlockHolder]:
        found = []
        for owner in self._engine.owners():
            request_id, attempt = split_key(owner.request_id)
            side, peer = self._sides.owner_of(owner.request_id)
            found.append(
                BlockHolder(
                    request_id=request_id,
                    attempt=attempt,
                    status=str(owner.status),
                    blocks=owner.num_blocks,
                    age_s=now - owner.since,
                    owner=side,
                    peer=peer,
                )
            )
        return found
