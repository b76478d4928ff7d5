"""One simulated worker: the engine's own scheduler, and a clock that jumps from one change to the next. Pure.

``Scheduler.schedule`` decides every step whose outcome is not known already. A batch that only decodes, or the chunks
of one long prompt alone, repeats itself until a sequence ends or something arrives: such steps are one run, whose
times are a formula. What arrives during a step waits for its end, as in ``EngineThread``; a run ends there early.
Where workers share cores, whoever drives them says how fast each one is (``set_speed``).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.sim_cost import StepCosts
from cluster.sim_gaps import StepGaps
from cluster.sim_pace import Pace
from cluster.sim_sequence import CountedSequence
from cluster.sim_spec import SimOverheads
from engine.scheduler import ScheduledBatch, ScheduledChunk, Scheduler
from engine.sequence import SequenceStatus

MAX_STEPS: Final = 1_000_000
"""Of one run."""


@dataclass(slots=True, eq=False)
class SimJob:
    """What a sequence is for, and when its tokens came (0.0 = no token yet)."""

    request_id: str
    attempt: int
    sequence: CountedSequence
    is_handoff: bool = False  # on a prefill worker: it ends with its first token
    started_at: float = -1.0  # first step; -1.0 = not yet
    last_token_at: float = 0.0
    worst_gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepsDone:
    """A run is over. ``first``: their first token is sampled; ``finished``: their last one is."""

    first: tuple[SimJob, ...]
    finished: tuple[SimJob, ...]


@dataclass(slots=True)
class _Run:
    pace: Pace
    batch: ScheduledBatch
    num_steps: int
    elapsed: Callable[[int], float]  # seconds of the first so many steps, at full speed
    decodes: bool = True
    has_prompts: bool = False
    in_full: bool = False  # it began while no core was idle

    def time_of(self, num_steps: int) -> float:
        return self.pace.time_of(self.elapsed(num_steps))

    def under_way(self, now: float) -> int:
        """How many steps are begun."""
        return bisect_left(range(1, self.num_steps), self.pace.done_at(now), key=self.elapsed) + 1


class SimWorker:
    """``gaps`` hears of the time between any two tokens of a sequence."""

    def __init__(
        self,
        worker_id: str,
        scheduler: Scheduler,
        costs: StepCosts,
        overheads: SimOverheads,
        gaps: StepGaps,
    ) -> None:
        self.worker_id = worker_id
        self.scheduler = scheduler
        self.jobs: dict[str, SimJob] = {}  # by attempt key
        self.busy_s = 0.0
        self.num_steps = 0
        self.preemptions = 0
        self._costs = costs
        self._step_s = overheads.step.mean_s
        self._full_step_s = overheads.full_step.mean_s
        self._gaps = gaps
        self._run: _Run | None = None
        self._posted: list[Callable[[float], None]] = []

    @property
    def is_stepping(self) -> bool:
        return self._run is not None

    def set_speed(self, now: float, share: float, in_full: bool) -> float:
        """``share`` of its cores, from now on; ``in_full``: no core is idle. When the run under way will end."""
        run = self._run
        assert run is not None, "no run to pace"
        if run.pace.began == now:
            run.in_full = in_full
        speed = share
        if in_full and run.decodes:
            step_s = run.elapsed(run.num_steps) / run.num_steps
            speed *= step_s / max(step_s + self._full_step_s - self._step_s, 1e-6)
        if speed != run.pace.speed:
            run.pace.change(now, speed)
        return run.time_of(run.num_steps)

    def cut(self, now: float) -> None:
        """Let a run of decode steps end with the one under way: what follows is of another kind."""
        run = self._run
        if run is not None and not run.has_prompts and run.pace.began < now:
            run.num_steps = run.under_way(now)

    def post(self, call: Callable[[float], None], now: float) -> float | None:
        """Have ``call(now)`` run between two steps: at once when idle. The time at which the step ends that it waits
        for; None where there is none."""
        run = self._run
        if run is None:
            call(now)
            return None
        self._posted.append(call)
        run.num_steps = run.under_way(now)
        return run.time_of(run.num_steps)

    def begin(self, now: float) -> float | None:
        """Start the next run. When it will end, unless something is posted; None: there is nothing to do."""
        scheduler = self.scheduler
        while scheduler.running or scheduler.waiting:
            batch = scheduler.schedule(now)
            self.preemptions += len(batch.preempted)
            if batch.chunks:
                self._run = self._plan(batch, now)
                return self._run.time_of(self._run.num_steps)
            if not batch.preempted:
                break
        return None

    def end(self, now: float) -> StepsDone:
        """The run's steps are computed; what was posted meanwhile runs now."""
        run = self._run
        assert run is not None, "no run to end"
        self._run = None
        self.busy_s += run.time_of(run.num_steps) - run.pace.began
        self.num_steps += run.num_steps
        done = self._apply(run)
        posted, self._posted = self._posted, []
        for call in posted:
            call(now)
        return done

    def adopt(self, job: SimJob, now: float) -> bool:
        """Its KV and first token came from another worker. True: that token was its last. As ``Engine.adopt``."""
        sequence = job.sequence
        num_computed = sequence.num_tokens
        sequence.grow(1)
        self.scheduler.start_reserved(sequence, num_computed, now)
        job.last_token_at = now
        return self._finish_if_done(job, now)

    def drop(self, key: str, now: float) -> None:
        """Forget an attempt, whatever it does, and free its blocks. Nothing happens when it is gone."""
        job = self.jobs.pop(key, None)
        if job is not None and job.sequence.status is not SequenceStatus.FINISHED:
            self.scheduler.finish(job.sequence, now)

    # --- planning ---------------------------------------------------------------------------------------------

    def _plan(self, batch: ScheduledBatch, now: float) -> _Run:
        costs, over_s, pace = self._costs, self._step_s, Pace(now)
        prompts = [(chunk.start, chunk.num_tokens) for chunk in batch.chunks if chunk.is_prefill]
        decodes = [chunk for chunk in batch.chunks if not chunk.is_prefill]
        num, keys = len(decodes), sum(chunk.start + 1 for chunk in decodes)
        if not prompts:
            steps = 1 if batch.preempted else self._decode_steps([self._job(chunk) for chunk in decodes])
            return _Run(pace, batch, steps, lambda count: costs.decode_s(num, keys, count) + count * over_s)
        start, tokens = prompts[0]
        if len(prompts) == 1 and not decodes and tokens == self.scheduler.max_num_batched_tokens:
            steps = min(MAX_STEPS, max(1, (batch.chunks[0].sequence.num_uncomputed_tokens - 1) // tokens))
            return _Run(
                pace,
                batch,
                steps,
                lambda count: costs.chunk_s(start, count * tokens),
                decodes=False,
                has_prompts=True,
            )
        step_s = costs.mixed_s(prompts, num, keys) + (over_s if decodes else 0.0)
        return _Run(pace, batch, 1, lambda count: count * step_s, decodes=bool(decodes), has_prompts=True)

    def _job(self, chunk: ScheduledChunk) -> SimJob:
        return self.jobs[chunk.sequence.request_id]

    def _decode_steps(self, jobs: list[SimJob]) -> int:
        """Steps until one of the sequences ends, as far as there are blocks for all of them to grow."""
        steps = min(MAX_STEPS, *(self._tokens_left(job.sequence) for job in jobs))
        growing = [job.sequence for job in jobs if not job.sequence.reserved]
        num_free = self.scheduler.allocator.num_free
        while steps > 1 and sum(self._blocks_missing(each, steps) for each in growing) > num_free:
            steps //= 2
        return steps

    def _tokens_left(self, sequence: CountedSequence) -> int:
        left = sequence.request.sampling.max_tokens - sequence.num_output_tokens
        return max(1, min(left, self.scheduler.max_model_len - sequence.num_tokens))

    def _blocks_missing(self, sequence: CountedSequence, steps: int) -> int:
        needed = self.scheduler.allocator.blocks_for(sequence.num_computed_tokens + steps)
        return max(0, needed - len(sequence.block_table))

    # --- ending -----------------------------------------------------------------------------------------------

    def _apply(self, run: _Run) -> StepsDone:
        steps = run.num_steps
        first_end, ended = run.time_of(1), run.time_of(steps)
        jobs = [self._job(chunk) for chunk in run.batch.chunks]
        self._compute(run, jobs)
        first: list[SimJob] = []
        finished: list[SimJob] = []
        repeated = 0  # gaps between two tokens of this run
        last_gap_s = ended - run.time_of(steps - 1) if steps > 1 else 0.0
        gaps, kind = self._gaps, (run.has_prompts, run.in_full)
        for job, chunk in zip(jobs, run.batch.chunks, strict=True):
            if job.started_at < 0:
                job.started_at = run.pace.began
            if not chunk.samples:
                continue
            if job.last_token_at:
                job.worst_gap_s = max(
                    job.worst_gap_s,
                    gaps.add(first_end - job.last_token_at, 1, *kind),
                    gaps.worst_of(last_gap_s, steps - 1, run.in_full) if steps > 1 else 0.0,
                )
                repeated += steps - 1
            else:
                first.append(job)
            job.last_token_at = ended
            if job.is_handoff:
                self.scheduler.hand_off(job.sequence, ended)
            elif self._finish_if_done(job, ended):
                finished.append(job)
        if repeated:
            gaps.add((ended - first_end) / (steps - 1), repeated, *kind)
        return StepsDone(tuple(first), tuple(finished))

    def _compute(self, run: _Run, jobs: list[SimJob]) -> None:
        """What the engine does with a batch, for all steps of the run at once."""
        steps, chunks = run.num_steps, run.batch.chunks
        for job, chunk in zip(jobs, chunks, strict=True):
            if not chunk.samples:
                continue
            table = job.sequence.block_table
            missing = self._blocks_missing(job.sequence, steps)
            if missing:
                table += self.scheduler.allocator.allocate(missing, after=table[-1])
            job.sequence.grow(steps)
        if steps > 1:
            chunks = tuple(
                ScheduledChunk(
                    each.sequence, each.start, steps * each.num_tokens, each.is_prefill, each.samples
                )
                for each in chunks
            )
        self.scheduler.update(ScheduledBatch(chunks, run.batch.preempted))

    def _finish_if_done(self, job: SimJob, now: float) -> bool:
        sequence = job.sequence
        is_done = (
            sequence.num_output_tokens >= sequence.request.sampling.max_tokens
            or sequence.num_tokens >= self.scheduler.max_model_len
        )
        if is_done:
            self.scheduler.finish(sequence, now)
            del self.jobs[sequence.request_id]
        return is_done
