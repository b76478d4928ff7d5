"""A time that depends on a size, learnt from measurements alone."""

import statistics
from collections import deque
from typing import Final

RECENT: Final = 5
"""So many of the last measurements count: their median forgets one that was disturbed, and follows a lasting change."""

ENOUGH: Final = 3
"""So many measurements of one size make a worker's own; fewer are noise beside what all workers measured."""


class _Recent:
    """The last measurements within one doubling of the size, and their medians."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=RECENT)
        self._times_s: deque[float] = deque(maxlen=RECENT)
        self.size = self.time_s = 0.0

    def add(self, size: int, time_s: float) -> None:
        self._sizes.append(size)
        self._times_s.append(time_s)
        self.size, self.time_s = statistics.median(self._sizes), statistics.median(self._times_s)

    @property
    def is_enough(self) -> bool:
        return len(self._times_s) >= ENOUGH


class MeasuredCurve:
    """One median per doubling of the size. ``base`` answers where too little was measured here."""

    def __init__(self, base: "MeasuredCurve | None" = None) -> None:
        self._base = base
        self._recent: dict[int, _Recent] = {}  # by the size's bit length

    def learn(self, size: int, time_s: float) -> None:
        """``size`` 1 or more. The base learns nothing of it."""
        self._recent.setdefault(size.bit_length(), _Recent()).add(size, time_s)

    def near(self, size: int) -> float | None:
        """The time of the nearest doubling that was measured; None without any."""
        known = self._known()
        if not known:
            return None
        return known[min(known, key=lambda bits: (abs(bits - size.bit_length()), bits))].time_s

    def at(self, size: int) -> float | None:
        """On a straight line between two doublings; in proportion below the first. None without any measurement.

        Beyond the last one the time per unit goes on as it did over the last doubling, and never falls: a prefill
        takes a n + b n^2, so its time per token is a straight line.
        """
        known = sorted((recent.size, recent.time_s) for recent in self._known().values())
        if not known:
            return None
        above = [point for point in known if point[0] > size]
        below = [point for point in known if point[0] <= size]
        if not below:
            return above[0][1] * size / above[0][0]
        x, y = below[-1]
        if above:
            return y + (above[0][1] - y) * (size - x) / (above[0][0] - x)
        earlier = [point for point in below if point[0] <= x / 2]
        slope = max(0.0, (y / x - earlier[-1][1] / earlier[-1][0]) / (x - earlier[-1][0])) if earlier else 0.0
        return size * (y / x + slope * (size - x))

    def _known(self) -> dict[int, _Recent]:
        if self._base is None:
            return self._recent
        own = {bits: recent for bits, recent in self._recent.items() if recent.is_enough}
        return self._base._known() | own
