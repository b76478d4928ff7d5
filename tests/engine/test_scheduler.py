"""Scheduling decisions: events in, chunks out. No model and no tensors."""

import random

import pytest

from engine.block_allocator import BlockAllocator, contiguous_runs
from engine.request import Request, SamplingParams
from engine.scheduler import NoCapacity, ScheduledBatch, Scheduler
from engine.sequence import InvalidTransition, Sequence, SequenceStatus

BLOCK_SIZE = 4


class Harness:
    """A scheduler with a model that answers every sample with token 1."""

    def __init__(self, num_blocks: int = 64, **limits: int | bool) -> None:
        settings: dict[str, int | bool] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 200,
        }
        self.scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK_SIZE), **(settings | limits))  # type: ignore[arg-type]
        self.now = 0.0
        self.arrivals = 0

    def sequence(
        self, name: str, num_tokens: int, max_tokens: int = 8, hold: bool = False, first: int | None = None
    ) -> Sequence:
        """A sequence whose prompt is unlike any other's, unless ``first`` says which token it starts with."""
        self.arrivals += 1
        first = 1000 * self.arrivals if first is None else first
        prompt = tuple(range(first, first + num_tokens))
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens))
        return Sequence(request, self.arrivals, self.now, hold=hold)

    def add(
        self, name: str, num_tokens: int, max_tokens: int = 8, hold: bool = False, first: int | None = None
    ) -> Sequence:
        sequence = self.sequence(name, num_tokens, max_tokens, hold, first)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[dict[str, int], ScheduledBatch]:
        """One step; returns the tokens that each sequence got, and the batch."""
        self.now += 1.0
        expects_work = self.scheduler.has_work()
        batch = self.scheduler.schedule(self.now)
        assert bool(batch.chunks or batch.preempted) == expects_work
        assert sum(chunk.num_tokens for chunk in batch.chunks) <= self.scheduler.max_num_batched_tokens
        self.scheduler.update(batch)
        for chunk in batch.chunks:
            sequence = chunk.sequence
            assert chunk.samples == (sequence.num_computed_tokens == sequence.num_tokens)
            if not chunk.samples:
                continue
            sequence.token_ids.append(1)
            if sequence.hold:
                self.scheduler.hand_off(sequence, self.now)
            elif sequence.num_output_tokens == sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence, self.now)
        self.scheduler.check_integrity()
        return {chunk.sequence.request_id: chunk.num_tokens for chunk in batch.chunks}, batch

    def run(self, max_steps: int = 500) -> list[dict[str, int]]:
        steps = []
        while self.scheduler.has_work():
            steps.append(self.step()[0])
            assert len(steps) < max_steps, "the scheduler does not come to an end"
        return steps


def test_several_prompts_run_in_one_step_and_then_decode() -> None:
    harness = Harness()
    harness.add("a", 5, max_tokens=3)
    harness.add("b", 7, max_tokens=2)
    assert harness.run() == [{"a": 5, "b": 7}, {"a": 1, "b": 1}, {"a": 1}]
    assert harness.scheduler.allocator.num_held == 0


def test_a_long_prompt_is_cut_into_chunks_and_decodes_come_first() -> None:
    harness = Harness()
    harness.add("a", 4, max_tokens=4)
    assert harness.step()[0] == {"a": 4}
    harness.add("b", 40, max_tokens=1)
    assert harness.run() == [{"a": 1, "b": 15}, {"a": 1, "b": 15}, {"a": 1, "b": 10}]


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    harness = Harness()
    harness.add("long", 100, max_tokens=1)
    harness.step()
    harness.add("short", 6, max_tokens=1)
    assert harness.step()[0] == {"long": 10, "short": 6}


def test_max_num_seqs_bounds_running_and_reserved_together() -> None:
    harness = Harness(max_num_seqs=2)
    harness.scheduler.reserve(harness.sequence("r", 4), harness.now)
    harness.add("a", 4)
    harness.add("b", 4)
    assert harness.step()[0] == {"a": 4}
    with pytest.raises(NoCapacity, match="2 of 2"):
        harness.scheduler.reserve(harness.sequence("s", 4), harness.now)


def test_a_reservation_takes_all_it_may_need_or_nothing() -> None:
    harness = Harness(num_blocks=8)
    sequence = harness.sequence("r", 10, max_tokens=9)
    harness.scheduler.reserve(sequence, harness.now)
    assert len(sequence.block_table) == 5  # 19 tokens
    with pytest.raises(NoCapacity, match="5 blocks are needed, 3 are free"):
        harness.scheduler.reserve(harness.sequence("s", 10, max_tokens=9), harness.now)
    assert list(harness.scheduler.sequences) == ["r"]
    harness.scheduler.check_integrity()


def test_when_blocks_run_out_the_youngest_gives_way_and_comes_back() -> None:
    harness = Harness(num_blocks=6, enable_prefix_caching=False)
    old = harness.add("old", 8, max_tokens=12)
    young = harness.add("young", 8, max_tokens=8)
    steps = harness.run()
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0
    assert old.num_output_tokens == 12
    assert young.num_output_tokens == 8
    assert sum(step.get("young", 0) for step in steps) > 16  # something was computed twice


def test_a_preempted_sequence_does_not_return_in_the_same_step() -> None:
    harness = Harness(num_blocks=6)
    harness.add("old", 8, max_tokens=12)
    harness.add("young", 8, max_tokens=8)
    for _ in range(40):
        ran, batch = harness.step()
        if batch.preempted:
            assert batch.preempted == ("young",)
            assert "young" not in ran
            return
    pytest.fail("nothing was preempted")


def test_held_and_reserved_sequences_are_never_preempted() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=8, enable_prefix_caching=False)
    reserved = harness.sequence("reserved", 8, max_tokens=8)
    harness.scheduler.reserve(reserved, harness.now)
    reserved.token_ids.append(1)
    harness.scheduler.start_reserved(reserved, 8, harness.now)
    harness.add("grows", 8, max_tokens=20)
    held = harness.add("held", 8, hold=True)
    harness.run()
    assert reserved.num_preemptions == held.num_preemptions == 0
    assert reserved.status is SequenceStatus.FINISHED
    assert held.status is SequenceStatus.HANDING_OFF


def test_work_that_waits_for_pinned_blocks_is_no_work() -> None:
    harness = Harness(num_blocks=4)
    held = harness.add("held", 12, hold=True)
    harness.add("next", 12)
    assert harness.run() == [{"held": 12}]
    assert not harness.scheduler.has_work()
    harness.scheduler.finish(held, harness.now)
    assert harness.scheduler.has_work()


def test_nobody_takes_the_blocks_that_another_waits_for() -> None:
    harness = Harness(num_blocks=8)
    running = harness.add("running", 20, max_tokens=4)
    harness.step()
    harness.add("big", 20, max_tokens=1)
    harness.add("small", 4, max_tokens=8)  # two blocks are free now, but may be three in time: 3 + 5 + 1 > 8
    while running.status is not SequenceStatus.FINISHED:
        assert set(harness.step()[0]) == {"running"}
    assert set(harness.step()[0]) == {"big", "small"}


def test_who_leaves_the_blocks_that_another_waits_for_passes_it() -> None:
    harness = Harness(num_blocks=8)
    harness.add("running", 20, max_tokens=4)
    harness.step()
    harness.add("big", 20, max_tokens=1)
    harness.add("small", 4, max_tokens=4)
    assert set(harness.step()[0]) == {"running", "small"}
    while "running" in harness.scheduler.sequences:
        assert "big" not in harness.step()[0]
    assert "big" in harness.step()[0]


def test_those_that_pass_in_one_step_leave_the_blocks_together() -> None:
    harness = Harness(num_blocks=16)
    harness.add("running", 40, max_tokens=4)
    for _ in range(3):
        harness.step()
    harness.add("big", 24, max_tokens=1)  # 6 blocks, and one for the running one to grow into: 7 of 5
    for name in ("a", "b"):  # 6 blocks each in time: beside the big one there is room for one of them
        harness.add(name, 4, max_tokens=20)
    assert set(harness.step()[0]) == {"running", "a"}


def test_a_newcomer_leaves_every_running_sequence_a_block_to_grow_into() -> None:
    harness = Harness(num_blocks=4)
    running = harness.add("running", 7, max_tokens=5)  # its second block is full after the next step
    harness.step()
    harness.add("new", 8, max_tokens=1)
    while running.status is not SequenceStatus.FINISHED:
        assert set(harness.step()[0]) == {"running"}
    assert harness.step()[0] == {"new": 8}


def test_a_known_prefix_is_not_computed_again() -> None:
    harness = Harness()
    first = harness.add("first", 14, max_tokens=2, first=0)
    harness.run()
    again = harness.add("again", 14, max_tokens=2, first=0)
    steps = harness.run()
    assert first.num_cached_tokens == 0
    assert steps[0] == {
        "again": 2
    }  # 3 full blocks known; the rest, and the last token in any case, is computed
    assert again.status is SequenceStatus.FINISHED


def test_a_prompt_that_is_known_whole_still_computes_its_last_block() -> None:
    harness = Harness()
    harness.add("first", 16, max_tokens=1, first=0)
    harness.run()
    harness.add("again", 16, max_tokens=1, first=0)
    assert harness.run() == [{"again": 4}]


def test_prefix_reuse_can_be_off() -> None:
    harness = Harness(enable_prefix_caching=False)
    for name in ("first", "again"):
        harness.add(name, 14, max_tokens=1, first=0)
        assert harness.run() == [{name: 14}]


def test_a_reservation_shares_only_full_blocks_that_are_computed() -> None:
    harness = Harness()
    running = harness.add("running", 14, first=0)
    harness.step()
    reserved = harness.sequence("reserved", 14, first=0)
    harness.scheduler.reserve(reserved, harness.now)
    assert reserved.block_table[:3] == running.block_table[:3]
    assert not set(reserved.block_table[3:]) & set(running.block_table)


def test_sequences_that_grow_side_by_side_stay_in_one_run() -> None:
    harness = Harness(num_blocks=64)
    sequences = [harness.add(name, 6, max_tokens=30) for name in "ab"]
    for _ in range(29):
        harness.step()
    assert [len(contiguous_runs(sequence.block_table)) for sequence in sequences] == [1, 1]


@pytest.mark.parametrize("status", list(SequenceStatus))
def test_finish_frees_from_every_status(status: SequenceStatus) -> None:
    harness = Harness(max_num_seqs=1)
    if status is SequenceStatus.WAITING_FOR_KV:
        sequence = harness.sequence("a", 8)
        harness.scheduler.reserve(sequence, harness.now)
    else:
        sequence = harness.add("a", 8, hold=status is SequenceStatus.HANDING_OFF)
    if status in (SequenceStatus.RUNNING, SequenceStatus.HANDING_OFF):
        harness.step()
    if status is SequenceStatus.FINISHED:
        harness.scheduler.finish(sequence, harness.now)
        with pytest.raises(InvalidTransition, match="request a: finished -> running"):
            sequence.move_to(SequenceStatus.RUNNING, harness.now)
        return
    assert sequence.status is status
    harness.scheduler.finish(sequence, harness.now)
    harness.scheduler.check_integrity()
    assert harness.scheduler.allocator.num_held == 0
    assert not harness.scheduler.has_work()


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_whatever_comes_in_whatever_order(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=20, max_num_seqs=5, max_model_len=80)
    live: list[Sequence] = []
    total: list[Sequence] = []
    for turn in range(150):
        event = rng.random()
        if event < 0.3:
            live.append(
                harness.add(f"r{turn}", rng.randint(1, 40), rng.randint(1, 30), first=rng.choice((0, 500)))
            )
        elif event < 0.4:
            sequence = harness.sequence(f"r{turn}", rng.randint(1, 20), rng.randint(1, 10))
            try:
                harness.scheduler.reserve(sequence, harness.now)
            except NoCapacity:
                continue
            harness.scheduler.start_reserved(sequence, 0, harness.now)
            live.append(sequence)
        elif event < 0.5 and live:
            sequence = live.pop(rng.randrange(len(live)))
            if sequence.status is not SequenceStatus.FINISHED:
                harness.scheduler.finish(sequence, harness.now)
        elif event < 0.55:
            live.append(harness.add(f"r{turn}", rng.randint(1, 30), hold=True))
        elif harness.scheduler.has_work():
            harness.step()
        for sequence in [s for s in live if s.status is SequenceStatus.HANDING_OFF]:
            harness.scheduler.finish(sequence, harness.now)
        total += [s for s in live if s not in total]
        harness.scheduler.check_integrity()
    while harness.scheduler.has_work():
        harness.step()
        for sequence in [s for s in live if s.status is SequenceStatus.HANDING_OFF]:
            harness.scheduler.finish(sequence, harness.now)
    assert len(total) > 20
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in total)
    assert harness.scheduler.allocator.num_held == 0
