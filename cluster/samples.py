"""Pools of measured values in bounded memory. Knows no event and no clock."""

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

EXACT_SAMPLES: Final = 200_000
"""Below this many values a pool holds every one; above it, a uniform sample of this many."""


def percentile(values: Sequence[float], q: float) -> float | None:
    """``numpy.percentile`` with linear interpolation; None of nothing. ``q`` is 0 to 100."""
    return percentiles(values, q)[0]


def percentiles(values: Sequence[float], *qs: float) -> tuple[float | None, ...]:
    """Several at once: one sort instead of many."""
    if not len(values):
        return (None,) * len(qs)
    return tuple(map(float, np.percentile(np.asarray(values, dtype=np.float64), qs)))


class Reservoir:
    """Says where in a list of at most ``capacity`` the next item goes, so that the list stays a uniform sample.

    Algorithm R with a fixed seed: the same items in the same order give the same sample.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.seen = 0
        self._random = random.Random(0)

    def take_room(self, count: int) -> int:
        """How many of ``count`` items can be appended at once: while there is room, all are kept."""
        room = min(max(self.capacity - self.seen, 0), count)
        self.seen += room
        return room

    def place(self) -> int | None:
        """Index for the next item (equal to the list's length: append); None: leave it out."""
        self.seen += 1
        if self.seen <= self.capacity:
            return self.seen - 1
        index = int(self._random.random() * self.seen)
        return index if index < self.capacity else None


class Samples:
    """One pool. Percentiles are exact up to ``capacity`` values, then those of a uniform sample of that size
    (p99 of 200,000 sampled values lies within about 0.02 points of rank); count, mean and max are always exact.
    """

    def __init__(self, capacity: int = EXACT_SAMPLES) -> None:
        self._values = array("d")
        self._reservoir = Reservoir(capacity)
        self.total = 0.0
        self.max: float | None = None

    @property
    def count(self) -> int:
        return self._reservoir.seen

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def add(self, value: float) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[float]) -> None:
        batch = array("d", values)
        if not batch:
            return
        room = self._reservoir.take_room(len(batch))
        self._values.extend(batch[:room])
        place = self._reservoir.place
        for value in batch[room:]:
            index = place()
            if index is not None:
                self._values[index] = value
        self.total += sum(batch)
        largest = max(batch)
        self.max = largest if self.max is None or largest > self.max else self.max

    def percentile(self, q: float) -> float | None:
        return percentile(self._values, q)

    def percentiles(self, *qs: float) -> tuple[float | None, ...]:
        return percentiles(self._values, *qs)
