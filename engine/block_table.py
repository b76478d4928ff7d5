"""The block table of one sequence: a list of block ids that also exists as an array and as runs, kept up to date.

A table only grows, so both are extended and never made anew: a step costs nothing per token of context.
"""

from collections.abc import Iterable

import numpy as np

from engine.block_allocator import contiguous_runs

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class BlockTable(list[int]):
    """Block ids in token order. Append and extend only; start a new one instead of removing."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self._array: Ids = np.empty(0, np.int64)
        self._filled = 0
        self._runs: list[tuple[int, int]] = []
        self._in_runs = 0

    def array(self) -> Ids:
        """The ids as int64. A view: valid until the table grows."""
        if self._filled < len(self):
            if len(self._array) < len(self):
                grown = np.empty(max(16, 2 * len(self)), np.int64)
                grown[: self._filled] = self._array[: self._filled]
                self._array = grown
            self._array[self._filled : len(self)] = self[self._filled :]
            self._filled = len(self)
        return self._array[: self._filled]

    def runs(self) -> list[tuple[int, int]]:
        """As ``contiguous_runs`` gives them. Not to be changed by the caller."""
        if self._in_runs < len(self):
            for first, count in contiguous_runs(self[self._in_runs :]):
                last = self._runs[-1] if self._runs else (-1, 0)
                if sum(last) == first and last[1]:
                    self._runs[-1] = (last[0], last[1] + count)
                else:
                    self._runs.append((first, count))
            self._in_runs = len(self)
        return self._runs
