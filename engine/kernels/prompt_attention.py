"""Causal attention of many new tokens without matrix tiles, straight from the paged cache. Knows no batch, no torch.

Every sum is that of ``decode_attention``, bit for bit: the same products in the same order. So it makes no difference
whether a token was computed with its prompt, in what chunks, or one at a time.

Columns are query heads: the queries of one key head's group, token after token, 32 at a time, a column to each lane.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from engine.kernels.decode_vectors import to_floats, weigh, write_scaled
from engine.kernels.emitter import LANES
from engine.kernels.prefill_vectors import COLUMNS, gather_columns
from engine.kernels.prompt_vectors import add_columns, dot_columns, interleave, pair_lines

_KEYS = 64  # staged at once: keys, values and weights stay in the nearest cache
_LINES = COLUMNS // LANES
_NEVER = np.float32(-1e30)
_LOG2_E = np.float32(1.4426950408889634)


def scratch_floats(head_dim: int, num_keys: int) -> int:
    """Float32 numbers that a kernel of ``attention_for`` needs to work in."""
    staged = _KEYS * head_dim + _KEYS * LANES
    return staged + COLUMNS * (2 * head_dim + 1) + COLUMNS * (num_keys + 2)


@njit(inline="always")
def _address(start: int, table: Any, block_size: int, row_bytes: int, key: int) -> int:
    """Where a key of the sequence lies."""
    slot = int(table[key // block_size]) * block_size + key % block_size
    return start + slot * row_bytes


@cache
def attention_for(group: int, head_dim: int, number_bytes: int, pairs: bool) -> Any:
    """``attend`` for so many query heads to a key head and numbers so long.

    ``head_dim`` is a multiple of 32. ``pairs`` as "pairs" of ``decode_attention``.
    """
    words = head_dim // 2 if pairs else head_dim
    word_bytes = 4 if pairs else number_bytes  # of a staged key's numbers
    at_once = max(1, LANES * LANES // head_dim)  # columns whose sums stay in registers
    scale = np.float32(_LOG2_E / np.sqrt(np.float32(head_dim)))

    @njit(nogil=True, cache=True, fastmath={"contract"})
    def attend(
        queries: Any,
        keys: Any,
        values: Any,
        table: Any,
        out: Any,
        num_kv_heads: int,
        block_size: int,
        num_new: int,
        num_keys: int,
        scratch: Any,
    ) -> None:
        """Write the attention of a sequence's last ``num_new`` of ``num_keys`` tokens to ``out``.

        ``queries``, ``out``: flat (num_new, num_kv_heads * group, head_dim); ``keys``, ``values``: flat of one layer's
        (num_blocks, block_size, num_kv_heads, head_dim); ``table``: int64 block table; ``scratch``: float32 of
        ``scratch_floats``.
        """
        head_bytes = head_dim * number_bytes
        row_bytes = num_kv_heads * head_bytes
        token_bytes = row_bytes * group
        start, num_columns = num_keys - num_new, num_new * group
        staged = scratch[: _KEYS * head_dim].ctypes.data
        used = _KEYS * head_dim
        words_at = scratch[used:].ctypes.data
        used += _KEYS * LANES
        packed_at = scratch[used:].ctypes.data
        used += COLUMNS * head_dim
        sums = scratch[used : used + COLUMNS * head_dim]
        used += COLUMNS * head_dim
        totals = scratch[used : used + COLUMNS]
        scores = scratch[used + COLUMNS :]
        plane = (num_keys + 2) * LANES  # numbers in the scores of one line of columns
        places = np.empty(COLUMNS, np.int64)
        for head in range(num_kv_heads):
            keys_at = keys.ctypes.data + head * head_bytes
            values_at = values.ctypes.data + head * head_bytes
            for first in range(0, num_columns, COLUMNS):
                last = min(first + COLUMNS, num_columns) - 1
                for lane in range(COLUMNS):
                    token, member = divmod(min(first + lane, last), group)
                    at = queries.ctypes.data + token * token_bytes + (head * group + member) * head_bytes
                    if number_bytes == 2 and not pairs:
                        places[lane] = sums.ctypes.data + lane * head_dim * 4
                        to_floats(2, at, head_dim, places[lane])
                    else:
                        places[lane] = at
                gather_columns(places.ctypes.data, words, packed_at)
                count = start + last // group + 1  # keys that the last column sees
                for block in range(0, count, _KEYS):
                    live = min(_KEYS, count - block)
                    for index in range(live):  # keys as words, one after another
                        at = _address(keys_at, table, block_size, row_bytes, block + index)
                        to_floats(word_bytes, at, words, staged + index * words * 4)
                    dot_columns(
                        words, pairs, _LINES, packed_at, staged, live + live % 2,
                        scores.ctypes.data + block * LANES * 4, plane * 4,
                    )  # fmt: skip
                seen = start + first // group + 1  # keys that all columns see
                for key in range(seen, count):
                    for lane in range(min(COLUMNS, (key - start) * group - first)):
                        scores[lane // LANES * plane + key * LANES + lane % LANES] = _NEVER
                for line in range(_LINES):
                    at = scores.ctypes.data + line * plane * 4
                    weigh(at, count, scale, totals.ctypes.data + line * LANES * 4)
                    scores[line * plane + count * LANES : line * plane + (count + 1) * LANES] = 0.0
                for key in range(seen, count):
                    for lane in range(min(COLUMNS, (key - start) * group - first)):
                        scores[lane // LANES * plane + key * LANES + lane % LANES] = 0.0
                sums[:] = 0.0
                for block in range(0, count, _KEYS):
                    live = min(_KEYS, count - block)
                    for index in range(0, live, 2 if pairs else 1):  # an odd last value is paired with itself
                        at = _address(values_at, table, block_size, row_bytes, block + index)
                        if pairs:
                            high = at + row_bytes if index + 1 < live else at
                            interleave(at, high, head_dim, staged + index // 2 * head_dim * 4)
                        else:
                            to_floats(number_bytes, at, words, staged + index * words * 4)
                    lines = (live + 1) // 2 if pairs else live
                    for line in range(_LINES):
                        weights_at = scores.ctypes.data + (line * plane + block * LANES) * 4
                        if pairs:
                            pair_lines(weights_at, lines, words_at)
                            weights_at = words_at
                        for column in range(0, LANES, at_once):
                            add_columns(
                                at_once, head_dim, pairs, weights_at + column * 4, staged, lines,
                                sums.ctypes.data + (line * LANES + column) * head_dim * 4,
                            )  # fmt: skip
                for lane in range(last - first + 1):
                    token, member = divmod(first + lane, group)
                    at = out.ctypes.data + token * token_bytes + (head * group + member) * head_bytes
                    inverse = np.float32(1.0) / totals[lane]
                    write_scaled(number_bytes, sums.ctypes.data + lane * head_dim * 4, inverse, head_dim, at)

    return attend
