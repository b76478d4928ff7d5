"""Corrects a simulation by a run: what its requests took beside what the same requests take when simulated. Pure.

A benchmark times an engine alone. In a cluster its core also serves a control loop, its neighbours share caches, and a
token passes two processes. A run's log says how much that is: a factor on prefills, and seconds of each step, each
handoff and the router. What is corrected is what every load has in common, so that another load or split is forecast.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cluster.events import Event, RequestArrived
from cluster.metrics import RunMetrics
from cluster.sim_cluster import simulate
from cluster.sim_spec import SimSpec
from cluster.trace import TraceRequest

MIN_REQUESTS: Final = 20
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
    handoff_ms: float
    router_ms: float

    def __str__(self) -> str:
        return (
            f"run {self.run} ({self.requests} requests): prefill times {self.prefill:.2f}, {self.step_ms:.2f} ms a "
            f"step, {self.handoff_ms:.1f} ms a handoff, {self.router_ms:.1f} ms in the router"
        )


def calibrated(spec: SimSpec, run: str, events: Iterable[Event]) -> tuple[SimSpec, Correction]:
    """``spec``: of the split and mode that the run had. Raises NothingToLearn."""
    metrics = RunMetrics(keep=None)
    arrivals = []
    for event in events:
        metrics.fold(event)
        if isinstance(event, RequestArrived) and event.label != "probe":
            arrivals.append(event)
    itl_ms = metrics.pools.itl_ms.percentile(50)
    if metrics.finished < MIN_REQUESTS or metrics.finished < len(arrivals) or itl_ms is None:
        raise NothingToLearn(
            f"run {run} answered {metrics.finished} of {len(arrivals)} requests; "
            f"allowed is a run that answered all of {MIN_REQUESTS} or more"
        )
    arrivals.sort(key=lambda event: event.at)
    requests = [
        TraceRequest(
            event.at - arrivals[0].at,
            event.prompt_tokens,
            metrics.timelines[event.request_id].output_tokens or event.max_tokens,
        )
        for event in arrivals
    ]
    parts = {name: total / metrics.finished for name, total in metrics.ttft_parts_ms.items()}
    router_s = parts["router"] / 2e3
    spec = dataclasses.replace(
        spec, overheads=dataclasses.replace(spec.overheads, router_s=router_s, answer_s=router_s)
    )
    factor = 1.0
    costs = spec.costs
    for _ in range(_ROUNDS):
        found, old = simulate(spec, requests), spec.overheads
        factor *= parts["prefill"] / max(found.ttft_parts_ms["prefill"], 1e-6)
        exposed_ms = parts["transfer_exposed"] + parts["admit_wait"] + parts["first_decode"]
        overheads = dataclasses.replace(
            old,
            step_s=max(0.0, old.step_s + (itl_ms - (found.itl_ms["p50"] or itl_ms)) / 1e3),
            handoff_s=max(0.0, old.handoff_s + (exposed_ms - found.ttft_parts_ms["transfer"]) / 1e3)
            if spec.prefill
            else old.handoff_s,
        )
        spec = dataclasses.replace(spec, costs=costs.with_slower_prefill(factor), overheads=overheads)
    over = spec.overheads
    return spec, Correction(
        run, len(requests), factor, over.step_s * 1e3, over.handoff_s * 1e3, parts["router"]
    )
