"""Who waits for whom, counted in steps and in a cost model of tokens: no model, no clock but the one made here."""

from collections.abc import Iterable
from itertools import accumulate, count

import pytest

from engine.block_allocator import BlockAllocator
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledBatch, Scheduler
from engine.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 16
BUDGET = 512
LONG, SHORT = 8000, 64


def chunk_cost(start: int, num_tokens: int) -> float:
    """Of computing tokens ``start .. start + num_tokens - 1``: one each, and as much again at position 8,000."""
    return num_tokens + num_tokens * (start + num_tokens / 2) / 8000


TWO_CHUNKS = 2 * chunk_cost(LONG - BUDGET, BUDGET)  # as dear as they come


class Worker:
    """A scheduler, and a clock that a step's chunks move on by their cost. Prompts differ from the first token on."""

    def __init__(self, num_blocks: int = 4096, **limits: int) -> None:
        settings = {"max_num_seqs": 32, "max_num_batched_tokens": BUDGET, "max_model_len": 8192}
        self.scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK_SIZE), **(settings | limits))  # type: ignore[arg-type]
        self.now = 0.0
        self.num_steps = 0
        self.arrived_at: dict[str, float] = {}
        self.prefilled_at: dict[str, float] = {}
        self.prefilled_step: dict[str, int] = {}
        self._arrivals = count(1)

    def add(self, name: str, num_tokens: int, max_tokens: int = 1) -> Sequence:
        arrival = next(self._arrivals)
        prompt = tuple(range(10_000 * arrival, 10_000 * arrival + num_tokens))
        sequence = Sequence(Request(name, prompt, SamplingParams(max_tokens=max_tokens)), arrival, self.now)
        self.scheduler.add(sequence)
        self.arrived_at[name] = self.now
        return sequence

    def step(self) -> ScheduledBatch:
        assert self.scheduler.has_work()
        ready = [s for s in self.scheduler.running if not s.is_prefilling]
        batch = self.scheduler.schedule(self.now)
        self.num_steps += 1
        self.now += sum(chunk_cost(chunk.start, chunk.num_tokens) for chunk in batch.chunks)
        self.scheduler.update(batch)
        scheduled = {chunk.sequence for chunk in batch.chunks}
        assert all(s in scheduled or s.request_id in batch.preempted for s in ready), "a decode was left out"
        for sequence in (chunk.sequence for chunk in batch.chunks if chunk.samples):
            self.prefilled_at.setdefault(sequence.request_id, self.now)
            self.prefilled_step.setdefault(sequence.request_id, self.num_steps)
            sequence.token_ids.append(1)
            if sequence.num_output_tokens == sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence, self.now)
        self.scheduler.check_integrity()
        return batch

    def run(self, max_steps: int = 3000) -> None:
        while self.scheduler.has_work():
            self.step()
            assert self.num_steps < max_steps, "the scheduler does not come to an end"
        assert self.scheduler.allocator.num_held == 0

    def wait_of(self, name: str) -> float:
        """From arrival to the end of the step that computed its last prompt token."""
        return self.prefilled_at[name] - self.arrived_at[name]


def first_come_first_served(prompts: Iterable[int]) -> list[float]:
    """When each of these prompts, all here at 0, is computed if they are computed one after the other."""
    return list(accumulate(chunk_cost(0, num_tokens) for num_tokens in prompts))


@pytest.mark.parametrize("steps_before", [0, 1, 7, 15, 16, 25, 31])
@pytest.mark.parametrize("num_blocks", [4096, 1100, 520], ids=["room", "two-fit", "one-fits"])
def test_a_short_prompt_waits_two_chunks_at_most_behind_two_long_ones(
    num_blocks: int, steps_before: int
) -> None:
    worker = Worker(num_blocks)
    worker.add("first", LONG)
    worker.add("second", LONG)
    for _ in range(steps_before):
        worker.step()
    worker.add("short", SHORT)
    if steps_before:  # it came while the last step was computed
        worker.arrived_at["short"] -= chunk_cost(LONG - BUDGET, BUDGET)
    worker.run()
    assert worker.wait_of("short") <= TWO_CHUNKS
    for name, alone in zip(("first", "second"), first_come_first_served([LONG, LONG]), strict=True):
        assert worker.prefilled_at[name] <= 1.1 * alone


def test_a_dozen_short_prompts_each_pass_at_once_and_the_long_ones_hardly_notice() -> None:
    worker = Worker()
    worker.add("first", LONG)
    worker.add("second", LONG)
    for number in range(12):
        worker.step()
        worker.step()
        worker.add(f"short-{number}", SHORT)
    worker.run()
    assert max(worker.wait_of(f"short-{number}") for number in range(12)) <= TWO_CHUNKS
    for name, alone in zip(("first", "second"), first_come_first_served([LONG, LONG]), strict=True):
        assert worker.prefilled_at[name] <= 1.1 * alone


def test_long_prompts_alone_are_computed_first_come_first_served() -> None:
    worker = Worker()
    names = ["a", "b", "c"]
    for name in names:
        worker.add(name, LONG)
    worker.run()
    finished = [
        worker.prefilled_at[name] for name in names
    ]  # at the end of a step, which the next one shares
    assert finished == pytest.approx(first_come_first_served([LONG] * 3), rel=0.02)


@pytest.mark.parametrize("num_tokens", [SHORT, 200, BUDGET])
def test_an_endless_stream_of_short_prompts_does_not_starve_long_ones(num_tokens: int) -> None:
    """More arrives than can be computed: the oldest long prompt has half of every step all the same."""
    worker = Worker(num_blocks=20_000, max_num_seqs=200)
    worker.add("early", SHORT)
    worker.add("first", LONG)
    worker.add("second", LONG)
    steps_of_one = -(-LONG // (BUDGET // 2))
    while "second" not in worker.prefilled_at:
        for _ in range(max(1, BUDGET // num_tokens)):
            worker.add(f"s{next(worker._arrivals)}", num_tokens)
        worker.step()
        assert worker.num_steps <= 2 * steps_of_one + 2, "the long prompts starve"
    assert worker.prefilled_step["first"] <= steps_of_one + 1


def test_short_prompts_pass_one_that_waits_for_blocks_but_never_delay_it() -> None:
    """The pool holds one long prompt: the second waits for the first one's end, and for nothing else."""
    worker = Worker(num_blocks=800)
    worker.add("first", LONG, max_tokens=100)
    second = worker.add("second", LONG)
    while "first" in worker.scheduler.sequences:
        worker.add(f"short-{worker.num_steps}", SHORT, max_tokens=40)
        worker.step()
        assert second.status is SequenceStatus.WAITING
    assert sum(name.startswith("short") for name in worker.prefilled_at) > 50
    assert len(worker.scheduler.running) > 20  # still hold blocks, and it fits beside them
    assert second in {chunk.sequence for chunk in worker.step().chunks}
    worker.run()


def test_nobody_passes_who_would_take_the_blocks_that_another_waits_for() -> None:
    worker = Worker(num_blocks=800)
    worker.add("first", LONG, max_tokens=20)
    worker.step()
    worker.add("second", LONG)
    worker.add("third", 4000, max_tokens=800)  # 300 blocks: would fit now, and then the second would not
    worker.add("fourth", 4000, max_tokens=4)
    while "first" in worker.scheduler.sequences:
        assert {chunk.sequence.request_id for chunk in worker.step().chunks} <= {"first", "fourth"}
    worker.run()
    assert worker.prefilled_step["fourth"] < worker.prefilled_step["second"] < worker.prefilled_step["third"]


def test_the_last_place_is_kept_for_one_that_waits_for_blocks() -> None:
    worker = Worker(num_blocks=800, max_num_seqs=3)
    worker.add("first", LONG, max_tokens=5)
    worker.step()
    second = worker.add("second", LONG)
    for number in range(4):
        worker.add(f"short-{number}", SHORT, max_tokens=2000)
    while "first" in worker.scheduler.sequences:
        worker.step()
        assert second not in worker.scheduler.running
        assert len(worker.scheduler.running) <= 2
    worker.step()
    assert second in worker.scheduler.running


def test_many_medium_prompts_and_a_long_one_take_their_turns() -> None:
    """Too long to pass anybody: each is computed within the steps that all older ones and itself need."""
    worker = Worker(max_num_seqs=8)
    sizes = {f"medium-{number}": 700 for number in range(20)}
    sizes = dict([*sizes.items()][:5]) | {"long": LONG} | sizes  # five medium ones before the long one
    for name, num_tokens in sizes.items():
        worker.add(name, num_tokens)
    worker.run()
    for name, tokens_so_far in zip(sizes, accumulate(sizes.values()), strict=True):
        assert worker.prefilled_step[name] <= -(-tokens_so_far // BUDGET) + 1
    assert list(worker.prefilled_step) == list(sizes), "not in order of arrival"


def test_a_long_prompt_behind_a_preempted_one_is_computed_and_so_is_the_preempted_one() -> None:
    """With an endless stream of short prompts beside them."""
    worker = Worker(num_blocks=300, enable_prefix_caching=0)
    worker.add("old", 1600, max_tokens=600)
    preempted = worker.add("preempted", 2400, max_tokens=600)
    for _ in range(9):
        worker.step()
    long = worker.add("long", 4400, max_tokens=4)
    step_of: dict[str, int] = {}
    names = ("old", "preempted", "long")
    while len(step_of) < len(names):
        if worker.num_steps % 3 == 0:
            worker.add(f"short-{worker.num_steps}", SHORT, max_tokens=20)
        worker.step()
        step_of |= {
            n: worker.num_steps for n in names if n not in worker.scheduler.sequences and n not in step_of
        }
        assert worker.num_steps < 1400, f"only {step_of} ended"
    assert preempted.num_preemptions > 0
    assert preempted.num_output_tokens == 600
    assert list(step_of) == list(names)
    assert long.num_preemptions == 0


@pytest.mark.parametrize("chunk", [1, 64, 128, BUDGET])
def test_no_prompt_gets_more_than_a_chunk_in_one_step_and_nothing_is_wasted(chunk: int) -> None:
    worker = Worker(prefill_chunk_tokens=chunk)
    sizes = {"a": 600, "b": 300, "c": 500, "d": 400, "e": 1000}
    for name, num_tokens in sizes.items():
        worker.add(name, num_tokens)
    while worker.scheduler.has_work():
        left = [s.num_uncomputed_tokens for s in worker.scheduler.sequences.values()]
        batch = worker.step()
        assert max(part.num_tokens for part in batch.chunks) <= chunk
        assert sum(part.num_tokens for part in batch.chunks) == min(BUDGET, sum(min(n, chunk) for n in left))
    assert set(worker.prefilled_at) == set(sizes)
