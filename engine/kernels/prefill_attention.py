"""Causal attention of many new tokens in matrix tiles, straight from the paged cache. Knows no batch and no torch.

Columns are query heads: the queries of one key head's group, token after token, 32 at a time. Scores are computed
transposed (keys down, columns across), so the softmax runs along vectors and its results are already in the layout
that the second product reads. Scores, sums and outputs are float32; the softmax is taken block by block with a running
maximum (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al., https://arxiv.org/abs/2205.14135).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from engine.kernels.prefill_vectors import (
    gather_columns,
    rescale,
    soften,
    transpose_pairs,
    write_columns,
)
from engine.kernels.products import COLUMNS, LINE_BYTES, Unit, begin, end, multiply_block

KEYS = 256
"""Keys in a block: scores of 32 columns and their weights stay in the nearest cache."""

_VALUE_STRIDE = (
    KEYS + 32
)  # of a transposed line: not a power of two, or all lines would share one place in cache
_NEVER = np.float32(-1e30)
_LOG2_E = np.float32(1.4426950408889634)


def scratch_words(num_columns: int, head_dim: int) -> int:
    """32-bit words that ``attend`` needs to work in, for so many query tokens times the heads that share a key."""
    tiles = -(-num_columns // COLUMNS)
    per_tile = COLUMNS * (head_dim // 2 + head_dim + 2)  # packed queries, sums, maximum and total
    return head_dim * _VALUE_STRIDE // 2 + COLUMNS * (KEYS + KEYS // 2 + 1) + tiles * per_tile


@njit(inline="always")
def _addresses(
    start: int, first: int, num_columns: int, group: int, token_bytes: int, head_bytes: int, out: Any
) -> None:
    """Where each column of a tile lies in queries or output; columns behind the last one are the last one again."""
    for lane in range(COLUMNS):
        token, member = divmod(min(first + lane, num_columns - 1), group)
        out[lane] = start + token * token_bytes + member * head_bytes


@njit(inline="always")
def _transpose_values(
    values: Any,
    table: Any,
    block_size: int,
    row: int,
    base: int,
    head_dim: int,
    first: int,
    live: int,
    count: int,
    out: Any,
) -> None:
    """Values of ``live`` keys from ``first`` on as (head_dim, count) bfloat16, zeros behind the last one."""
    width = head_dim * 2
    for key in range(0, count, 2):
        place = first + key
        target = out.ctypes.data + key * 2
        if key + 1 < live:
            start = (table[place // block_size] * block_size + place % block_size) * row + base
            transpose_pairs(values.ctypes.data + start * 2, row * 2, head_dim, target, _VALUE_STRIDE * 2)
        else:
            last = np.zeros(2 * head_dim, np.uint16)
            if key < live:
                start = (table[place // block_size] * block_size + place % block_size) * row + base
                last[:head_dim] = values[start : start + head_dim]
            transpose_pairs(last.ctypes.data, width, head_dim, target, _VALUE_STRIDE * 2)


@njit(inline="always")
def _score(
    tiles: bool,
    keys_at: int,
    table: Any,
    block_size: int,
    row_bytes: int,
    first: int,
    count: int,
    packed_at: int,
    half: int,
    scores_at: int,
) -> None:
    """Scores of keys ``first .. first + count - 1`` (count a multiple of 32) for 32 columns, as (count, 32)."""
    for key in range(0, count, 32):
        place = first + key
        upper = keys_at + (table[place // block_size] * block_size + place % block_size) * row_bytes
        place += 16
        # the second half of the last 32 keys may lie behind the block table: any row will do, it is masked
        index = min(place // block_size, table.shape[0] - 1)
        lower = keys_at + (table[index] * block_size + place % block_size) * row_bytes
        multiply_block(
            tiles,
            upper, lower, row_bytes, 64, packed_at, 64, LINE_BYTES, 16 * LINE_BYTES, half // 16,
            scores_at + key * LINE_BYTES, 0,
        )  # fmt: skip


@njit(inline="always")
def _add_values(
    tiles: bool, transposed_at: int, head_dim: int, count: int, weights_at: int, sums_at: int
) -> None:
    """sums (head_dim, 32) += values^T (head_dim, count) @ weights (count, 32)."""
    line = _VALUE_STRIDE * 2
    for d in range(0, head_dim, 32):
        left = transposed_at + d * line
        multiply_block(
            tiles,
            left, left + 16 * line, line, 64, weights_at, 64, LINE_BYTES, 16 * LINE_BYTES, count // 32,
            sums_at + d * LINE_BYTES, 1,
        )  # fmt: skip


@cache
def attend_by(kind: Unit) -> Any:
    """``attend`` for processors with that unit."""
    tiles = kind == "tiles"

    @njit(nogil=True, cache=True, fastmath={"contract"})
    def attend(
        queries: Any,
        keys: Any,
        values: Any,
        table: Any,
        out: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_new: int,
        num_keys: int,
        scratch: Any,
    ) -> None:
        """Write the attention of a sequence's last ``num_new`` of ``num_keys`` tokens to ``out``.

        ``queries`` and ``out``: flat uint16 of (num_new, num_heads, head_dim); ``keys`` and ``values``: flat uint16 of
        one layer's (num_blocks, block_size, num_kv_heads, head_dim); ``table``: int64 block table. ``head_dim`` must
        be a multiple of 32 and ``block_size`` of 16. ``scratch``: int32 of at least ``scratch_words``.
        """
        group = num_heads // num_kv_heads
        half = head_dim // 2
        row = num_kv_heads * head_dim
        start = num_keys - num_new
        num_columns = num_new * group
        num_tiles = -(-num_columns // COLUMNS)
        scale = np.float32(_LOG2_E / np.sqrt(np.float32(head_dim)))
        used = head_dim * _VALUE_STRIDE // 2
        transposed = scratch[:used].view(np.uint16)
        scores = scratch[used : used + KEYS * COLUMNS].view(np.float32)
        used += KEYS * COLUMNS
        weights = scratch[used : used + KEYS * COLUMNS // 2]
        used += KEYS * COLUMNS // 2
        factor = scratch[used : used + COLUMNS]
        used += COLUMNS
        packed = scratch[used : used + num_tiles * half * COLUMNS]
        used += num_tiles * half * COLUMNS
        sums = scratch[used : used + num_tiles * head_dim * COLUMNS].view(np.float32)
        used += num_tiles * head_dim * COLUMNS
        maxima = scratch[used : used + num_tiles * COLUMNS].view(np.float32)
        used += num_tiles * COLUMNS
        totals = scratch[used : used + num_tiles * COLUMNS].view(np.float32)
        places, inverse = np.empty(COLUMNS, np.int64), np.empty(COLUMNS, np.float32)
        token_bytes, head_bytes = num_heads * head_dim * 2, head_dim * 2
        begin(tiles)
        for head in range(num_kv_heads):
            base = head * head_dim
            sums[:] = 0.0
            totals[:] = 0.0
            maxima[:] = _NEVER
            for tile in range(num_tiles):
                first = tile * COLUMNS
                _addresses(
                    queries.ctypes.data + head * head_bytes * group,
                    first,
                    num_columns,
                    group,
                    token_bytes,
                    head_bytes,
                    places,
                )
                gather_columns(places.ctypes.data, half, packed.ctypes.data + tile * half * LINE_BYTES)
            # Keys outside, columns inside: a block of keys and values is read once for all columns.
            for block in range(0, num_keys, KEYS):
                live = min(KEYS, num_keys - block)
                count = -(-live // 32) * 32
                _transpose_values(
                    values, table, block_size, row, base, head_dim, block, live, count, transposed
                )
                first_tile = (
                    max(0, block - start) * group // COLUMNS
                )  # earlier columns see none of these keys
                for tile in range(first_tile, num_tiles):
                    first = tile * COLUMNS
                    last = min(first + COLUMNS, num_columns) - 1
                    lowest = start + first // group - block  # last key here that every column may see
                    seen = min(live, start + last // group + 1 - block)
                    if seen <= 0:
                        continue
                    count = -(-seen // 32) * 32
                    _score(
                        tiles,
                        keys.ctypes.data + base * 2,
                        table,
                        block_size,
                        row * 2,
                        block,
                        count,
                        packed.ctypes.data + tile * half * LINE_BYTES,
                        half,
                        scores.ctypes.data,
                    )
                    if count > lowest + 1:
                        for column in range(COLUMNS):
                            limit = start + min(first + column, last) // group - block
                            for key in range(max(0, limit + 1), count):
                                scores[key * COLUMNS + column] = _NEVER
                    maximum_at = maxima.ctypes.data + tile * LINE_BYTES
                    total_at = totals.ctypes.data + tile * LINE_BYTES
                    sums_at = sums.ctypes.data + tile * head_dim * LINE_BYTES
                    soften(
                        scores.ctypes.data,
                        count,
                        scale,
                        maximum_at,
                        total_at,
                        factor.ctypes.data,
                        weights.ctypes.data,
                    )
                    if block:
                        rescale(sums_at, head_dim, factor.ctypes.data)
                    _add_values(tiles, transposed.ctypes.data, head_dim, count, weights.ctypes.data, sums_at)
            for tile in range(num_tiles):
                first = tile * COLUMNS
                _addresses(
                    out.ctypes.data + head * head_bytes * group,
                    first,
                    num_columns,
                    group,
                    token_bytes,
                    head_bytes,
                    places,
                )
                for lane in range(COLUMNS):
                    inverse[lane] = np.float32(1.0) / totals[first + lane]
                write_columns(
                    sums.ctypes.data + tile * head_dim * LINE_BYTES,
                    head_dim,
                    inverse.ctypes.data,
                    places.ctypes.data,
                )
        end(tiles)

    return attend
