"""What the next step computes. Decisions only: knows no tensors, no model and no clock (``now`` is given).

One rule, after vLLM's: there is no prefill phase. A sequence is scheduled until its computed tokens catch up with its
tokens, so a chunk of a prompt, a decode step and the recomputation after a preemption are the same thing.

A step is filled in this order:
1. one token for every running sequence that has caught up (decode), oldest first. Where a block is missing, the
   youngest preemptible sequence gives its blocks back and is recomputed later;
2. the rest of the token budget for prompts, running ones and newly admitted ones, as ``share_prefill_budget`` says.
   A sequence is admitted only with blocks for all its tokens, so a prefill never stops for want of a block.

Nobody starves: the oldest prompt gets half of the prefill budget whatever arrives, and who waits for blocks is passed
only by those that leave it the blocks it waits for.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.block_allocator import BlockAllocator
from engine.block_table import BlockTable
from engine.budget import share_prefill_budget
from engine.sequence import Sequence, SequenceStatus


class NoCapacity(Exception):
    """A reservation does not fit now; it may fit later. The message says what is short, with numbers."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens ``start .. start + num_tokens - 1`` of one sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_prefill: bool
    samples: bool  # the chunk ends at the sequence's last token, so the next one is sampled


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work; empty when nothing can run."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[str, ...]  # request ids


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """Every live sequence and who of them runs. ``max_model_len`` bounds what one sequence may ever hold."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefill_chunk_tokens: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens  # of one prompt in one step; 0 = the whole budget
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.sequences: dict[str, Sequence] = {}  # every live one, by request id
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival
        self.num_reserved = 0  # sequences in WAITING_FOR_KV

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.sequences[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_by_arrival)

    def reserve(self, sequence: Sequence, now: float) -> None:
        """Give a sequence every block it may ever need and a place among the running ones, before its KV is here.

        Full blocks of its prefix that are cached here are shared, not allocated: they are computed already, stay pinned
        until the sequence ends, and nobody writes them. At least the last token is left to come.
        Raises NoCapacity, and then holds nothing.
        """
        if self._free_places() < 1:
            raise NoCapacity(f"{self.max_num_seqs} of {self.max_num_seqs} sequences are running or reserved")
        cached = self._cached_blocks(sequence)
        needed = self._max_blocks(sequence) - len(cached)
        if not self.allocator.can_allocate(needed, sharing=cached):
            free = self.allocator.num_free - sum(1 for block in cached if not self.allocator.ref_count(block))
            raise NoCapacity(f"{needed} blocks are needed, {free} are free")
        self.allocator.share(cached)
        last = cached[-1] if cached else None
        sequence.block_table = BlockTable(cached + self.allocator.allocate(needed, after=last))
        sequence.num_cached_tokens = sequence.num_computed_tokens = len(cached) * self.allocator.block_size
        sequence.num_registered_blocks = len(cached)
        sequence.reserved = True
        sequence.status, sequence.since = SequenceStatus.WAITING_FOR_KV, now
        self.sequences[sequence.request_id] = sequence
        self.num_reserved += 1

    def start_reserved(self, sequence: Sequence, num_computed_tokens: int, now: float) -> None:
        """A reserved sequence begins to run, with KV of so many tokens in its blocks; the others are computed here.

        Raises ValueError for fewer tokens than its shared blocks hold: these must not be written.
        """
        if num_computed_tokens < sequence.num_cached_tokens:
            raise ValueError(
                f"request {sequence.request_id} starts at token {num_computed_tokens}; "
                f"allowed is {sequence.num_cached_tokens} or more"
            )
        sequence.move_to(SequenceStatus.RUNNING, now)
        self.num_reserved -= 1
        sequence.num_computed_tokens = num_computed_tokens
        self._register_full_blocks(sequence)
        insort(self.running, sequence, key=_by_arrival)

    def hand_off(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of the running set; its blocks stay pinned until ``finish``."""
        sequence.move_to(SequenceStatus.HANDING_OFF, now)
        self.running.remove(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Forget a sequence, from any status, and free its blocks."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING_FOR_KV:
            self.num_reserved -= 1
        sequence.move_to(SequenceStatus.FINISHED, now)
        self._release_blocks(sequence)
        del self.sequences[sequence.request_id]

    def has_work(self) -> bool:
        """True if ``schedule`` would do anything: return a chunk, or preempt for want of a block."""
        return bool(self.running) or next(self._admissible(), None) is not None

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the next step's chunks; admits and preempts. Follow it by ``update``."""
        chunks: list[ScheduledChunk] = []
        preempted: list[str] = []
        for sequence in tuple(self.running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.is_prefilling:
                continue
            if self._has_room_for_next_token(sequence, preempted, now):
                chunks.append(self._chunk(sequence, 1))
        budget = self.max_num_batched_tokens - len(chunks)
        candidates = [(each, each.num_uncomputed_tokens) for each in self.running if each.is_prefilling]
        if not preempted:  # who just lost its blocks must not take back what it lost them for
            candidates += self._admissible()
        candidates.sort(key=lambda candidate: candidate[0].arrival)
        shares = share_prefill_budget(
            budget,
            [demand for _, demand in candidates],
            short=self.max_num_batched_tokens,
            chunk=self.prefill_chunk_tokens,
        )
        for (sequence, _), share in zip(candidates, shares, strict=True):
            if share == 0:
                continue
            if sequence.status is SequenceStatus.WAITING and not self._admit(sequence, now):
                continue
            chunks.append(self._chunk(sequence, share))
        return ScheduledBatch(tuple(chunks), tuple(preempted))

    def update(self, batch: ScheduledBatch) -> None:
        """The batch is computed: its tokens' KV is in place."""
        for chunk in batch.chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            self._register_full_blocks(chunk.sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every held block is in the tables of its owners and every count agrees."""
        self.allocator.check_integrity()
        owners = Counter(block for sequence in self.sequences.values() for block in sequence.block_table)
        assert all(self.allocator.ref_count(block) == count for block, count in owners.items()), (
            "owners differ"
        )
        assert len(owners) == self.allocator.num_held, f"{self.allocator.num_held} held, {len(owners)} owned"
        by_status = Counter(sequence.status for sequence in self.sequences.values())
        assert by_status[SequenceStatus.WAITING] == len(self.waiting), "waiting differs"
        assert by_status[SequenceStatus.RUNNING] == len(self.running), "running differs"
        assert by_status[SequenceStatus.WAITING_FOR_KV] == self.num_reserved, "reserved differs"
        assert self._free_places() >= 0, "more sequences than max_num_seqs"
        assert all(not sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        for sequence in self.sequences.values():
            room = len(sequence.block_table) * self.allocator.block_size
            assert sequence.num_computed_tokens <= room, f"{sequence.request_id} has more KV than room"
            assert sequence.num_computed_tokens <= sequence.num_tokens, f"{sequence.request_id} ran ahead"

    def _free_places(self) -> int:
        return self.max_num_seqs - len(self.running) - self.num_reserved

    def _max_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence can come to hold."""
        request = sequence.request
        longest = min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.max_model_len)
        return self.allocator.blocks_for(sequence.num_tokens if sequence.hold else longest)

    def _chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk:
        start = sequence.num_computed_tokens
        samples = start + num_tokens == sequence.num_tokens
        return ScheduledChunk(sequence, start, num_tokens, sequence.is_prefilling, samples)

    def _has_room_for_next_token(self, sequence: Sequence, preempted: list[str], now: float) -> bool:
        """Grow the block table if it is full; False if the sequence had to be preempted itself."""
        if sequence.num_computed_tokens < len(sequence.block_table) * self.allocator.block_size:
            return True
        while not self.allocator.can_allocate(1):
            victim = next(other for other in reversed(self.running) if other.is_preemptible)
            self._preempt(victim, now)
            preempted.append(victim.request_id)
            if victim is sequence:
                return False
        room = max(0, self._max_blocks(sequence) - len(sequence.block_table) - 1)
        sequence.block_table += self.allocator.allocate(1, after=sequence.block_table[-1], room=room)
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.running.remove(sequence)
        sequence.move_to(SequenceStatus.WAITING, now)
        self._release_blocks(sequence)
        sequence.num_preemptions += 1
        sequence.prefill_end = sequence.num_tokens
        insort(self.waiting, sequence, key=_by_arrival)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.block_table)
        sequence.block_table = BlockTable()
        sequence.num_computed_tokens = sequence.num_cached_tokens = sequence.num_registered_blocks = 0

    def _admissible(self) -> Iterator[tuple[Sequence, int]]:
        """Waiting sequences that could all be admitted together, in order of arrival, with their uncomputed tokens.

        The first that does not fit is passed only by those that leave it the blocks and the place it waits for.
        One block per running sequence is left free, or the newcomer would be preempted by the next decode steps.
        """
        spare = len(self.running)
        # looking for cached blocks costs: bounded by the places, of which the first that does not fit keeps one
        tries = self._free_places()
        is_passing = False
        room = 0  # blocks that those behind the first that does not fit may take
        needed_before = 0
        for sequence in self.waiting:
            if tries == 0:
                return
            if is_passing and self._max_blocks(sequence) >= room:
                continue
            tries -= 1
            cached = self._cached_blocks(sequence)
            needed = needed_before + self.allocator.blocks_for(sequence.num_tokens) - len(cached)
            if self.allocator.can_allocate(needed + spare, sharing=cached):
                needed_before = needed + len(cached)  # perhaps all of them are free now
                room -= self._max_blocks(sequence) + 1
                yield sequence, sequence.num_tokens - len(cached) * self.allocator.block_size
            elif not is_passing:
                is_passing = True
                room = self._room_behind(sequence)

    def _room_behind(self, waiting: Sequence) -> int:
        """Blocks that sequences behind ``waiting`` may take without delaying it.

        When everything older has ended it must find its blocks free, whatever the younger ones still hold by then,
        and one more for each of these to grow into.
        """
        total = self.allocator.num_blocks - self.allocator.blocks_for(waiting.num_tokens)
        younger = (
            other
            for other in self.sequences.values()
            if other.block_table and other.arrival > waiting.arrival
        )
        return total - sum(self._max_blocks(other) + 1 for other in younger)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's first tokens; at least one token is always left to compute, for its logits."""
        if not self.enable_prefix_caching:
            return []
        block_size = self.allocator.block_size
        return self.allocator.find(sequence.block_hashes((sequence.num_tokens - 1) // block_size, block_size))

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """False if an admission before it in this step evicted content that it counted on."""
        cached = self._cached_blocks(sequence)
        needed = self.allocator.blocks_for(sequence.num_tokens) - len(cached)
        if not self.allocator.can_allocate(needed, sharing=cached):
            return False
        self.allocator.share(cached)
        room = self._max_blocks(sequence) - len(cached) - needed
        last = cached[-1] if cached else None
        new = self.allocator.allocate(needed, after=last, room=max(0, room))
        sequence.block_table = BlockTable(cached + new)
        sequence.num_cached_tokens = sequence.num_computed_tokens = len(cached) * self.allocator.block_size
        sequence.num_registered_blocks = len(cached)
        sequence.prefill_end = sequence.num_tokens
        self.waiting.remove(sequence)
        sequence.move_to(SequenceStatus.RUNNING, now)
        insort(self.running, sequence, key=_by_arrival)
        return True

    def _register_full_blocks(self, sequence: Sequence) -> None:
        if not self.enable_prefix_caching or not sequence.has_exact_kv:
            return
        block_size = self.allocator.block_size
        num_full = sequence.num_computed_tokens // block_size
        if num_full == sequence.num_registered_blocks:
            return
        hashes = sequence.block_hashes(num_full, block_size)
        for index in range(sequence.num_registered_blocks, num_full):
            self.allocator.register(sequence.block_table[index], hashes[index])
        sequence.num_registered_blocks = num_full
