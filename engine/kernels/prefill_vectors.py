"""Vector loops of prefill attention, as calls inside compiled code: matrices of 32 columns of float32.

Addresses are integers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.emitter import INT, LANES, WORD, Emitter
from engine.kernels.products import COLUMNS
from engine.kernels.products import LINE_BYTES as _LINE


@intrinsic
def soften(
    typing_context: Any,
    scores: Any,
    count: Any,
    scale: Any,
    maximum: Any,
    total: Any,
    factor: Any,
    weights: Any,
) -> Any:
    """Scores (count, 32) to weights 2**(scale * score - maximum) as bfloat16, two lines to one of 32-bit words.

    ``count`` is a multiple of 4. Updates the running ``maximum`` (32,) of scaled scores and ``total`` (32,) of weights;
    ``factor`` (32,) becomes what everything summed before must be multiplied with.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, count, scale, maximum, total, factor, weights = arguments
        emit = Emitter(builder)
        scales = emit.spread(scale)
        quarter = builder.lshr(count, WORD(2))
        for byte in (0, LANES * 4):
            place = WORD(byte)
            before = emit.load(builder.add(maximum, place))
            slots = [cgutils.alloca_once_value(builder, emit.constant(-1e30)) for _ in range(4)]
            for slot in slots:
                builder.store(emit.constant(-1e30), slot)
            with cgutils.for_range(builder, quarter) as loop:
                line = emit.offset(builder.add(scores, place), loop.index, 4 * _LINE)
                for index, slot in enumerate(slots):
                    score = emit.load(builder.add(line, WORD(index * _LINE)))
                    builder.store(emit.larger(score, builder.load(slot)), slot)
            largest = emit.larger(
                emit.larger(builder.load(slots[0]), builder.load(slots[1])),
                emit.larger(builder.load(slots[2]), builder.load(slots[3])),
            )
            top = emit.larger(builder.fmul(largest, scales), before)
            emit.store(top, builder.add(maximum, place))
            shrink = emit.exp2(builder.fsub(before, top))
            emit.store(shrink, builder.add(factor, place))
            sums = [cgutils.alloca_once_value(builder, emit.constant(0.0)) for _ in range(2)]
            builder.store(builder.fmul(emit.load(builder.add(total, place)), shrink), sums[0])
            builder.store(emit.constant(0.0), sums[1])
            lowered = builder.fneg(top)
            with cgutils.for_range(builder, quarter) as loop:
                line = emit.offset(builder.add(scores, place), loop.index, 4 * _LINE)
                target = emit.offset(builder.add(weights, place), loop.index, 2 * _LINE)
                for pair in (0, 1):
                    exponentials = [
                        emit.exp2(
                            emit.fused(emit.load(builder.add(line, WORD(row * _LINE))), scales, lowered),
                            coarse=True,
                        )
                        for row in (2 * pair, 2 * pair + 1)
                    ]
                    added = builder.fadd(exponentials[0], exponentials[1])
                    builder.store(builder.fadd(builder.load(sums[pair]), added), sums[pair])
                    emit.store(emit.paired(*exponentials), builder.add(target, WORD(pair * _LINE)))
            emit.store(builder.fadd(builder.load(sums[0]), builder.load(sums[1])), builder.add(total, place))
        return context.get_dummy_value()

    return types.void(
        types.int64, types.int64, types.float32, types.int64, types.int64, types.int64, types.int64
    ), code


@intrinsic
def rescale(typing_context: Any, matrix: Any, lines: Any, factor: Any) -> Any:
    """Multiply every line of a (lines, 32) matrix by ``factor`` (32,)."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        matrix, lines, factor = arguments
        emit = Emitter(builder)
        factors = [emit.load(builder.add(factor, WORD(byte))) for byte in (0, LANES * 4)]
        with cgutils.for_range(builder, lines) as loop:
            line = emit.offset(matrix, loop.index, _LINE)
            for byte, value in zip((0, LANES * 4), factors, strict=True):
                place = builder.add(line, WORD(byte))
                emit.store(builder.fmul(emit.load(place), value), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def transpose_pairs(
    typing_context: Any, values: Any, stride: Any, head_dim: Any, out: Any, out_stride: Any
) -> Any:
    """Two neighbouring lines of ``head_dim`` bfloat16 to one column of 32-bit words, ``out_stride`` bytes apart."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, stride, head_dim, out, out_stride = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, builder.lshr(head_dim, WORD(4))) as loop:
            low = emit.offset(values, loop.index, LANES * 2)
            words = emit.interleaved(low, builder.add(low, stride))
            target = builder.add(out, builder.mul(builder.mul(loop.index, WORD(LANES)), out_stride))
            for lane in range(LANES):
                place = builder.inttoptr(target, INT.as_pointer())
                builder.store(builder.extract_element(words, INT(lane)), place, align=4)
                target = builder.add(target, out_stride)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), code


@intrinsic
def write_columns(typing_context: Any, matrix: Any, lines: Any, factors: Any, places: Any) -> Any:
    """Columns of a (lines, 32) matrix, times ``factors`` (32,), as ``lines`` bfloat16 at 32 addresses (int64)."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        matrix, lines, factors, places = arguments
        emit = Emitter(builder)
        for half in (0, 1):
            scale = emit.load(builder.add(factors, WORD(half * LANES * 4)))
            targets = []
            for lane in range(LANES):
                place = builder.add(places, WORD((half * LANES + lane) * 8))
                targets.append(builder.load(builder.inttoptr(place, WORD.as_pointer())))
            with cgutils.for_range(builder, builder.lshr(lines, WORD(1))) as loop:
                line = emit.offset(builder.add(matrix, WORD(half * LANES * 4)), loop.index, 2 * _LINE)
                low = builder.fmul(emit.load(line), scale)
                high = builder.fmul(emit.load(builder.add(line, WORD(_LINE))), scale)
                words = emit.paired(low, high)
                for lane, target in enumerate(targets):
                    place = builder.inttoptr(emit.offset(target, loop.index, 4), INT.as_pointer())
                    builder.store(builder.extract_element(words, INT(lane)), place, align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), code


@intrinsic
def gather_columns(typing_context: Any, places: Any, lines: Any, matrix: Any) -> Any:
    """``lines`` 32-bit words at each of 32 addresses (int64) as the columns of a matrix."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        places, lines, matrix = arguments
        emit = Emitter(builder)
        for lane in range(COLUMNS):
            place = builder.add(places, WORD(lane * 8))
            source = builder.load(builder.inttoptr(place, WORD.as_pointer()))
            column = builder.add(matrix, WORD(lane * 4))
            with cgutils.for_range(builder, lines) as loop:
                word = builder.load(
                    builder.inttoptr(emit.offset(source, loop.index, 4), INT.as_pointer()), align=4
                )
                target = builder.inttoptr(emit.offset(column, loop.index, _LINE), INT.as_pointer())
                builder.store(word, target, align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), code
