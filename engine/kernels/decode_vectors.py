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
    pairs: Any,
    queries: Any,
    keys: Any,
    stride: Any,
    count: Any,
    scores: Any,
) -> Any:
    """Scores of ``group`` queries (group, head_dim) and ``count`` keys ``stride`` bytes apart, in lines of 16.

    ``group``, ``head_dim`` (a multiple of 32), ``number_bytes`` of a stored key (2 or 4) and ``pairs`` are literals.
    Queries are float32; with ``pairs`` they and the keys are bfloat16, multiplied two by two.
    """
    members, width = group.literal_value, number_bytes.literal_value
    in_pairs = bool(pairs.literal_value)
    words = head_dim.literal_value // (2 if in_pairs else 1)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, _, _, queries, keys, stride, count, scores = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, count) as loop:
            key = builder.add(keys, builder.mul(stride, loop.index))
            line = emit.offset(scores, loop.index, 4 * LANES)
            totals: list[Any] = [emit.constant(0.0)] * members
            for first in range(0, words, LANES):
                part = (
                    emit.load(builder.add(key, WORD(first * 4)))
                    if in_pairs
                    else emit.load_numbers(builder.add(key, WORD(first * width)), width)
                )
                for member in range(members):
                    query = emit.load(builder.add(queries, WORD((member * words + first) * 4)))
                    totals[member] = emit.multiply_add(query, part, totals[member], in_pairs)
            for member, total in enumerate(totals):
                score = emit.sum(total)
                place = builder.add(line, WORD(4 * member))
                builder.store(score, builder.inttoptr(place, FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    addresses = (types.int64,) * 5
    return types.void(group, head_dim, number_bytes, pairs, *addresses), code


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
        slots = _load_sums(emit, members, size, sums)
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(values, builder.mul(stride, loop.index))
            line = emit.offset(weights, loop.index, 4 * LANES)
            spread = _spread_weights(emit, members, line)
            for first in range(0, size, LANES):
                part = emit.load_numbers(builder.add(row, WORD(first * width)), width)
                if first * width % 64 == 0:
                    emit.prefetch(builder.add(builder.add(row, ahead), WORD(first * width)))
                for member in range(members):
                    slot = slots[member, first]
                    builder.store(emit.fused(spread[member], part, builder.load(slot)), slot)
        _store_sums(emit, slots, size, sums)
        return context.get_dummy_value()

    words = (types.int64,) * 6
    return types.void(group, head_dim, number_bytes, *words), code


@intrinsic(prefer_literal=True)
def add_value_pairs(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    weights: Any,
    values: Any,
    stride: Any,
    count: Any,
    sums: Any,
    ahead: Any,
) -> Any:
    """``add_values`` of bfloat16, two keys at a time, with weights rounded to bfloat16.

    An odd last value is taken with the one in its own place; the line of weights behind the last must be zeros.
    """
    members, size = group.literal_value, head_dim.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, weights, values, stride, count, sums, ahead = arguments
        emit = Emitter(builder)
        slots = _load_sums(emit, members, size, sums)
        words = cgutils.alloca_once(builder, FLOATS)
        last = builder.sub(count, WORD(1))
        with cgutils.for_range(builder, builder.lshr(builder.add(count, WORD(1)), WORD(1))) as loop:
            index = builder.mul(loop.index, WORD(2))
            following = builder.add(index, WORD(1))
            following = builder.select(builder.icmp_signed("<", following, last), following, last)
            low, high = (builder.add(values, builder.mul(stride, each)) for each in (index, following))
            line = emit.offset(weights, index, 4 * LANES)
            pair = emit.paired(emit.load(line), emit.load(builder.add(line, WORD(4 * LANES))))
            builder.store(builder.bitcast(pair, FLOATS), words)
            spread = _spread_weights(emit, members, builder.ptrtoint(words, WORD))
            for first in range(0, size, LANES):
                one, other = (builder.add(each, WORD(first * 2)) for each in (low, high))
                part = builder.bitcast(emit.interleaved(one, other), FLOATS)
                if first * 2 % 64 == 0:
                    emit.prefetch(builder.add(one, ahead))
                    emit.prefetch(builder.add(other, ahead))
                for member in range(members):
                    slot = slots[member, first]
                    builder.store(emit.multiply_add(spread[member], part, builder.load(slot), True), slot)
        _store_sums(emit, slots, size, sums)
        return context.get_dummy_value()

    return types.void(group, head_dim, *(types.int64,) * 6), code


def _load_sums(emit: Emitter, members: int, size: int, sums: Any) -> dict[tuple[int, int], Any]:
    """Sums (members, size) in vectors of their own, by member and first number."""
    slots = {}
    for member in range(members):
        for first in range(0, size, LANES):
            slot = slots[member, first] = cgutils.alloca_once(emit.builder, FLOATS)
            place = emit.builder.add(sums, WORD((member * size + first) * 4))
            emit.builder.store(emit.load(place), slot)
    return slots


def _store_sums(emit: Emitter, slots: dict[tuple[int, int], Any], size: int, sums: Any) -> None:
    for (member, first), slot in slots.items():
        place = emit.builder.add(sums, WORD((member * size + first) * 4))
        emit.store(emit.builder.load(slot), place)


def _spread_weights(emit: Emitter, members: int, line: Any) -> list[Any]:
    """The first ``members`` 32-bit words of a line, each in all lanes of a vector."""
    return [emit.spread_from(emit.builder.add(line, WORD(4 * member))) for member in range(members)]


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
