"""The times between tokens that a simulation comes to, by what the steps between them did. Pure.

A simulated step takes its mean; a real one does not. Steps that only decode are therefore counted as if they lay about
their mean as those of a measured run did.
"""

import math
from itertools import cycle
from typing import Final

from cluster.sim_result import GapCounts
from cluster.sim_spec import SimOverheads, StepExcess

_SHORTEST_S: Final = 1e-5


class StepGaps:
    """``every``: all gaps; ``steps`` and ``full_steps``: of steps that only decode, by whether a core was idle, without
    their spread: what a measured run is compared with."""

    def __init__(self, overheads: SimOverheads) -> None:
        self.every = GapCounts()
        self.steps = GapCounts()
        self.full_steps = GapCounts()
        self._spread = _Spread(overheads.step)
        self._full_spread = _Spread(overheads.full_step)

    def add(self, gap_s: float, count: int, has_prompts: bool, in_full: bool) -> float:
        """``count`` gaps of that length. The longest of them, spread and all."""
        if has_prompts:
            self.every.add(gap_s, count)
            return gap_s
        (self.full_steps if in_full else self.steps).add(gap_s, count)
        return (self._full_spread if in_full else self._spread).add(self.every, gap_s, count)

    def worst_of(self, gap_s: float, count: int, in_full: bool) -> float:
        """The longest of ``count`` gaps of decode steps."""
        return gap_s + (self._full_spread if in_full else self._spread).worst_of(count)


class _Spread:
    def __init__(self, excess: StepExcess) -> None:
        self._deviations = excess.deviations_s
        size = len(self._deviations)
        step = next((step for step in range(round(size * 0.62), size) if math.gcd(step, size) == 1), 1)
        self._next = cycle(self._deviations[index * step % size] for index in range(size))

    def add(self, counts: GapCounts, gap_s: float, count: int) -> float:
        size = len(self._deviations)
        if not size:
            counts.add(gap_s, count)
            return gap_s
        whole, rest = divmod(count, size)
        if whole:
            for deviation in self._deviations:
                counts.add(max(_SHORTEST_S, gap_s + deviation), whole)
        worst = gap_s + self._deviations[-1] if whole else 0.0
        for _ in range(rest):
            spread = max(_SHORTEST_S, gap_s + next(self._next))
            counts.add(spread)
            worst = max(worst, spread)
        return worst

    def worst_of(self, count: int) -> float:
        """Beyond the mean, of ``count`` draws: the quantile that one of them is expected to exceed."""
        size = len(self._deviations)
        return self._deviations[min(size - 1, size * count // (count + 1))] if size and count else 0.0
