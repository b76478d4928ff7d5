"""What a simulated run came to: latencies, goodput, utilisation and what bounds it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.samples import percentiles
from cluster.sim_gaps import StepGaps
from cluster.sim_result import SimRun
from cluster.sim_spec import SimSpec
from cluster.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds in which all workers of a role stepped and links moved bytes, and counts over all workers."""

    prefill_s: float
    decode_s: float
    link_s: float
    steps: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class SimFigures:
    """One ratio. ``prefill`` 0: co-located workers. Times in ms; None where nothing was measured."""

    prefill: int
    decode: int
    requests: int
    finished: int
    refused: dict[str, int]
    duration_s: float
    ttft_ms: dict[str, float | None]  # p50 p90 p99
    itl_ms: dict[str, float | None]  # p50 p90 p99
    ttft_parts_ms: dict[str, float]  # means
    good: int
    goodput_per_s: float
    output_tokens_per_s: float
    prefill_utilisation: float  # of co-located workers: of all of them
    decode_utilisation: float
    link_utilisation: float
    preemptions: int
    steps: int
    bottleneck: str
    stress: float = 0.0  # how near the worst percentile is to its limit, 1 = at it

    @property
    def is_colocated(self) -> bool:
        return self.prefill == 0

    @property
    def name(self) -> str:
        return f"{self.decode} co-located" if self.is_colocated else f"{self.prefill}:{self.decode}"

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0


def figures_of(
    run: SimRun, gaps: StepGaps, spec: SimSpec, requests: Sequence[TraceRequest], work: Work
) -> SimFigures:
    """``run`` is over."""
    first, last = (requests[0].at_s, requests[-1].at_s) if requests else (0.0, 0.0)
    duration_s = max(run.ended_at, last) - first
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    utilisation = {"decode": work.decode_s * per_s / spec.decode}
    if spec.prefill:
        utilisation["prefill"] = work.prefill_s * per_s / spec.prefill
        utilisation["link"] = work.link_s * per_s / spec.prefill
    qs = (50, 90, 99)
    ttft_ms = _in_ms(qs, percentiles(run.ttft_s, *qs))
    itl_ms = _in_ms(qs, [gaps.every.percentile(q) for q in qs])
    nearness = [
        value / limit
        for value, limit in (
            (ttft_ms["p99"], run.slos.ttft_ms),
            (itl_ms["p99"], run.slos.itl_ms or run.slos.tpot_ms),
        )
        if value is not None and limit is not None
    ]
    parts, to_mean_ms = run.parts, 1e3 / max(1, run.finished)
    return SimFigures(
        prefill=spec.prefill,
        decode=spec.decode,
        requests=len(requests),
        finished=run.finished,
        refused={str(status): number for status, number in sorted(run.refused.items())},
        duration_s=duration_s,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        ttft_parts_ms={
            "router_queue": parts.router_queue_s * to_mean_ms,
            "prefill_queue": parts.prefill_queue_s * to_mean_ms,
            "prefill": parts.prefill_s * to_mean_ms,
            "transfer": parts.transfer_s * to_mean_ms,
        },
        good=run.good,
        goodput_per_s=run.good * per_s,
        output_tokens_per_s=run.output_tokens * per_s,
        prefill_utilisation=utilisation.get("prefill", 0.0),
        decode_utilisation=utilisation["decode"],
        link_utilisation=utilisation.get("link", 0.0),
        preemptions=work.preemptions,
        steps=work.steps,
        bottleneck=bottleneck(run, spec.prefill, spec.decode, utilisation),
        stress=max(nearness, default=0.0),
    )


def _in_ms(qs: Sequence[int], seconds: Sequence[float | None]) -> dict[str, float | None]:
    return {f"p{q}": None if value is None else value * 1e3 for q, value in zip(qs, seconds, strict=True)}


def bottleneck(run: SimRun, prefill: int, decode: int, utilisation: dict[str, float]) -> str:
    """What keeps requests from being good: by what they wait for where limits are missed, else by who is busiest."""
    names = {
        "prefill": f"the {_workers(prefill, 'prefill')}",
        "decode": f"the {_workers(decode, 'decode')}" if prefill else f"the {_workers(decode, 'co-located')}",
        "link": "the link",
    }
    parts = run.parts
    num_refused = run.refused.total()
    missed = run.missed_ttft + run.missed_itl + num_refused
    if missed == 0:
        busiest = max(utilisation, key=lambda name: utilisation[name])
        return (
            f"none, every limit is kept; busiest: {names[busiest]} ({utilisation[busiest]:.0%} of the time)"
        )
    if run.missed_itl > run.missed_ttft + num_refused:
        why = "decode steps are longer than the limit" if prefill else "prompts stall the streams beside them"
        return f"{names['decode']}: {why}"
    waits = {
        "decode": parts.router_queue_s,
        "prefill": parts.prefill_queue_s + parts.prefill_s,
        "link": parts.transfer_s,
    }
    if num_refused and num_refused >= run.missed_ttft:
        waits = {"decode": 1.0}
    worst = max(waits, key=lambda name: waits[name])
    if not prefill:
        worst = "decode"
    whys = {
        "decode": "requests wait for room for their KV" if prefill else "prompts wait for their turn",
        "prefill": "prompts wait for their turn"
        if parts.prefill_queue_s >= parts.prefill_s
        else "prompts take as long as the limit",
        "link": "KV waits for the link",
    }
    return f"{names[worst]}: {whys[worst]}"


def _workers(count: int, role: str) -> str:
    return f"{count} {role} worker{'' if count == 1 else 's'}"
