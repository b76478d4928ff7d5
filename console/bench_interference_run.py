"""Measures interference on real clusters: one for each round of each arm, its streams first alone, then beside bursts.

The client is this process: it sends as any client would and watches itself. What is measured is read from the run's
own log, in which notes tell where the phases begin and end.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.control import AddNote, InjectBurst
from cluster.events import Event, NoteAdded
from cluster.interference_bench import (
    LOAD,
    Arm,
    ClientFigures,
    InterferenceResult,
    InterferenceSpec,
    Round,
    arm_profile,
    rounds_in_order,
    streams_of,
)
from cluster.interference_bench_fold import (
    ALONE,
    BURSTS,
    IncompleteRound,
    begin_note,
    end_note,
    fold_round,
)
from cluster.load import LoadGenerator
from cluster.measuring_process import BenchmarkFailed
from cluster.profile import Profile
from cluster.run_log import EVENTS_FILE, RunLogError, read_events
from cluster.samples import percentiles
from console.bench_cluster import BenchCluster, new_run, run_on_cluster
from console.signals import Signals
from engine.benchmark_result import Progress

_CAUSE: Final = "bench interference"
_TICK_S: Final = 0.01


def measure_interference(
    profile: Profile, spec: InterferenceSpec, report: Callable[[Progress], None]
) -> InterferenceResult:
    """Run the whole comparison. Nothing that it started is alive when this returns or raises.

    Raises LaunchError when a cluster does not come up or breaks, BenchmarkFailed when a round cannot be measured,
    KeyboardInterrupt after a signal.
    """
    return asyncio.run(_measure(profile, spec, report))


async def _measure(
    profile: Profile, spec: InterferenceSpec, report: Callable[[Progress], None]
) -> InterferenceResult:
    signals, result = Signals(), InterferenceResult()
    order = rounds_in_order(spec.arms, spec.repeats)
    for number, (repeat, arm) in enumerate(order):
        served = arm_profile(profile, arm)
        run = new_run(served)
        seen = _Client(f"round {repeat + 1} of {spec.repeats}: {arm.name}", len(order), report, number)
        seen.next(f"cluster {run.run}")

        async def drive(cluster: BenchCluster, served: Profile = served, seen: _Client = seen) -> None:
            await cluster.unless_gone(_drive(cluster, served, spec.seconds, seen))

        await run_on_cluster(run, signals, drive)
        result.rounds.append(_round(arm, repeat, run.run, Path(run.run_dir), spec, served, seen))
    return result


async def _drive(cluster: BenchCluster, profile: Profile, seconds: float, seen: "_Client") -> None:
    """Both phases on one cluster. The streams go on from the first warm-up to the end; the second phase ends when its
    last burst is answered, so that a slow one is measured whole."""
    model_id, url = profile.model.id, cluster.up.url
    streams = LoadGenerator(url, streams_of(profile), _to_nobody, model_id)
    bursts = LoadGenerator(url, profile, _to_nobody, model_id)
    burst = profile.burst
    try:
        seen.next("warm-up")
        await streams.start(LOAD, _CAUSE)
        await bursts.burst(
            InjectBurst(prompts=burst.prompts, prompt_tokens=burst.prompt_tokens, max_tokens=burst.max_tokens)
        )
        await bursts.drain(float("inf"))
        if failures := bursts.counts.failures or streams.counts.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            raise BenchmarkFailed(f"{seen.stage}: requests of the warm-up failed: {kinds}")
        seen.next(ALONE)
        await _phase(cluster, ALONE, lambda: asyncio.sleep(seconds), seen)
        seen.next(BURSTS)
        await _phase(cluster, BURSTS, lambda: _bursts(bursts, profile, seconds), seen)
        seen.burst_lag_s = bursts.lag_p99_s
    finally:
        await streams.close()
        await bursts.close()


async def _bursts(bursts: LoadGenerator, profile: Profile, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(bursts.repeat_bursts(profile.load[LOAD].burst_every_s, _CAUSE), seconds)
    await bursts.drain(float("inf"))


async def _phase(
    cluster: BenchCluster, phase: str, work: Callable[[], Awaitable[None]], seen: "_Client"
) -> None:
    await _note(cluster, begin_note(phase))
    watching = asyncio.create_task(seen.watch(phase))
    try:
        await work()
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    await _note(cluster, end_note(phase))


async def _note(cluster: BenchCluster, text: str) -> None:
    def is_it(event: Event) -> bool:
        return isinstance(event, NoteAdded) and event.text == text

    await cluster.command(AddNote(text=text), is_it)


@dataclass(slots=True)
class _Client:
    """What this process is doing, and how late it is. One a round."""

    stage: str
    total: int
    report: Callable[[Progress], None]
    done: int
    lags_s: dict[str, list[float]] = field(default_factory=dict)  # phase -> how late each tick came
    cpu: dict[str, float] = field(default_factory=dict)  # phase -> cores used
    burst_lag_s: float = 0.0

    def next(self, what: str) -> None:
        self.report(Progress(self.stage, what, self.done, self.total))

    async def watch(self, phase: str) -> None:
        """Until cancelled."""
        lags = self.lags_s[phase] = []
        began_at, began_cpu_s = time.monotonic(), time.process_time()
        due = began_at
        try:
            while True:
                due = max(due, time.monotonic()) + _TICK_S
                await asyncio.sleep(due - time.monotonic())
                lags.append(max(0.0, time.monotonic() - due))
        finally:
            self.cpu[phase] = (time.process_time() - began_cpu_s) / max(time.monotonic() - began_at, 1e-9)

    def figures(self, phase: str) -> ClientFigures:
        p99, largest = percentiles(self.lags_s[phase], 99, 100)
        return ClientFigures(
            lag_p99_ms=None if p99 is None else p99 * 1e3,
            lag_max_ms=None if largest is None else largest * 1e3,
            burst_lag_ms=self.burst_lag_s * 1e3 if phase == BURSTS else 0.0,
            cpu=self.cpu[phase],
        )


def _round(
    arm: Arm,
    repeat: int,
    run: str,
    run_dir: Path,
    spec: InterferenceSpec,
    profile: Profile,
    seen: _Client,
) -> Round:
    try:
        fold = fold_round(read_events(run_dir / EVENTS_FILE), spec.slos, profile.load[LOAD].streams)
        alone, bursts = fold.figures(ALONE), fold.figures(BURSTS)
    except (IncompleteRound, RunLogError, OSError) as error:
        raise BenchmarkFailed(f"{seen.stage}: {error}; see {run_dir}") from error
    return Round(arm.name, repeat, run, alone, bursts, seen.figures(ALONE), seen.figures(BURSTS))


def _to_nobody(_: Event) -> None:
    """What the client did is told by the requests in the log."""
