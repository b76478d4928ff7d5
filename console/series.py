"""Values over time in equal buckets, bounded in memory: what charts and window percentiles are computed from.

No clock: every call that looks back from now is given ``now`` (seconds, the log's monotonic clock).
"""

import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

BUCKET_S: Final = 0.5
NUM_BUCKETS: Final = 1200
"""Ten minutes."""
MAX_VALUES: Final = 512
"""Values kept of one bucket: beyond it only every n-th, with n doubling, so that all of the bucket counts alike."""


class Mark(NamedTuple):
    """Something was done at this moment; ``letter`` is drawn on every chart."""

    at: float
    letter: str
    text: str


def percentile(ordered: list[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks of a sorted, non-empty list (numpy's default)."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class _Bucket:
    __slots__ = ("seen", "stride", "total", "values")

    def __init__(self) -> None:
        self.values = array("d")  # as compact in a snapshot of the view as here
        self.total = 0.0
        self.seen = 0
        self.stride = 1

    def add(self, value: float) -> None:
        self.total += value
        if self.seen % self.stride == 0:
            self.values.append(value)
            if len(self.values) >= MAX_VALUES:
                del self.values[1::2]
                self.stride *= 2
        self.seen += 1

    def extend(self, values: Sequence[float]) -> None:
        """``add`` of each."""
        if self.stride > 1 or len(self.values) + len(values) >= MAX_VALUES:
            for value in values:
                self.add(value)
            return
        self.values.extend(values)
        self.total = sum(values, self.total)
        self.seen += len(values)


class BucketSeries:
    """Samples (``add``) or amounts spread over a span (``spread``), by half-second bucket."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._newest = -(2**62)

    def add(self, at: float, value: float) -> None:
        bucket = self._bucket(math.floor(at / BUCKET_S))
        if bucket is not None:
            bucket.add(value)

    def extend(self, samples: Sequence[tuple[float, float]]) -> None:
        """``add`` of each (at, value), which come in the order of time; mostly all are of one bucket."""
        if not samples:
            return
        first, last = math.floor(samples[0][0] / BUCKET_S), math.floor(samples[-1][0] / BUCKET_S)
        if first == last:
            bucket = self._bucket(first)
            if bucket is not None:
                bucket.extend([value for _, value in samples])
        else:
            for at, value in samples:
                self.add(at, value)

    def spread(self, start: float, end: float, amount: float) -> None:
        """Distribute ``amount`` evenly over [start, end]; a span longer than the window keeps its newest part."""
        if end - start < BUCKET_S / 1000:
            self.add(end, amount)
            return
        per_s = amount / (end - start)
        first = max(math.floor(start / BUCKET_S), math.floor(end / BUCKET_S) - NUM_BUCKETS + 1)
        for index in range(first, math.floor(end / BUCKET_S) + 1):
            low, high = max(start, index * BUCKET_S), min(end, (index + 1) * BUCKET_S)
            if high > low:
                self.add((index + 0.5) * BUCKET_S, per_s * (high - low))

    def window(self, now: float, window_s: float) -> list[float]:
        """All kept values of the last ``window_s``, sorted."""
        return sorted(value for bucket in self._last(now, window_s) for value in bucket.values)

    def total(self, now: float, window_s: float) -> float:
        """Sum over the last ``window_s`` (whole buckets)."""
        return sum(bucket.total for bucket in self._last(now, window_s))

    def count(self, now: float, window_s: float) -> int:
        """How many values were added in the last ``window_s`` (whole buckets)."""
        return sum(bucket.seen for bucket in self._last(now, window_s))

    def percentiles(self, now: float, window_s: float, *shares: float) -> tuple[float | None, ...]:
        """One value per share of 1, None when the window is empty."""
        ordered = self.window(now, window_s)
        return tuple(percentile(ordered, share) if ordered else None for share in shares)

    def columns(self, grid: "ColumnGrid", share: float) -> list[float | None]:
        """Percentile of each column, None where nothing was seen."""
        found: list[float | None] = []
        for first in grid.firsts:
            values = [
                value
                for index in range(first, first + grid.buckets)
                if index in self._buckets
                for value in self._buckets[index].values
            ]
            found.append(percentile(sorted(values), share) if values else None)
        return found

    def rates(self, grid: "ColumnGrid") -> list[float | None]:
        """Sum of each column per second; 0.0 where nothing was seen."""
        return [
            sum(self._buckets[i].total for i in range(first, first + grid.buckets) if i in self._buckets)
            / (grid.buckets * BUCKET_S)
            for first in grid.firsts
        ]

    def _bucket(self, index: int) -> _Bucket | None:
        """The bucket of that index, made where there is none; None: too long ago."""
        bucket = self._buckets.get(index)
        if bucket is None and index > self._newest - NUM_BUCKETS:
            bucket = self._buckets[index] = _Bucket()
            if index > self._newest:
                self._forget(index - self._newest)
                self._newest = index
        return bucket

    def _last(self, now: float, window_s: float) -> list[_Bucket]:
        last = math.floor(now / BUCKET_S)
        first = last - math.ceil(window_s / BUCKET_S) + 1
        return [self._buckets[index] for index in range(first, last + 1) if index in self._buckets]

    def _forget(self, num_buckets: int) -> None:
        """The oldest of them, as the newest moves on; before that none is older than NUM_BUCKETS."""
        if num_buckets >= NUM_BUCKETS:
            newest = max(self._buckets)
            self._buckets = {newest: self._buckets[newest]}
            return
        oldest = self._newest - NUM_BUCKETS + 1
        for index in range(oldest, oldest + num_buckets):
            self._buckets.pop(index, None)


class ColumnGrid:
    """Cuts the window before ``now`` into columns of whole buckets.

    Column edges are fixed in time, so that a chart moves by whole columns and a value never changes its column's
    company from one redraw to the next.
    """

    def __init__(self, now: float, window_s: float, num_columns: int) -> None:
        self.buckets = max(math.ceil(window_s / BUCKET_S / max(num_columns, 1)), 1)
        count = max(math.ceil(window_s / BUCKET_S / self.buckets), 1)
        last = math.floor(math.floor(now / BUCKET_S) / self.buckets)
        self.firsts = [(last - count + 1 + offset) * self.buckets for offset in range(count)]
        self._now = now

    @property
    def column_s(self) -> float:
        return self.buckets * BUCKET_S

    def ages(self) -> list[float]:
        """Seconds before now of each column's middle, oldest first, negative (0 for the running one)."""
        return [min(first * BUCKET_S + self.column_s / 2 - self._now, 0.0) for first in self.firsts]

    def column_of(self, at: float) -> int | None:
        """Index of the column that holds ``at``, None outside the window."""
        offset = math.floor(at / BUCKET_S) // self.buckets - self.firsts[0] // self.buckets
        return offset if 0 <= offset < len(self.firsts) else None
