"""Vector loops of decode attention, as calls inside compiled code: scores in lines of 16 float32, one per key.

Addresses are integers; keys and values are float32 or bfloat16.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.emitter import FLOAT, FLOATS, LANES, WORD, Emitter


@intrinsic(prefer_literal=True)
def to_floats(typing_context: Any, number_bytes: Any, numbers: Any, count: Any, out: Any) -> Any:
    """``count`` stored numbers, a multiple of 16, as float32."""
    width = number_bytes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, numbers, count, out = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, builder.lshr(count, WORD(4))) as loop:
            part = emit.load_numbers(emit.offset(numbers, loop.index, LANES * width), width)
            emit.store(part, emit.offset(out, loop.index, LANES * 4))
        return context.get_dummy_value()

    return types.void(number_bytes, *(types.int64,) * 3), code


@intrinsic(prefer_literal=True)
def write_scaled(
    typing_context: Any, number_bytes: Any, floats: Any, factor: Any, count: Any, out: Any
) -> Any:
    """``count`` float32, a multiple of 16, times ``factor`` as stored numbers."""
    width = number_bytes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, floats, factor, count, out = arguments
        emit = Emitter(builder)
        factors = emit.spread(factor)
        with cgutils.for_range(builder, builder.lshr(count, WORD(4))) as loop:
            part = builder.fmul(emit.load(emit.offset(floats, loop.index, LANES * 4)), factors)
            emit.store_numbers(part, emit.offset(out, loop.index, LANES * width), width)
        return context.get_dummy_value()

    return types.void(number_bytes, types.int64, types.float32, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def dot_keys(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    number_bytes: Any,
    queries: Any,
    keys: Any,
    stride: Any,
    count: Any,
    scores: Any,
) -> Any:
    """Scores of ``group`` queries (group, head_dim) float32 and ``count`` keys ``stride`` bytes apart, in lines of 16.

    ``group``, ``head_dim`` (a multiple of 16) and ``number_bytes`` of a stored key (2 or 4) are literals.
    """
    members, size, width = group.literal_value, head_dim.literal_value, number_bytes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, _, queries, keys, stride, count, scores = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, count) as loop:
            key = builder.add(keys, builder.mul(stride, loop.index))
            line = emit.offset(scores, loop.index, 4 * LANES)
            totals: list[Any] = [emit.constant(0.0)] * members
            for first in range(0, size, LANES):
                part = emit.load_numbers(builder.add(key, WORD(first * width)), width)
                for member in range(members):
                    query = emit.load(builder.add(queries, WORD((member * size + first) * 4)))
                    totals[member] = emit.fused(query, part, totals[member])
            for member, total in enumerate(totals):
                score = emit.sum(total)
                place = builder.add(line, WORD(4 * member))
                builder.store(score, builder.inttoptr(place, FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    words = (types.int64,) * 5
    return types.void(group, head_dim, number_bytes, *words), code


@intrinsic(prefer_literal=True)
def add_values(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    number_bytes: Any,
    weights: Any,
    values: Any,
    stride: Any,
    count: Any,
    sums: Any,
    ahead: Any,
) -> Any:
    """sums (group, head_dim) += weights transposed @ ``count`` values ``stride`` bytes apart.

    Weights lie in lines of 16. What lies ``ahead`` bytes behind each value is asked for from memory.
    """
    members, size, width = group.literal_value, head_dim.literal_value, number_bytes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, _, weights, values, stride, count, sums, ahead = arguments
        emit = Emitter(builder)
        places = [(member, first) for member in range(members) for first in range(0, size, LANES)]
        slots = {place: cgutils.alloca_once(builder, FLOATS) for place in places}
        for (member, first), slot in slots.items():
            builder.store(emit.load(builder.add(sums, WORD((member * size + first) * 4))), slot)
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(values, builder.mul(stride, loop.index))
            line = emit.offset(weights, loop.index, 4 * LANES)
            spread = []
            for member in range(members):
                place = builder.inttoptr(builder.add(line, WORD(4 * member)), FLOAT.as_pointer())
                spread.append(emit.spread(builder.load(place, align=4)))
            for first in range(0, size, LANES):
                part = emit.load_numbers(builder.add(row, WORD(first * width)), width)
                if first * width % 64 == 0:
                    emit.prefetch(builder.add(builder.add(row, ahead), WORD(first * width)))
                for member in range(members):
                    slot = slots[member, first]
                    builder.store(emit.fused(spread[member], part, builder.load(slot)), slot)
        for (member, first), slot in slots.items():
            emit.store(builder.load(slot), builder.add(sums, WORD((member * size + first) * 4)))
        return context.get_dummy_value()

    words = (types.int64,) * 6
    return types.void(group, head_dim, number_bytes, *words), code


@intrinsic
def prefetch(typing_context: Any, address: Any, lines: Any, stride: Any) -> Any:
    """Ask memory for ``lines`` cache lines, ``stride`` bytes apart, without waiting."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        start, lines, stride = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, lines) as loop:
            emit.prefetch(builder.add(start, builder.mul(loop.index, stride)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def weigh(typing_context: Any, scores: Any, count: Any, scale: Any, total: Any) -> Any:
    """Scores in ``count`` lines of 16 to weights 2**(scale * (score - largest of its column)).

    ``total`` (16,) becomes the sums of the weights.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, count, scale, total = arguments
        emit = Emitter(builder)
        scales = emit.spread(scale)
        slot = cgutils.alloca_once(builder, FLOATS)
        builder.store(emit.load(scores), slot)
        with cgutils.for_range(builder, count) as loop:
            line = emit.offset(scores, loop.index, 4 * LANES)
            builder.store(emit.larger(emit.load(line), builder.load(slot)), slot)
        lowered = builder.fneg(builder.fmul(builder.load(slot), scales))
        builder.store(emit.constant(0.0), slot)
        with cgutils.for_range(builder, count) as loop:
            line = emit.offset(scores, loop.index, 4 * LANES)
            weights = emit.exp2(emit.fused(emit.load(line), scales, lowered))
            emit.store(weights, line)
            builder.store(builder.fadd(builder.load(slot), weights), slot)
        emit.store(builder.load(slot), total)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), code
