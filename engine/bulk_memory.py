"""Memory for numbers that are read in bulk: it starts at a cache line, and large pieces lie in huge pages.

A tile row that lies across two cache lines costs twice; and with pages of 4 KB, reading a cache of gigabytes waits for
the page table as much as for the numbers.
"""

import mmap
from typing import Any

import numpy as np

_LINE = 64
_HUGE_PAGE = 2 * 2**20
_SMALL_PAGE = 4096


def aligned_empty(size: int, dtype: Any, is_present: bool = False) -> Any:
    """A flat array of ``size`` numbers, not written yet, that starts at a multiple of 64 bytes.

    ``is_present``: its pages are there at once, so that whoever writes first does not wait for them.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < _HUGE_PAGE:
        raw = np.empty(num_bytes + _LINE, np.uint8)
    else:
        raw = _huge_pages(num_bytes)
        if is_present:
            raw[::_SMALL_PAGE] = 0
    first = -raw.ctypes.data % _LINE
    return raw[first : first + num_bytes].view(dtype)


class Scratch:
    """Numbers to work in, in memory that is used again and again and grows when more are asked for."""

    def __init__(self, dtype: Any) -> None:
        self._memory = aligned_empty(0, dtype)

    def first(self, count: int) -> Any:
        """A flat array of at least ``count`` numbers, with whatever was written to it before."""
        if len(self._memory) < count:
            self._memory = aligned_empty(count * 5 // 4, self._memory.dtype)
        return self._memory


def _huge_pages(num_bytes: int) -> Any:
    """Zeroed memory of its own mapping; pages appear when written. Small pages where the system has no huge ones."""
    mapping = mmap.mmap(-1, num_bytes + _LINE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
