"""Rows of numbers in memory that is used again and again."""

import torch

from engine.bulk_memory import aligned_empty
from engine.kv_cache import Numbers, numbers_of


class RowBuffer:
    """A buffer of rows of ``size`` numbers that grows when more are asked for; the same memory every time."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size = size
        self._dtype = dtype
        self._capacity = 0
        self._tensor = torch.empty((0, size), dtype=dtype)
        self._views: dict[int, tuple[torch.Tensor, Numbers]] = {}

    def first(self, count: int) -> tuple[torch.Tensor, Numbers]:
        """The first ``count`` rows as a tensor ``(count, size)`` and as a flat array."""
        view = self._views.get(count)
        if view is None:
            if count > self._capacity:
                memory = aligned_empty(count * self._size * self._dtype.itemsize, "u1")
                self._tensor = torch.from_numpy(memory).view(self._dtype).view(count, self._size)
                self._capacity = count
                self._views.clear()
            rows = self._tensor[:count]
            view = self._views[count] = rows, numbers_of(rows)
        return view
