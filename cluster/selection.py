"""Which worker takes a request, and why in one printable phrase. Pure: values in, a choice out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.control import WorkerAddress
from cluster.worker_roles import DECODE_ROLES, PREFILL_ROLES


class Promises(dict[str, int]):
    """Request id -> how much it was promised; ``total`` is their sum. Changed by assignment, ``pop`` and ``clear``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __setitem__(self, request_id: str, amount: int) -> None:
        self.total += amount - self.get(request_id, 0)
        super().__setitem__(request_id, amount)

    def pop(self, request_id: str, default: int | None = None) -> int | None:  # type: ignore[override]
        amount = super().pop(request_id, None)
        self.total -= amount or 0
        return default if amount is None else amount

    def clear(self) -> None:
        super().clear()
        self.total = 0


@dataclass(slots=True)
class WorkerView:
    """What the router knows of one ready worker: its address and what the router itself put there.

    The router is the workers' only client, so its own count is exact and, unlike a reported one, never stale.
    """

    address: WorkerAddress
    connected: bool = False
    draining_since: float | None = None  # it takes no new requests
    is_drained: bool = False  # and nothing is left on it
    prefilling_since: float = 0.0  # the first of the queued prompts is computed since then
    queued_prompt_tokens: Promises = field(default_factory=Promises)  # to prefill
    assigned_blocks: Promises = field(default_factory=Promises)  # it may need to decode

    @property
    def worker_id(self) -> str:
        return self.address.worker_id

    @property
    def is_available(self) -> bool:
        """It may be given new requests."""
        return self.connected and self.draining_since is None

    @property
    def num_queued_prompt_tokens(self) -> int:
        return self.queued_prompt_tokens.total

    @property
    def num_assigned(self) -> int:
        return len(self.assigned_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks not promised to anybody: total less the promises."""
        return self.address.total_blocks - self.assigned_blocks.total

    @property
    def state(self) -> str:
        """For the operator: connecting | connected | draining | drained."""
        if not self.connected:
            return "connecting"
        if self.draining_since is None:
            return "connected"
        return "drained" if self.is_drained else "draining"

    def is_prefill(self) -> bool:
        return self.address.role in PREFILL_ROLES

    def is_decode(self) -> bool:
        return self.address.role in DECODE_ROLES

    def set_draining(self, is_draining: bool, now: float) -> None:
        if not is_draining:
            self.draining_since = None
        elif self.draining_since is None:
            self.draining_since, self.is_drained = now, False

    def can_take(self, num_blocks: int) -> bool:
        return num_blocks <= self.free_blocks and self.num_assigned < self.address.max_num_seqs


@dataclass(frozen=True, slots=True)
class Pick:
    worker_id: str
    reason: str


def blocks_needed(num_prompt_tokens: int, max_tokens: int, address: WorkerAddress) -> int:
    """Blocks a request may need to its end on that worker."""
    num_tokens = min(num_prompt_tokens + max_tokens, address.max_model_len)
    return -(-num_tokens // address.block_size)


def pick_prefill(workers: Iterable[WorkerView], exclude: Sequence[str] = ()) -> Pick | None:
    """The available prefill worker with the fewest queued prompt tokens; None when there is none."""
    able = [w for w in workers if w.connected and w.is_prefill() and w.worker_id not in exclude]
    candidates = [w for w in able if w.is_available]
    if not candidates:
        return None
    best, left_out = min(candidates, key=lambda w: (w.num_queued_prompt_tokens, w.worker_id)), _draining(able)
    tokens = best.num_queued_prompt_tokens
    if len(candidates) == 1:
        return Pick(best.worker_id, f"only prefill worker ({tokens} tokens queued){left_out}")
    return Pick(best.worker_id, f"least queued prompt tokens ({tokens}){left_out}")


def pick_decode(
    workers: Iterable[WorkerView], num_prompt_tokens: int, max_tokens: int, exclude: Sequence[str] = ()
) -> Pick | None:
    """The available decode worker with most free blocks, then fewest sequences; None when none can take it."""
    able = [w for w in workers if w.connected and w.is_decode() and w.worker_id not in exclude]
    candidates = [
        w
        for w in able
        if w.is_available and w.can_take(blocks_needed(num_prompt_tokens, max_tokens, w.address))
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda w: (-w.free_blocks, w.num_assigned, w.worker_id))
    left_out = _draining(able)
    if len(candidates) == 1:
        return Pick(
            best.worker_id, f"only decode worker with room ({best.free_blocks} blocks free){left_out}"
        )
    return Pick(best.worker_id, f"most free blocks ({best.free_blocks}){left_out}")


def pick_colocated(workers: Iterable[WorkerView], num_prompt_tokens: int, max_tokens: int) -> Pick | None:
    """Any available worker with room: fewest queued prompt tokens, then fewest sequences."""
    able = [w for w in workers if w.connected]
    candidates = [
        w
        for w in able
        if w.is_available and w.can_take(blocks_needed(num_prompt_tokens, max_tokens, w.address))
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda w: (w.num_queued_prompt_tokens, w.num_assigned, w.worker_id))
    return Pick(
        best.worker_id,
        f"colocated: least queued prompt tokens ({best.num_queued_prompt_tokens}), {best.num_assigned} sequences"
        f"{_draining(able)}",
    )


def _draining(workers: Iterable[WorkerView]) -> str:
    """Which workers were left out of a choice because they drain, as the end of its reason."""
    names = ", ".join(w.worker_id for w in workers if not w.is_available)
    return f"; draining: {names}" if names else ""
