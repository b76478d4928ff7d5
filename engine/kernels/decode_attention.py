"""Attention of one new token per sequence, straight from the paged cache, for a whole batch in one call.

Works on bfloat16 (uint16) and float32 alike; sums in float32. Each sequence is computed by itself and in one order,
so its result does not depend on who else is in the batch. Scores lie in lines of 16 columns, one line per key and one
column per query head, for as many key heads as fit.
"""

from functools import cache
from typing import Any, Literal

import numpy as np
from numba import njit

from engine.kernels import amx
from engine.kernels.decode_vectors import (
    add_value_pairs,
    add_values,
    dot_keys,
    prefetch,
    to_floats,
    weigh,
    write_scaled,
)

Products = Literal["floats", "pairs", "tiles"]
"""How scores are multiplied: float32 by float32, bfloat16 by bfloat16 two by two, or in matrix tiles. "pairs" takes the
values two by two as well, with weights rounded to bfloat16."""

COLUMNS = 16
_AHEAD = 2  # blocks asked for before they are used
_LOG2_E = np.float32(1.4426950408889634)


def scratch_floats(group: int, num_kv_heads: int, head_dim: int, max_keys: int) -> int:
    """Float32 numbers that a kernel of ``attention_for`` needs to work in."""
    lines = -(-num_kv_heads // (COLUMNS // group))
    queries = num_kv_heads * max(2 * group, group + COLUMNS // 2) * head_dim
    return queries + lines * COLUMNS * (-(-max_keys // 16) * 16 + 1)


@njit(inline="always")
def _pack_queries(queries: Any, at: int, num_kv_heads: int, group: int, head_dim: int, packed: Any) -> None:
    """Per key head the right side of a product, (head_dim / 2, 16) words, zero outside the head's own columns."""
    packed[:] = 0
    per_line = COLUMNS // group
    for head in range(num_kv_heads):
        for member in range(group):
            column = head % per_line * group + member
            for pair in range(head_dim // 2):
                place = at + (head * group + member) * head_dim + 2 * pair
                word = np.uint32(queries[place]) | (np.uint32(queries[place + 1]) << np.uint32(16))
                packed[(head * head_dim // 2 + pair) * COLUMNS + column] = word


@njit(inline="always")
def _tile_scores(
    keys_at: int,
    stride: int,
    num_kv_heads: int,
    per_line: int,
    head_dim: int,
    packed_at: int,
    scores_at: int,
    line_bytes: int,
    ahead: int,
) -> None:
    """Scores of 16 keys for every head; asks memory for the keys ``ahead`` bytes behind them."""
    for first in range(0, num_kv_heads, per_line):
        amx.clear(0)
        for head in range(first, min(first + per_line, num_kv_heads)):
            for pair in range(0, head_dim // 2, 16):
                prefetch(keys_at + ahead + (head * head_dim + 2 * pair) * 2, 16, stride)
                amx.load_tile(1, keys_at + (head * head_dim + 2 * pair) * 2, stride)
                amx.load_tile(2, packed_at + (head * head_dim // 2 + pair) * COLUMNS * 4, COLUMNS * 4)
                amx.multiply(0, 1, 2)
        amx.store_tile(0, scores_at + first // per_line * line_bytes, COLUMNS * 4)


@njit(inline="always")
def _distance(tables: Any, block: int, exists: bool) -> int:
    """Blocks from this one to the one ``_AHEAD`` places later in its table; 0 if there is none."""
    return tables[block + _AHEAD] - tables[block] if exists else 0


@cache
def attention_for(group: int, head_dim: int, number_bytes: int, products: Products) -> Any:
    """``attend`` for so many query heads to a key head (at most 16) and numbers so long.

    ``head_dim`` is a multiple of 32. Without "floats" numbers are bfloat16, and the block size is even; with "tiles" it
    is a multiple of 16.
    """
    per_line = COLUMNS // group
    tiles, pairs = products == "tiles", products == "pairs"
    query_bytes = 2 if pairs else 4

    @njit(nogil=True, cache=True, fastmath={"contract"})
    def attend(
        queries: Any,
        keys: Any,
        values: Any,
        tables: Any,
        first_blocks: Any,
        num_keys: Any,
        rows: Any,
        out: Any,
        num_kv_heads: int,
        block_size: int,
        scratch: Any,
    ) -> None:
        """Write the attention of one query row per sequence to ``out``.

        ``queries``, ``out``: flat (n, num_kv_heads * group, head_dim), of which sequence i has row ``rows[i]``;
        ``keys``, ``values``: flat (num_blocks, block_size, num_kv_heads, head_dim); ``tables``: block tables one after
        another (int64), that of sequence i from ``first_blocks[i]`` on, with ``num_keys[i]`` keys; ``scratch``:
        float32 of ``scratch_floats``.
        """
        stride = num_kv_heads * head_dim * number_bytes
        scale = np.float32(_LOG2_E / np.sqrt(np.float32(head_dim)))
        size = group * head_dim  # numbers in the queries of one key head
        num_lines = -(-num_kv_heads // per_line)
        sums = scratch[: num_kv_heads * size]
        totals = scratch[num_kv_heads * size : num_kv_heads * size + num_lines * COLUMNS]
        rest = scratch[num_kv_heads * size + num_lines * COLUMNS :]
        packed = rest[: num_kv_heads * head_dim // 2 * COLUMNS].view(np.uint32)
        query = rest[: num_kv_heads * size]
        scores = rest[num_kv_heads * max(size, head_dim // 2 * COLUMNS) :]
        if tiles:
            amx.configure()
        for index in range(rows.shape[0]):
            count, table = num_keys[index], first_blocks[index]
            at = rows[index] * num_kv_heads * size
            line_floats = -(-count // 16) * 16 * COLUMNS
            if tiles:
                _pack_queries(queries, at, num_kv_heads, group, head_dim, packed)
            else:
                query_at = queries.ctypes.data + at * number_bytes
                if not pairs:
                    to_floats(number_bytes, query_at, num_kv_heads * size, query.ctypes.data)
                    query_at = query.ctypes.data
                scores[: num_lines * line_floats] = 0.0
            sums[:] = 0.0
            # Blocks outside, heads inside: memory is read in the order in which it lies.
            for first in range(0, count, block_size):
                block = table + first // block_size
                place = keys.ctypes.data + tables[block] * block_size * stride
                ahead = _distance(tables, block, first + _AHEAD * block_size < count) * block_size * stride
                live = min(block_size, count - first)
                target = scores.ctypes.data + first * COLUMNS * 4
                if tiles:
                    for key in range(0, live, 16):
                        _tile_scores(
                            place + key * stride,
                            stride,
                            num_kv_heads,
                            per_line,
                            head_dim,
                            packed.ctypes.data,
                            target + key * COLUMNS * 4,
                            line_floats * 4,
                            ahead,
                        )
                else:
                    prefetch(place + ahead, block_size * stride // 64, 64)
                    for head in range(num_kv_heads):
                        column = target + (head // per_line * line_floats + head % per_line * group) * 4
                        source = place + head * head_dim * number_bytes
                        dot_keys(
                            group,
                            head_dim,
                            number_bytes,
                            pairs,
                            query_at + head * size * query_bytes,
                            source,
                            stride,
                            live,
                            column,
                        )
            for line in range(num_lines):
                weigh(
                    scores.ctypes.data + line * line_floats * 4,
                    count,
                    scale,
                    totals.ctypes.data + line * COLUMNS * 4,
                )
            for first in range(0, count, block_size):
                block = table + first // block_size
                place = values.ctypes.data + tables[block] * block_size * stride
                ahead = _distance(tables, block, first + _AHEAD * block_size < count) * block_size * stride
                live = min(block_size, count - first)
                for head in range(num_kv_heads):
                    weights = (
                        scores.ctypes.data
                        + (head // per_line * line_floats + first * COLUMNS + head % per_line * group) * 4
                    )
                    source = place + head * head_dim * number_bytes
                    sums_at = sums.ctypes.data + head * size * 4
                    if pairs:
                        add_value_pairs(group, head_dim, weights, source, stride, live, sums_at, ahead)
                    else:
                        add_values(
                            group, head_dim, number_bytes, weights, source, stride, live, sums_at, ahead
                        )
            for head in range(num_kv_heads):
                for member in range(group):
                    column = head // per_line * COLUMNS + head % per_line * group + member
                    inverse = np.float32(1.0) / totals[column]
                    place = (head * group + member) * head_dim
                    target = out.ctypes.data + (at + place) * number_bytes
                    write_scaled(number_bytes, sums.ctypes.data + place * 4, inverse, head_dim, target)
        if tiles:
            amx.release()

    return attend
