"""How many prefill and how many decode workers: the same trace through every split of so many workers. Pure.

Where there are many splits, some far apart are tried first, and then those between the best one's neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.metrics import Slos
from cluster.sim_figures import SimFigures
from cluster.slo import format_slos

MAX_FIRST: Final = 9
"""Splits that are tried before the best one's neighbourhood."""

ALIKE: Final = 0.01
"""Goodputs closer than that are equal: then the one further from its limits is better."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """``splits`` by falling number of decode workers; ``colocated`` is the same number of workers without roles."""

    nodes: int
    slos: Slos
    splits: tuple[SimFigures, ...]
    colocated: SimFigures

    @property
    def best(self) -> SimFigures:
        return best_of(self.splits)


ENOUGH: Final = 0.99
"""So many of the requests are to be good."""

SIZES: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of workers that are tried where none is given."""

Simulate = Callable[[int, int], SimFigures]
"""(prefill workers, decode workers; 0 prefill workers = co-located) -> figures"""


def sweep(nodes: int, slos: Slos, simulate: Simulate) -> Sweep:
    """``nodes`` 2 or more."""
    found: dict[int, SimFigures] = {}
    step = max(1, (nodes - 2) // (MAX_FIRST - 1))
    tried = [*range(1, nodes, step)]
    while tried or step > 1:
        for prefill in tried:
            found[prefill] = simulate(prefill, nodes - prefill)
        best = best_of(list(found.values())).prefill
        step = step if tried else (step + 1) // 2
        near = (best - step, best + step)
        tried = [prefill for prefill in near if 1 <= prefill < nodes and prefill not in found]
    splits = tuple(found[prefill] for prefill in sorted(found))
    return Sweep(nodes, slos, splits, simulate(0, nodes))


def smallest_enough(slos: Slos, simulate: Simulate) -> Sweep:
    """The first of SIZES that is enough, together or apart; where none is, the one from which on more do not help."""
    before = -1.0
    for nodes in SIZES:
        found = sweep(nodes, slos, simulate)
        share = max(found.best.good_share, found.colocated.good_share)
        if share >= ENOUGH or 0 < share <= before + ALIKE / 2:
            break
        before = share
    return found


def best_of(splits: Sequence[SimFigures]) -> SimFigures:
    """Most goodput; among equals the one whose worst percentile is furthest below its limit."""
    most = max(split.goodput_per_s for split in splits)
    alike = [split for split in splits if split.goodput_per_s >= most * (1 - ALIKE)]
    return min(alike, key=lambda split: (split.stress, split.prefill))


def verdict(found: Sweep) -> str:
    """Which split, whether separating pays at all, and whether that is enough."""
    share = max(found.best.good_share, found.colocated.good_share)
    if share >= ENOUGH:
        return _better(found)
    return f"{_better(found)}; at best {share:.1%} of the requests are good, {ENOUGH:.0%} are wanted"


def _better(found: Sweep) -> str:
    best, mixed = found.best, found.colocated
    rates = f"{best.goodput_per_s:.3g} good requests/s against {mixed.goodput_per_s:.3g}"
    shares = f"{best.good_share:.0%} against {mixed.good_share:.0%}"
    if best.goodput_per_s > mixed.goodput_per_s * (1 + ALIKE):
        return f"disaggregate as {best.name}: {rates} with {mixed.name} workers ({shares} of the requests)"
    if mixed.goodput_per_s > best.goodput_per_s * (1 + ALIKE):
        rates = f"{mixed.goodput_per_s:.3g} good requests/s against {best.goodput_per_s:.3g}"
        shares = f"{mixed.good_share:.0%} against {best.good_share:.0%}"
        return f"do not disaggregate: {mixed.name} workers give {rates} with {best.name} ({shares})"
    rate = f"both ways give {best.goodput_per_s:.3g} good requests/s ({best.good_share:.0%})"
    if best.stress < mixed.stress * (1 - 0.1):
        nearer = f"{best.name} keeps further from its limits ({best.stress:.0%} of them against {mixed.stress:.0%})"
        return f"it hardly matters for these limits: {rate}; {nearer}"
    return f"do not disaggregate: {rate}, and {mixed.name} workers have no link to wait for and no split to get wrong"


def when_not(found: Sweep) -> str:
    """One sentence: where the answer would be to keep prefill and decode together."""
    best, mixed = found.best, found.colocated
    itl_ms, slos = mixed.itl_ms["p99"], found.slos
    limit_ms = slos.itl_ms
    reasons = []
    if limit_ms is not None and itl_ms is not None and itl_ms > limit_ms:
        reasons.append(
            f"gaps of {_ms(itl_ms)} (ITL p99 of {mixed.name}) were good enough where {format_slos(slos)} is asked"
        )
    ttft, mixed_ttft = best.ttft_ms["p90"], mixed.ttft_ms["p90"]
    if ttft is not None and mixed_ttft is not None and mixed_ttft < ttft:
        reasons.append(
            f"TTFT mattered more: its p90 is {_ms(mixed_ttft)} co-located, {_ms(ttft)} as {best.name}"
        )
    if best.link_utilisation > best.prefill_utilisation:
        reasons.append("the link were any slower: it is busier than the prefill workers")
    if not reasons:
        reasons.append("the load fell: nobody is stalled by prompts that do not come")
    return f"keep them together if {', or if '.join(reasons)}"


def _ms(value_ms: float) -> str:
    return f"{value_ms:.3g} ms" if value_ms < 1000 else f"{value_ms / 1000:.3g} s"
