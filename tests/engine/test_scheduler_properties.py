"""Anything that can happen to a scheduler, in any order, with every count checked after every step.

The model it drives answers every sample with token 1; what is checked are decisions: budgets, order, blocks.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_allocator import BlockAllocator
from engine.request import Request, SamplingParams
from engine.scheduler import NoCapacity, ScheduledBatch, ScheduledChunk, Scheduler
from engine.sequence import Sequence, SequenceStatus

WAITING_FOR_KV, HANDING_OFF = SequenceStatus.WAITING_FOR_KV, SequenceStatus.HANDING_OFF

LENGTHS = st.sampled_from((0.0, 0.02, 0.1, 0.2, 0.3, 0.5, 1.0))
"""Of a prompt, as a share of the longest one allowed."""


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals of every kind, hand-offs, adoptions, aborts and steps over pools of every shape."""

    @initialize(
        block_size=st.sampled_from((1, 3, 4, 16)),
        num_blocks=st.integers(2, 40),
        max_num_seqs=st.integers(1, 7),
        more_budget=st.integers(0, 30),
        chunk_share=st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)),
        enable_prefix_caching=st.booleans(),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        more_budget: int,
        chunk_share: float,
        enable_prefix_caching: bool,
    ) -> None:
        budget = max_num_seqs + more_budget
        self.scheduler = Scheduler(
            BlockAllocator(num_blocks, block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max(2, min(100, num_blocks * block_size)),
            prefill_chunk_tokens=int(budget * chunk_share),
            enable_prefix_caching=enable_prefix_caching,
        )
        self.now = 0.0
        self.arrivals = 0
        self.unaborted: list[Sequence] = []

    # --- what comes in ------------------------------------------------------------------------------------------

    @rule(
        lengths=st.lists(LENGTHS, min_size=1, max_size=4),
        family=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        continued=st.integers(0, 3),
        hold=st.sampled_from((False, False, True)),
    )
    def add(self, lengths: list[float], family: int, max_tokens: int, continued: int, hold: bool) -> None:
        for length in lengths:
            self.scheduler.add(self.make(length, family, max_tokens, continued, hold))

    @rule(length=LENGTHS, family=st.integers(0, 2), max_tokens=st.integers(1, 40))
    def reserve(self, length: float, family: int, max_tokens: int) -> None:
        sequence = self.make(length, family, max_tokens)
        try:
            self.scheduler.reserve(sequence, self.now)
        except NoCapacity:
            assert not sequence.block_table
            self.unaborted.remove(sequence)
            return
        assert len(sequence.block_table) == self.most_blocks(sequence)

    @precondition(lambda self: self.in_status(WAITING_FOR_KV))
    @rule(data=st.data(), exact=st.booleans())
    def adopt(self, data: st.DataObject, exact: bool) -> None:
        """Its KV has come, and its first token with it."""
        sequence = data.draw(st.sampled_from(self.in_status(WAITING_FOR_KV)))
        sequence.has_exact_kv = exact
        num_computed = sequence.num_tokens
        sequence.token_ids.append(1)
        self.scheduler.start_reserved(sequence, num_computed, self.now)
        self.finish_if_done(sequence)

    @precondition(lambda self: self.in_status(WAITING_FOR_KV))
    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_status(WAITING_FOR_KV)))
        self.scheduler.start_reserved(sequence, sequence.num_cached_tokens, self.now)

    @precondition(lambda self: self.in_status(HANDING_OFF))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.in_status(HANDING_OFF))), self.now)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.scheduler.sequences.values())))
        self.scheduler.finish(sequence, self.now)
        self.unaborted.remove(sequence)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    # --- what has to hold ---------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):  # also called before the first rule
            self.scheduler.check_integrity()
            assert all(not sequence.block_table for sequence in self.scheduler.waiting)

    def teardown(self) -> None:
        """Whoever was not aborted comes to its end, and no block is left behind."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(s.num_tokens + s.request.sampling.max_tokens for s in self.scheduler.sequences.values())
        steps = 0
        while self.scheduler.sequences:
            for sequence in self.in_status(HANDING_OFF):
                self.scheduler.finish(sequence, self.now)
            for sequence in self.in_status(WAITING_FOR_KV):
                self.scheduler.start_reserved(sequence, sequence.num_cached_tokens, self.now)
            self.one_step()
            steps += 1
            assert steps <= 2 * work + 2, f"no end after {steps} steps of at least one token each"
        for sequence in self.unaborted:
            assert sequence.status is SequenceStatus.FINISHED
            assert sequence.hold or self.is_done(sequence), f"{sequence.request_id} did not come back"
        assert self.scheduler.allocator.num_held == 0
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_blocks

    def one_step(self) -> None:
        scheduler = self.scheduler
        self.now += 1.0
        has_work = scheduler.has_work()
        free = scheduler.allocator.num_free
        running = list(scheduler.running)
        decoding = [s for s in running if not s.is_prefilling]
        prefilling = [(s, s.num_uncomputed_tokens) for s in running if s.is_prefilling]
        batch = scheduler.schedule(self.now)
        assert bool(batch.chunks or batch.preempted) == has_work
        self.check_budget(batch)
        self.check_decodes(batch, decoding)
        self.check_oldest_prompt(batch, prefilling)
        self.check_preempted(batch, running)
        self.check_admitted(batch, running, free)
        scheduler.update(batch)
        for chunk in batch.chunks:
            self.computed(chunk)
        scheduler.check_integrity()

    def check_budget(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        assert sum(chunk.num_tokens for chunk in batch.chunks) <= scheduler.max_num_batched_tokens
        assert len({chunk.sequence for chunk in batch.chunks}) == len(batch.chunks)
        limit = scheduler.prefill_chunk_tokens or scheduler.max_num_batched_tokens
        assert all(0 < chunk.num_tokens <= limit for chunk in batch.chunks)

    def check_decodes(self, batch: ScheduledBatch, decoding: list[Sequence]) -> None:
        """A prefill never takes a decode's place."""
        tokens = {chunk.sequence: chunk.num_tokens for chunk in batch.chunks}
        for sequence in decoding:
            assert tokens.get(sequence) == 1 or sequence.request_id in batch.preempted

    def check_oldest_prompt(self, batch: ScheduledBatch, prefilling: list[tuple[Sequence, int]]) -> None:
        """The oldest prompt being computed gets half of what decodes leave, unless an older one came back or in."""
        kept = [(s, demand) for s, demand in prefilling if s.status is SequenceStatus.RUNNING]
        chunks = [chunk for chunk in batch.chunks if chunk.is_prefill]
        if not kept:
            return
        oldest, demand = min(kept, key=lambda pair: pair[0].arrival)
        if any(chunk.sequence.arrival < oldest.arrival for chunk in chunks):
            return
        budget = self.scheduler.max_num_batched_tokens - (len(batch.chunks) - len(chunks))
        limit = self.scheduler.prefill_chunk_tokens or budget
        got = next(chunk.num_tokens for chunk in chunks if chunk.sequence is oldest)
        assert got >= min(demand, limit, (budget + 1) // 2)

    def check_preempted(self, batch: ScheduledBatch, running: list[Sequence]) -> None:
        """Only who may be, the youngest first, and nobody comes in for them in the same step."""
        victims = [sequence for sequence in running if sequence.request_id in batch.preempted]
        assert len(victims) == len(batch.preempted)
        if not victims:
            return
        assert all(victim.is_preemptible for victim in victims)
        first = min(victim.arrival for victim in victims)
        kept = [s for s in self.scheduler.running if s.is_preemptible]
        assert all(sequence.arrival < first for sequence in kept)
        assert set(self.scheduler.running) <= set(running)

    def check_admitted(self, batch: ScheduledBatch, running: list[Sequence], free: int) -> None:
        """Who passes one that waits for blocks leaves it these, whatever the younger ones may yet take."""
        scheduler = self.scheduler
        admitted = [chunk.sequence for chunk in batch.chunks if chunk.sequence not in running]
        if not admitted or not scheduler.waiting or scheduler.enable_prefix_caching:
            return
        first = scheduler.waiting[0]
        needed = scheduler.allocator.blocks_for(first.num_tokens)
        if needed <= free or first.arrival > max(sequence.arrival for sequence in admitted):
            return
        younger = [s for s in scheduler.sequences.values() if s.block_table and s.arrival > first.arrival]
        most = sum(self.most_blocks(sequence) for sequence in younger)
        assert needed + most + len(younger) <= scheduler.allocator.num_blocks

    # --- the model of a worker ----------------------------------------------------------------------------------

    def make(
        self, length: float, family: int, max_tokens: int, continued: int = 0, hold: bool = False
    ) -> Sequence:
        """A prompt that begins as all of its family do."""
        self.arrivals += 1
        continued = min(continued, max_tokens - 1, self.scheduler.max_model_len - 2)
        num_prompt = 1 + int(length * (self.scheduler.max_model_len - 2 - continued))
        prompt = tuple(range(1000 * family, 1000 * family + num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(f"r{self.arrivals}", prompt, sampling, (1,) * continued)
        sequence = Sequence(request, self.arrivals, self.now, hold=hold)
        self.unaborted.append(sequence)
        return sequence

    def in_status(self, status: SequenceStatus) -> list[Sequence]:
        return [s for s in self.scheduler.sequences.values() if s.status is status]

    def most_blocks(self, sequence: Sequence) -> int:
        request = sequence.request
        if sequence.hold:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        else:
            num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        return self.scheduler.allocator.blocks_for(min(num_tokens, self.scheduler.max_model_len))

    def computed(self, chunk: ScheduledChunk) -> None:
        sequence = chunk.sequence
        assert chunk.samples == (sequence.num_computed_tokens == sequence.num_tokens)
        if not chunk.samples:
            return
        sequence.token_ids.append(1)
        if sequence.hold:
            self.scheduler.hand_off(sequence, self.now)
        else:
            self.finish_if_done(sequence)

    def finish_if_done(self, sequence: Sequence) -> None:
        if self.is_done(sequence):
            self.scheduler.finish(sequence, self.now)

    def is_done(self, sequence: Sequence) -> bool:
        at_end = sequence.num_tokens >= self.scheduler.max_model_len
        return sequence.num_output_tokens >= sequence.request.sampling.max_tokens or at_end


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
test_scheduler_machine = SchedulerMachine.TestCase
