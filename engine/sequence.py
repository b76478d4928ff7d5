"""The running state of one request inside one engine. Knows no tensors and no other sequence."""

import struct
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from engine.block_table import BlockTable
from engine.request import Request


class SequenceStatus(StrEnum):
    """Where a sequence is in its life; ``TRANSITIONS`` says what may follow what."""

    WAITING = "waiting"  # queued, holds no blocks
    WAITING_FOR_KV = "waiting_for_kv"  # holds every block it may need; its KV arrives from another worker
    RUNNING = "running"  # scheduled in every step, as far as the token budget goes
    HANDING_OFF = "handing_off"  # its first token is sampled; its blocks stay pinned until release
    FINISHED = "finished"  # holds nothing


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.WAITING_FOR_KV: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.WAITING, SequenceStatus.HANDING_OFF, SequenceStatus.FINISHED}  # WAITING: preempted
    ),
    SequenceStatus.HANDING_OFF: frozenset({SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class InvalidTransition(Exception):
    """A sequence was asked to go where its status does not lead."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts, tokens and block table of one request.

    Invariant: KV of the first ``num_computed_tokens`` tokens is in the blocks of ``block_table``. A sequence is
    computed until that count catches up with its tokens; then the next token is sampled. There is no other phase.
    """

    request: Request
    arrival: int  # order of arrival in this engine; preemption does not change it
    since: float  # time.monotonic() of the last change of status
    hold: bool = False  # hand off after the first token
    reserved: bool = False  # owns every block it may ever need
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the computed ones, how many the prefix cache gave
    prefill_end: int = 0  # tokens before this one are prefill, later ones decode
    block_table: BlockTable = field(default_factory=BlockTable)
    num_registered_blocks: int = 0  # blocks whose content the allocator knows
    has_exact_kv: bool = True  # False: it came by a lossy codec, and what is computed on it is as inexact
    num_preemptions: int = 0
    _block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.prefill_end = len(self.token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Sampled so far, here or by a worker that had the request before."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.prefill_end

    @property
    def is_preemptible(self) -> bool:
        """Not where another worker relies on the blocks: KV sent from them, or received into them."""
        return not self.hold and not self.reserved

    def move_to(self, status: SequenceStatus, now: float) -> None:
        """Raises InvalidTransition naming the sequence and both states."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"request {self.request_id}: {self.status} -> {status}")
        self.status = status
        self.since = now

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Content hashes of the first ``count`` full blocks.

        Each covers the block's token ids and everything before it, so equal hashes mean equal KV, in any process.
        """
        for index in range(len(self._block_hashes), count):
            parent = self._block_hashes[-1] if self._block_hashes else b""
            tokens = struct.pack(
                f"<{block_size}q", *self.token_ids[index * block_size : (index + 1) * block_size]
            )
            self._block_hashes.append(xxhash.xxh3_128_digest(parent + tokens))
        return self._block_hashes[:count]
