"""Rows times a weight, in matrix tiles: one layout of the weight for one row and for thousands.

A weight ``(out, in)`` is stored as tiles of 16 outputs by 32 inputs, 1 KB each and one after another in the order in
which they are used, so that a step with few rows reads memory in one straight line.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.bulk_memory import aligned_empty
from engine.kernels.decode_vectors import prefetch
from engine.kernels.emitter import LANES, WORD, Emitter
from engine.kernels.products import (
    COLUMNS,
    LINE_BYTES,
    Unit,
    begin,
    end,
    multiply_block,
    multiply_few,
    padded,
)

_TILE = 1024  # bytes
_INPUTS = 32  # of a tile
_DEPTH = 9  # steps whose weights stay in the nearest cache while many rows pass
_ROWS = 512  # rows whose tiles stay in the second cache while all weights pass


def pack(weight: Any) -> Any:
    """A weight (out, in) of uint16 (bfloat16) as tiles, padded with zeros to whole panels of outputs."""
    outputs, inputs = weight.shape
    padded = np.zeros((-(-outputs // COLUMNS) * COLUMNS, -(-inputs // _INPUTS) * _INPUTS), np.uint16)
    padded[:outputs, :inputs] = weight
    panels, steps = padded.shape[0] // COLUMNS, padded.shape[1] // _INPUTS
    # (panel, half, output, step, pair, 2) -> (panel, step, half, pair, output, 2)
    tiles = padded.reshape(panels, 2, 16, steps, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    packed = aligned_empty(tiles.size, np.uint16)
    packed.reshape(tiles.shape)[...] = tiles
    return packed


def scratch_words(num_rows: int, inputs: int) -> int:
    """32-bit words that ``multiply`` needs to work in."""
    rows = min(_ROWS, -(-num_rows // 32) * 32)
    return rows * (-(-inputs // _INPUTS) * _INPUTS // 2 + COLUMNS)


def fits(outputs: int, inputs: int) -> bool:
    """True for sizes that ``multiply`` takes."""
    return outputs % COLUMNS == 0 and inputs % 2 == 0


@intrinsic
def _write_panel(typing_context: Any, sums: Any, rows: Any, bias: Any, out: Any, out_stride: Any) -> Any:
    """``rows`` lines of 32 float32 as bfloat16 to lines ``out_stride`` bytes apart; ``bias`` 0, or of 32 bfloat16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        sums, rows, bias, out, out_stride = arguments
        emit = Emitter(builder)
        biased = builder.icmp_signed("!=", bias, WORD(0))
        with builder.if_then(biased), cgutils.for_range(builder, rows) as loop:
            for half in (0, 1):
                place = builder.add(emit.offset(sums, loop.index, LINE_BYTES), WORD(4 * LANES * half))
                added = emit.load_numbers(builder.add(bias, WORD(2 * LANES * half)), 2)
                emit.store(builder.fadd(emit.load(place), added), place)
        with cgutils.for_range(builder, rows) as loop:
            for half in (0, 1):
                place = builder.add(emit.offset(sums, loop.index, LINE_BYTES), WORD(4 * LANES * half))
                target = builder.add(
                    builder.add(out, builder.mul(loop.index, out_stride)), WORD(2 * LANES * half)
                )
                emit.store_numbers(emit.load(place), target, 2)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), code


@intrinsic
def _copy_line(typing_context: Any, source: Any, target: Any) -> Any:
    """64 bytes."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        emit.store(emit.load(arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@njit(inline="always")
def _pack_rows(
    rows: Any, start: int, num_rows: int, padded: int, inputs: int, steps: int, packed: Any, zeros_at: int
) -> None:
    """``num_rows`` rows from ``start`` on as tiles of 16 rows by 32 inputs, with zeros up to ``padded`` rows."""
    whole = inputs // _INPUTS
    for row in range(padded):
        tile, line = divmod(row, 16)
        place = (tile * steps * 16 + line) * 16
        target = packed.ctypes.data + place * 4
        source = rows.ctypes.data + (start + row) * inputs * 2
        for step in range(steps):
            if row >= num_rows or step == whole:
                _copy_line(zeros_at, target + step * _TILE)
            else:
                _copy_line(source + step * 64, target + step * _TILE)
        if row < num_rows and steps > whole:  # what is left of a step
            words = rows[(start + row) * inputs + whole * _INPUTS : (start + row + 1) * inputs].view(np.int32)
            place += whole * _TILE // 4
            packed[place : place + words.shape[0]] = words


@cache
def multiply_by(kind: Unit) -> Any:
    """``multiply`` for processors with that unit."""
    tiles = kind == "tiles"

    @njit(nogil=True, cache=True)
    def multiply(
        rows: Any,
        weight: Any,
        bias: Any,
        num_rows: int,
        inputs: int,
        outputs: int,
        out: Any,
        scratch: Any,
    ) -> None:
        """``out (n, outputs) = rows (n, inputs) @ weight.T + bias``, summed in float32; all flat uint16 (bfloat16).

        ``weight`` as ``pack`` gives it; ``bias`` (outputs,) or empty; see ``fits`` for the sizes;
        ``scratch``: int32 of at least ``scratch_words``, at a multiple of 64 bytes.
        """
        steps, zeros = -(-inputs // _INPUTS), np.zeros(16, np.int32)
        packed = scratch[min(_ROWS, -(-num_rows // 32) * 32) * COLUMNS :]
        sums_at, packed_at = scratch.ctypes.data, packed.ctypes.data
        begin(tiles)
        for start in range(0, num_rows, _ROWS):
            block = min(_ROWS, num_rows - start)
            _pack_rows(rows, start, block, padded(tiles, block), inputs, steps, packed, zeros.ctypes.data)
            for panel in range(outputs // COLUMNS):
                weight_at = weight.ctypes.data + panel * steps * 2 * _TILE
                bias_at = bias.ctypes.data + panel * COLUMNS * 2 if bias.shape[0] else 0
                target = out.ctypes.data + (start * outputs + panel * COLUMNS) * 2
                if block <= 16:
                    multiply_few(
                        tiles, block, packed_at, 64, _TILE, weight_at, _TILE, 64, 2 * _TILE, steps, sums_at
                    )
                    _write_panel(sums_at, block, bias_at, target, outputs * 2)
                    continue
                for first in range(0, steps, _DEPTH):
                    count = min(_DEPTH, steps - first)
                    part_at = weight_at + 2 * first * _TILE
                    lines = -(
                        -_DEPTH * 2 * _TILE // 64 // (block // 32 + 1)
                    )  # of the next part, for each row block
                    for row in range(0, block, 32):
                        prefetch(part_at + 2 * count * _TILE + row // 32 * lines * 64, lines, 64)
                        upper = packed_at + (row // 16 * steps + first) * _TILE
                        at = sums_at + row * LINE_BYTES
                        multiply_block(
                            tiles, upper, upper + steps * _TILE, 64, _TILE,
                            part_at, _TILE, 64, 2 * _TILE, count, at, first,
                        )  # fmt: skip
                        if first + count == steps:
                            rows_left = min(32, block - row)
                            _write_panel(at, rows_left, bias_at, target + row * outputs * 2, outputs * 2)
        end(tiles)

    return multiply
