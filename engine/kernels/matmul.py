"""Rows times a weight, in matrix tiles: one layout of the weight for one row and for thousands.

A weight ``(out, in)`` is stored as tiles of 16 outputs by 32 inputs, 1 KB each and one after another in the order in
which they are used, so that a step with few rows reads memory in one straight line.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.bulk_memory import aligned_empty
from engine.kernels import amx
from engine.kernels.decode_vectors import prefetch
from engine.kernels.emitter import LANES, WORD, Emitter

_TILE = 1024  # bytes
_INPUTS = 32  # of a tile
_PANEL = 32  # outputs computed at once
_AHEAD = 8  # tiles asked for before they are used
_DEPTH = 9  # steps whose weights stay in the nearest cache while many rows pass
_ROWS = 512  # rows whose tiles stay in the second cache while all weights pass


def pack(weight: Any) -> Any:
    """A weight (out, in) of uint16 (bfloat16) as tiles, padded with zeros to whole panels of outputs."""
    outputs, inputs = weight.shape
    padded = np.zeros((-(-outputs // _PANEL) * _PANEL, -(-inputs // _INPUTS) * _INPUTS), np.uint16)
    padded[:outputs, :inputs] = weight
    panels, steps = padded.shape[0] // _PANEL, padded.shape[1] // _INPUTS
    # (panel, half, output, step, pair, 2) -> (panel, step, half, pair, output, 2)
    tiles = padded.reshape(panels, 2, 16, steps, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    packed = aligned_empty(tiles.size, np.uint16)
    packed.reshape(tiles.shape)[...] = tiles
    return packed


def scratch_words(num_rows: int, inputs: int) -> int:
    """32-bit words that ``multiply`` needs to work in."""
    rows = min(_ROWS, -(-num_rows // 32) * 32)
    return rows * (-(-inputs // _INPUTS) * _INPUTS // 2 + _PANEL)


def fits(outputs: int, inputs: int) -> bool:
    """True for sizes that ``multiply`` takes."""
    return outputs % _PANEL == 0 and inputs % 2 == 0


@intrinsic
def _write_panel(typing_context: Any, sums: Any, rows: Any, bias: Any, out: Any, out_stride: Any) -> Any:
    """``rows`` lines of 32 float32 as bfloat16 to lines ``out_stride`` bytes apart; ``bias`` 0, or of 32 bfloat16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        sums, rows, bias, out, out_stride = arguments
        emit = Emitter(builder)
        biased = builder.icmp_signed("!=", bias, WORD(0))
        with builder.if_then(biased), cgutils.for_range(builder, rows) as loop:
            for half in (0, 1):
                place = builder.add(emit.offset(sums, loop.index, 4 * _PANEL), WORD(4 * LANES * half))
                added = emit.load_numbers(builder.add(bias, WORD(2 * LANES * half)), 2)
                emit.store(builder.fadd(emit.load(place), added), place)
        with cgutils.for_range(builder, rows) as loop:
            for half in (0, 1):
                place = builder.add(emit.offset(sums, loop.index, 4 * _PANEL), WORD(4 * LANES * half))
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
    rows: Any, start: int, num_rows: int, inputs: int, steps: int, packed: Any, zeros_at: int
) -> None:
    """``num_rows`` rows from ``start`` on as tiles of 16 rows by 32 inputs, one after another, filled up with zeros."""
    whole = inputs // _INPUTS
    for row in range(-(-num_rows // 32) * 32):
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


@njit(inline="always")
def _few_rows(packed_at: int, weight_at: int, steps: int, sums_at: int, line: int) -> None:
    """sums (16, 32) = up to 16 rows @ one panel of the weight, which comes from memory."""
    amx.clear(0)
    amx.clear(1)
    for step in range(steps):
        prefetch(weight_at + (2 * step + _AHEAD) * _TILE, 32, 64)
        amx.load_tile(4, packed_at + step * _TILE, 64)
        amx.load_tile(6, weight_at + 2 * step * _TILE, 64)
        amx.load_tile(7, weight_at + (2 * step + 1) * _TILE, 64)
        amx.multiply(0, 4, 6)
        amx.multiply(1, 4, 7)
    amx.store_tile(0, sums_at, line)
    amx.store_tile(1, sums_at + 64, line)


@njit(inline="always")
def _many_rows(
    packed_at: int, weight_at: int, steps: int, first: int, count: int, sums_at: int, line: int
) -> None:
    """sums (32, 32) (+)= 32 rows @ ``count`` steps of one panel from step ``first`` on."""
    if first:
        amx.load_tile(0, sums_at, line)
        amx.load_tile(1, sums_at + 64, line)
        amx.load_tile(2, sums_at + 16 * line, line)
        amx.load_tile(3, sums_at + 16 * line + 64, line)
    else:
        amx.clear(0)
        amx.clear(1)
        amx.clear(2)
        amx.clear(3)
    upper = packed_at + first * _TILE
    lower = upper + steps * _TILE
    right = weight_at + 2 * first * _TILE
    for step in range(count):
        amx.load_tile(4, upper + step * _TILE, 64)
        amx.load_tile(6, right + 2 * step * _TILE, 64)
        amx.load_tile(7, right + (2 * step + 1) * _TILE, 64)
        amx.load_tile(5, lower + step * _TILE, 64)
        amx.multiply(0, 4, 6)
        amx.multiply(1, 4, 7)
        amx.multiply(2, 5, 6)
        amx.multiply(3, 5, 7)
    amx.store_tile(0, sums_at, line)
    amx.store_tile(1, sums_at + 64, line)
    amx.store_tile(2, sums_at + 16 * line, line)
    amx.store_tile(3, sums_at + 16 * line + 64, line)


@njit(nogil=True, cache=True)
def multiply(
    rows: Any, weight: Any, bias: Any, num_rows: int, inputs: int, outputs: int, out: Any, scratch: Any
) -> None:
    """``out (n, outputs) = rows (n, inputs) @ weight.T + bias``, summed in float32; all flat uint16 (bfloat16).

    ``weight`` as ``pack`` gives it; ``bias`` (outputs,) or empty; see ``fits`` for the sizes;
    ``scratch``: int32 of at least ``scratch_words``, at a multiple of 64 bytes.
    """
    steps, line, zeros = -(-inputs // _INPUTS), _PANEL * 4, np.zeros(16, np.int32)
    packed = scratch[min(_ROWS, -(-num_rows // 32) * 32) * _PANEL :]
    sums_at, packed_at = scratch.ctypes.data, packed.ctypes.data
    amx.configure()
    for start in range(0, num_rows, _ROWS):
        block = min(_ROWS, num_rows - start)
        _pack_rows(rows, start, block, inputs, steps, packed, zeros.ctypes.data)
        for panel in range(outputs // _PANEL):
            weight_at = weight.ctypes.data + panel * steps * 2 * _TILE
            bias_at = bias.ctypes.data + panel * _PANEL * 2 if bias.shape[0] else 0
            target = out.ctypes.data + (start * outputs + panel * _PANEL) * 2
            if block <= 16:
                _few_rows(packed_at, weight_at, steps, sums_at, line)
                _write_panel(sums_at, block, bias_at, target, outputs * 2)
                continue
            for first in range(0, steps, _DEPTH):
                count = min(_DEPTH, steps - first)
                for row in range(0, block, 32):
                    at = sums_at + row * line
                    _many_rows(
                        packed_at + row // 16 * steps * _TILE, weight_at, steps, first, count, at, line
                    )
                    if first + count == steps:
                        _write_panel(
                            at, min(32, block - row), bias_at, target + row * outputs * 2, outputs * 2
                        )
    amx.release()
