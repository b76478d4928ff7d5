"""Corrects a simulation by a run: what its requests took beside what the same requests take when simulated. Pure.

A benchmark times an engine alone. In a cluster its core also serves a control loop, its neighbours share caches and
cores, and a token passes two processes. A run's log says how much that is: a factor on prefills, what decode steps
take beyond their cost while a core is idle and while none is, and seconds of each handoff and of the router. It holds
for the run's mode: a decode worker beside KV that arrives is disturbed otherwise than one that computes prompts itself.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.events import Event, RequestArrived
from cluster.metrics import RunMetrics
from cluster.samples import percentiles
from cluster.sim_cluster import simulate_gaps
from cluster.sim_cost import StepCosts
from cluster.sim_machine import Cores
from cluster.sim_observed import ObservedSteps, observed_steps
from cluster.sim_result import GapCounts
from cluster.sim_spec import SimOverheads, SimSpec, StepExcess
from cluster.trace import TraceRequest

MIN_REQUESTS: Final = 20

_MIN_GAPS: Final = 40
"""Of a kind of decode step: fewer of them say nothing of that kind."""

_QUANTILES: Final = tuple((index + 0.5) * 2.5 for index in range(40))
_ROUNDS: Final = 4
"""A correction changes what queues, so the next one is made from the corrected simulation."""


class NothingToLearn(ValueError):
    """The run cannot correct a forecast; the message says why."""


@dataclass(frozen=True, slots=True)
class Correction:
    """``prefill`` is a factor; the others are what ``SimOverheads`` has, in ms."""

    run: str
    requests: int
    prefill: float
    step_ms: float
    full_step_ms: float
    handoff_ms: float
    router_ms: float

    def __str__(self) -> str:
        return (
            f"run {self.run} ({self.requests} requests): prefill times {self.prefill:.2f}, {self.step_ms:+.2f} ms a "
            f"step, {self.full_step_ms:+.2f} where no core is idle, {self.handoff_ms:.1f} ms a handoff, "
            f"{self.router_ms:.1f} ms in the router"
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """What a simulation is corrected with, of any split of the run's mode."""

    costs: StepCosts
    overheads: SimOverheads
    correction: Correction

    def applied(self, spec: SimSpec) -> SimSpec:
        return dataclasses.replace(spec, costs=self.costs, overheads=self.overheads)


def calibrated(spec: SimSpec, run: str, events: Iterable[Event]) -> Learned:
    """``spec``: of the split and mode that the run had, and of its machine. Raises NothingToLearn."""
    assert spec.machine is not None, "a run has a machine"
    events = list(events)
    metrics = RunMetrics(keep=None)
    for event in events:
        metrics.fold(event)
    requests = _requests(run, events, metrics)
    try:
        cores = Cores(spec.machine, *spec.worker_ids)
    except ValueError as error:
        raise NothingToLearn(f"run {run} does not fit this machine: {error}") from error
    observed = observed_steps(events, cores)
    parts = {name: total / metrics.finished for name, total in metrics.ttft_parts_ms.items()}
    exposed_ms = parts["transfer_exposed"] + parts["admit_wait"] + parts["first_decode"]
    router_s = parts["router"] / 2e3
    over = dataclasses.replace(spec.overheads, router_s=router_s, answer_s=router_s)
    factor, costs = 1.0, spec.costs
    for _ in range(_ROUNDS):
        spec = dataclasses.replace(spec, costs=costs.with_slower_prefill(factor), overheads=over)
        found, gaps = simulate_gaps(spec, requests)
        factor *= parts["prefill"] / max(found.ttft_parts_ms["prefill"], 1e-6)
        over = _steps(over, observed, gaps.steps, gaps.full_steps, -costs.base_s / 2)
        if spec.prefill:
            more_ms = exposed_ms - found.ttft_parts_ms["transfer"]
            over = dataclasses.replace(over, handoff_s=max(0.0, over.handoff_s + more_ms / 1e3))
    correction = Correction(
        run,
        len(requests),
        factor,
        over.step.mean_s * 1e3,
        over.full_step.mean_s * 1e3,
        over.handoff_s * 1e3,
        parts["router"],
    )
    return Learned(costs.with_slower_prefill(factor), over, correction)


def _requests(run: str, events: Sequence[Event], metrics: RunMetrics) -> list[TraceRequest]:
    """What the run was asked, as a trace. Raises NothingToLearn."""
    arrivals = sorted(
        (event for event in events if isinstance(event, RequestArrived) and event.label != "probe"),
        key=lambda event: event.at,
    )
    if (
        metrics.finished < MIN_REQUESTS
        or metrics.finished < len(arrivals)
        or metrics.pools.itl_ms.percentile(50) is None
    ):
        raise NothingToLearn(
            f"run {run} answered {metrics.finished} of {len(arrivals)} requests; "
            f"allowed is a run that answered all of {MIN_REQUESTS} or more"
        )
    return [
        TraceRequest(
            event.at - arrivals[0].at,
            event.prompt_tokens,
            metrics.timelines[event.request_id].output_tokens or event.max_tokens,
        )
        for event in arrivals
    ]


def _steps(
    over: SimOverheads, observed: ObservedSteps, steps: GapCounts, full_steps: GapCounts, least_s: float
) -> SimOverheads:
    """With what decode steps were observed to take beyond what they were simulated to. A kind that was hardly
    observed: nothing while a core is idle; as that while none is."""
    free = _excess(observed.free, steps, over.step, least_s) or over.step
    full = _excess(observed.full, full_steps, over.full_step, least_s) or free
    return dataclasses.replace(over, step=free, full_step=full)


def _excess(
    observed_s: Sequence[float], simulated: GapCounts, old: StepExcess, least_s: float
) -> StepExcess | None:
    if len(observed_s) < _MIN_GAPS or len(simulated) < _MIN_GAPS:
        return None
    over = [
        (seconds or 0.0) - (simulated.percentile(q) or 0.0)
        for q, seconds in zip(_QUANTILES, percentiles(observed_s, *_QUANTILES), strict=True)
    ]
    mean_s = sum(over) / len(over)
    return StepExcess(max(least_s, old.mean_s + mean_s), tuple(sorted(each - mean_s for each in over)))
