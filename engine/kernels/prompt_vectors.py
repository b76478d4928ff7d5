"""Vector loops of prompt attention, as calls inside compiled code: scores of two lines of 16 columns for each key.

Addresses are integers. A word is a float32, or two bfloat16 where ``pairs`` is true; sums are those of
``decode_vectors``, bit for bit.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.emitter import FLOATS, LANES, WORD, Emitter

_LINE = 4 * LANES


@intrinsic(prefer_literal=True)
def dot_columns(
    typing_context: Any,
    words: Any,
    pairs: Any,
    lines: Any,
    queries: Any,
    keys: Any,
    count: Any,
    scores: Any,
    plane_bytes: Any,
) -> Any:
    """Scores of ``lines`` lines of 16 query columns and ``count`` keys, an even number.

    ``queries``: (words, lines, 16) words; ``keys``: (count, words); ``scores``: for each line of columns a plane of
    (count, 16) float32, ``plane_bytes`` apart. ``words`` (a multiple of 16), ``pairs`` and ``lines`` are literals.
    """
    in_pairs, width, num_lines = bool(pairs.literal_value), words.literal_value, lines.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, _, queries, keys, count, scores, plane_bytes = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, builder.lshr(count, WORD(1))) as loop:
            first = emit.offset(keys, loop.index, 2 * width * 4)

            def lane(number: int) -> list[Any]:
                """The products of every sixteenth word, from this one on: two keys of each line."""
                totals: list[Any] = [emit.constant(0.0)] * (2 * num_lines)
                for word in range(number, width, LANES):
                    spread = [
                        emit.spread_from(builder.add(first, WORD((key * width + word) * 4))) for key in (0, 1)
                    ]
                    for line in range(num_lines):
                        query = emit.load(builder.add(queries, WORD((word * num_lines + line) * _LINE)))
                        for key in (0, 1):
                            at = 2 * line + key
                            totals[at] = emit.multiply_add(query, spread[key], totals[at], in_pairs)
                return totals

            for index, total in enumerate(emit.summed(lane)):
                plane = builder.add(scores, builder.mul(plane_bytes, WORD(index // 2)))
                emit.store(
                    total, builder.add(emit.offset(plane, loop.index, 2 * _LINE), WORD(index % 2 * _LINE))
                )
        return context.get_dummy_value()

    return types.void(words, pairs, lines, *(types.int64,) * 5), code


@intrinsic(prefer_literal=True)
def add_columns(
    typing_context: Any,
    columns: Any,
    head_dim: Any,
    pairs: Any,
    weights: Any,
    values: Any,
    count: Any,
    sums: Any,
) -> Any:
    """sums (columns, head_dim) += weights transposed @ values, for ``count`` lines of words.

    ``weights``: lines of 16 words, of which the first ``columns`` are taken; ``values``: (count, head_dim) words.
    ``columns``, ``head_dim`` and ``pairs`` are literals.
    """
    members, size, in_pairs = columns.literal_value, head_dim.literal_value, bool(pairs.literal_value)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, _, weights, values, count, sums = arguments
        emit = Emitter(builder)
        places = [(member, first) for member in range(members) for first in range(0, size, LANES)]
        slots = [cgutils.alloca_once(builder, FLOATS) for _ in places]
        addresses = [builder.add(sums, WORD((member * size + first) * 4)) for member, first in places]
        for slot, address in zip(slots, addresses, strict=True):
            builder.store(emit.load(address), slot)
        with cgutils.for_range(builder, count) as loop:
            line = emit.offset(weights, loop.index, _LINE)
            row = emit.offset(values, loop.index, size * 4)
            parts = {first: emit.load(builder.add(row, WORD(first * 4))) for first in range(0, size, LANES)}
            spread = [emit.spread_from(builder.add(line, WORD(4 * member))) for member in range(members)]
            for slot, (member, first) in zip(slots, places, strict=True):
                total = emit.multiply_add(spread[member], parts[first], builder.load(slot), in_pairs)
                builder.store(total, slot)
        for slot, address in zip(slots, addresses, strict=True):
            emit.store(builder.load(slot), address)
        return context.get_dummy_value()

    return types.void(columns, head_dim, pairs, *(types.int64,) * 4), code


@intrinsic
def pair_lines(typing_context: Any, lines: Any, count: Any, out: Any) -> Any:
    """``count`` times two lines of 16 float32 to one of words: both rounded to bfloat16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lines, count, out = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, count) as loop:
            line = emit.offset(lines, loop.index, 2 * _LINE)
            words = emit.paired(emit.load(line), emit.load(builder.add(line, WORD(_LINE))))
            emit.store(words, emit.offset(out, loop.index, _LINE))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), code


@intrinsic
def interleave(typing_context: Any, low: Any, high: Any, count: Any, out: Any) -> Any:
    """``count`` bfloat16, a multiple of 16, at each of two addresses as words."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        low, high, count, out = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, builder.lshr(count, WORD(4))) as loop:
            one, other = (emit.offset(each, loop.index, 2 * LANES) for each in (low, high))
            emit.store(emit.interleaved(one, other), emit.offset(out, loop.index, _LINE))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), code
