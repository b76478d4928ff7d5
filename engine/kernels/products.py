"""Products of small bfloat16 matrices summed in float32: the one inner loop of weights, attention scores and values.

The sums are lines of 32 float32. A left matrix has its rows ``stride`` bytes apart; a right one has rows interleaved in
pairs (rows 2p and 2p + 1 of a column side by side in one 32-bit word of line p), 16 columns at a time. Both are walked
in steps of 32 along the dimension that is summed. Every row of the sums is added up in one order, whatever the number
of rows and steps of a call: who shares a batch, and where a prompt is cut, changes no bit.
"""

from functools import cache
from typing import Any, Final, Literal

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels import amx
from engine.kernels.emitter import BFLOAT, FLOATS, INT, LANES, WORD, Emitter

Unit = Literal["tiles", "vectors"]

COLUMNS: Final = 32
"""Of the sums."""
LINE_BYTES: Final = COLUMNS * 4
_PAIRS = 16  # of a step
_AHEAD_BYTES = 8192  # of a weight that comes from memory, asked for before they are used
_DEPTH = 9  # steps of a right matrix that stay in the nearest cache while more rows pass
_ROWS = 8  # summed at once in vector registers: 16 of sums, two of the right matrix
_PAIR_OF_BFLOATS = ir.VectorType(BFLOAT, 2 * LANES)


@cache
def runs(kind: Unit) -> bool:
    """True if this processor multiplies bfloat16 with AMX tiles, or with AVX512-BF16 vectors."""
    if kind == "tiles":
        return amx.is_available()
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16") and features.get("avx512bw"))


def unit() -> Unit | None:
    """The faster of those that this processor has."""
    return "tiles" if runs("tiles") else "vectors" if runs("vectors") else None


@intrinsic
def prefetch_pairs(typing_context: Any, right: Any, right_half: Any, right_stride: Any) -> Any:
    """Ask memory for one step of a right matrix."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        right, right_half, right_stride = arguments
        emit = Emitter(builder)
        for _ in range(_PAIRS):
            emit.prefetch(right)
            emit.prefetch(builder.add(right, right_half))
            right = builder.add(right, right_stride)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), code


@intrinsic(prefer_literal=True)
def _multiply_rows(
    typing_context: Any,
    rows: Any,
    ahead: Any,
    left: Any,
    left_stride: Any,
    left_step: Any,
    right: Any,
    right_half: Any,
    right_stride: Any,
    right_step: Any,
    steps: Any,
    sums: Any,
    adds: Any,
) -> Any:
    """``rows`` lines (a literal, at most 8) of sums in vector registers; memory is asked ``ahead`` bytes early."""
    count, ahead_bytes = rows.literal_value, ahead.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        # A function of its own in the machine code as well: inlined into a larger one, its registers are spilled.
        name = f"multiply_{count}_rows_{ahead_bytes}_ahead"
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [WORD] * 10)
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block("entry"))
            _emit_rows(body, count, ahead_bytes, *function.args)
            body.ret_void()
        builder.call(function, arguments[2:])
        return context.get_dummy_value()

    return types.void(rows, ahead, *(types.int64,) * 10), code


def _emit_rows(
    builder: ir.IRBuilder,
    count: int,
    ahead_bytes: int,
    left: Any,
    left_stride: Any,
    left_step: Any,
    right: Any,
    right_half: Any,
    right_stride: Any,
    right_step: Any,
    steps: Any,
    sums: Any,
    adds: Any,
) -> None:
    emit = Emitter(builder)
    keeps = builder.icmp_signed("!=", adds, WORD(0))
    places = [
        builder.add(sums, WORD(row * LINE_BYTES + half * LANES * 4))
        for row in range(count)
        for half in (0, 1)
    ]
    slots = [cgutils.alloca_once(builder, FLOATS) for _ in places]
    for slot, place in zip(slots, places, strict=True):
        builder.store(builder.select(keeps, emit.load(place), emit.constant(0.0)), slot)
    starts = [builder.add(left, builder.mul(left_stride, WORD(row))) for row in range(count)]
    with cgutils.for_range(builder, steps) as outer:
        left_moved = builder.mul(left_step, outer.index)
        right_at = builder.add(right, builder.mul(right_step, outer.index))
        lines = [builder.add(start, left_moved) for start in starts]
        values = [builder.load(slot) for slot in slots]
        for pair in range(_PAIRS):
            other_half = builder.add(right_at, right_half)
            if ahead_bytes:
                emit.prefetch(builder.add(right_at, WORD(ahead_bytes)))
                emit.prefetch(builder.add(other_half, WORD(ahead_bytes)))
            rights = [emit.load(right_at, _PAIR_OF_BFLOATS), emit.load(other_half, _PAIR_OF_BFLOATS)]
            right_at = builder.add(right_at, right_stride)
            for row, line in enumerate(lines):
                word = emit.spread_word(emit.load(builder.add(line, WORD(4 * pair)), INT))
                for half in (0, 1):
                    place = 2 * row + half
                    words = builder.bitcast(word, _PAIR_OF_BFLOATS)
                    values[place] = emit.dot_pairs(values[place], words, rights[half])
        for slot, value in zip(slots, values, strict=True):
            builder.store(value, slot)
    for slot, place in zip(slots, places, strict=True):
        emit.store(builder.load(slot), place)


# What compiled code calls takes ``tiles``: whether the unit is "tiles". It is a constant of that code, so one of the
# two ways is left out of it. (Functions in the closure of a compiled one would keep it from being stored.)


@njit(inline="always")
def begin(tiles: bool) -> None:
    """Before the first product in a function."""
    if tiles:
        amx.configure()


@njit(inline="always")
def end(tiles: bool) -> None:
    """After the last one."""
    if tiles:
        amx.release()


@njit(inline="always")
def padded(tiles: bool, rows: int) -> int:
    """Rows that must be there for so many, those behind them zeros."""
    if rows > 16:
        return -(-rows // 32) * 32
    if tiles or rows > _ROWS:
        return 16
    return _ROWS if rows > 4 else 4 if rows > 1 else 1


@njit(inline="always")
def _tile_block(
    upper: int,
    lower: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
    adds: int,
) -> None:
    if adds:
        amx.load_tile(0, sums, LINE_BYTES)
        amx.load_tile(1, sums + 64, LINE_BYTES)
        amx.load_tile(2, sums + 16 * LINE_BYTES, LINE_BYTES)
        amx.load_tile(3, sums + 16 * LINE_BYTES + 64, LINE_BYTES)
    else:
        amx.clear(0)
        amx.clear(1)
        amx.clear(2)
        amx.clear(3)
    for step in range(steps):
        amx.load_tile(4, upper + step * left_step, left_stride)
        amx.load_tile(6, right + step * right_step, right_stride)
        amx.load_tile(7, right + step * right_step + right_half, right_stride)
        amx.load_tile(5, lower + step * left_step, left_stride)
        amx.multiply(0, 4, 6)
        amx.multiply(1, 4, 7)
        amx.multiply(2, 5, 6)
        amx.multiply(3, 5, 7)
    amx.store_tile(0, sums, LINE_BYTES)
    amx.store_tile(1, sums + 64, LINE_BYTES)
    amx.store_tile(2, sums + 16 * LINE_BYTES, LINE_BYTES)
    amx.store_tile(3, sums + 16 * LINE_BYTES + 64, LINE_BYTES)


@njit(inline="always")
def _few_in_tiles(
    left: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
) -> None:
    amx.clear(0)
    amx.clear(1)
    for step in range(steps):
        at = right + step * right_step
        prefetch_pairs(at + _AHEAD_BYTES, right_half, right_stride)
        amx.load_tile(4, left + step * left_step, left_stride)
        amx.load_tile(6, at, right_stride)
        amx.load_tile(7, at + right_half, right_stride)
        amx.multiply(0, 4, 6)
        amx.multiply(1, 4, 7)
    amx.store_tile(0, sums, LINE_BYTES)
    amx.store_tile(1, sums + 64, LINE_BYTES)


@njit(inline="always")
def _vector_block(
    upper: int,
    lower: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
    adds: int,
) -> None:
    for part in range(4):
        left = (upper if part < 2 else lower) + part % 2 * _ROWS * left_stride
        _multiply_rows(
            8, 0, left, left_stride, left_step, right, right_half, right_stride, right_step, steps,
            sums + part * _ROWS * LINE_BYTES, adds,
        )  # fmt: skip


@njit()
def _few_in_vectors(
    rows: int,
    left: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
) -> None:
    for first in range(0, steps, _DEPTH):
        count = min(_DEPTH, steps - first)
        at = left + first * left_step
        part = right + first * right_step
        if rows == 1:
            _multiply_rows(
                1, _AHEAD_BYTES, at, left_stride, left_step,
                part, right_half, right_stride, right_step, count, sums, first,
            )  # fmt: skip
        elif rows <= 4:
            _multiply_rows(
                4, _AHEAD_BYTES, at, left_stride, left_step,
                part, right_half, right_stride, right_step, count, sums, first,
            )  # fmt: skip
        else:
            _multiply_rows(
                8, _AHEAD_BYTES, at, left_stride, left_step,
                part, right_half, right_stride, right_step, count, sums, first,
            )  # fmt: skip
        if rows > _ROWS:
            _multiply_rows(
                8, 0, at + _ROWS * left_stride, left_stride, left_step,
                part, right_half, right_stride, right_step, count, sums + _ROWS * LINE_BYTES, first,
            )  # fmt: skip


@njit(inline="always")
def multiply_block(
    tiles: bool,
    upper: int,
    lower: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
    adds: int,
) -> None:
    """32 lines of ``sums`` (+)= 16 left rows from ``upper`` and 16 from ``lower`` on times 32 columns.

    ``right_half`` bytes lie between columns 0-15 and 16-31; ``adds`` 0 forgets what was in the sums.
    """
    if tiles:
        _tile_block(
            upper,
            lower,
            left_stride,
            left_step,
            right,
            right_half,
            right_stride,
            right_step,
            steps,
            sums,
            adds,
        )
    else:
        _vector_block(
            upper,
            lower,
            left_stride,
            left_step,
            right,
            right_half,
            right_stride,
            right_step,
            steps,
            sums,
            adds,
        )


@njit(inline="always")
def multiply_few(
    tiles: bool,
    rows: int,
    left: int,
    left_stride: int,
    left_step: int,
    right: int,
    right_half: int,
    right_stride: int,
    right_step: int,
    steps: int,
    sums: int,
) -> None:
    """At most 16 left rows alone; memory is asked for the right matrix early."""
    if tiles:
        _few_in_tiles(left, left_stride, left_step, right, right_half, right_stride, right_step, steps, sums)
    else:
        _few_in_vectors(
            rows, left, left_stride, left_step, right, right_half, right_stride, right_step, steps, sums
        )
