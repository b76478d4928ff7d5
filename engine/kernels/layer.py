"""What a decoder layer does between its matrix products, each in one pass over memory.

Arrays are flat: float32 (``width`` 4), or uint16 that stand for bfloat16 (``width`` 2). Rounding follows the usual
bfloat16 implementation step by step (Hugging Face transformers): what that stores in bfloat16 between two operations is
rounded here as well.
"""

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.emitter import FLOAT, FLOATS, LANES, WORD, Emitter

_MINUS_LOG2_E = -1.4426950408889634


class LayerKernels(NamedTuple):
    """The three functions for one width of numbers; their docstrings are in ``layer_kernels``."""

    normalise: Any
    silu_multiply: Any
    rotate_and_write: Any


@intrinsic(prefer_literal=True)
def _normalise_row(
    typing_context: Any, width: Any, source: Any, addend: Any, weight: Any, out: Any, size: Any, epsilon: Any
) -> Any:
    """out = norm(source) * weight of one row; with an ``addend`` (0 for none) it is added to ``source`` first."""
    bytes_each = width.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, source, addend, weight, out, size, epsilon = arguments
        emit = Emitter(builder)
        chunks = builder.lshr(size, WORD(4))
        squares = cgutils.alloca_once(builder, FLOATS)
        builder.store(emit.constant(0.0), squares)
        adds = builder.icmp_signed("!=", addend, WORD(0))
        with builder.if_then(adds), cgutils.for_range(builder, chunks) as loop:
            place = emit.offset(source, loop.index, LANES * bytes_each)
            other = emit.offset(addend, loop.index, LANES * bytes_each)
            both = builder.fadd(emit.load_numbers(place, bytes_each), emit.load_numbers(other, bytes_each))
            emit.store_numbers(both, place, bytes_each)
        with cgutils.for_range(builder, chunks) as loop:
            value = emit.load_numbers(emit.offset(source, loop.index, LANES * bytes_each), bytes_each)
            builder.store(emit.fused(value, value, builder.load(squares)), squares)
        mean = builder.fdiv(emit.sum(builder.load(squares)), builder.sitofp(size, FLOAT))
        root = builder.call(emit.declared("llvm.sqrt.f32", [FLOAT], FLOAT), [builder.fadd(mean, epsilon)])
        factor = emit.spread(builder.fdiv(FLOAT(1.0), root))
        with cgutils.for_range(builder, chunks) as loop:
            value = emit.load_numbers(emit.offset(source, loop.index, LANES * bytes_each), bytes_each)
            normal = emit.rounded(builder.fmul(value, factor), bytes_each)
            scale = emit.load_numbers(emit.offset(weight, loop.index, LANES * bytes_each), bytes_each)
            emit.store_numbers(
                builder.fmul(normal, scale), emit.offset(out, loop.index, LANES * bytes_each), bytes_each
            )
        return context.get_dummy_value()

    return types.void(width, *(types.int64,) * 5, types.float32), code


@intrinsic(prefer_literal=True)
def _silu_row(typing_context: Any, width: Any, gate: Any, up: Any, out: Any, size: Any) -> Any:
    """out = silu(gate) * up of one row."""
    bytes_each = width.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, gate, up, out, size = arguments
        emit = Emitter(builder)
        with cgutils.for_range(builder, builder.lshr(size, WORD(4))) as loop:
            x = emit.load_numbers(emit.offset(gate, loop.index, LANES * bytes_each), bytes_each)
            power = emit.smaller(builder.fmul(x, emit.constant(_MINUS_LOG2_E)), emit.constant(126.0))
            grown = builder.fadd(emit.constant(1.0), emit.exp2(power))
            silu = emit.rounded(builder.fdiv(x, grown), bytes_each)
            other = emit.load_numbers(emit.offset(up, loop.index, LANES * bytes_each), bytes_each)
            emit.store_numbers(
                builder.fmul(silu, other), emit.offset(out, loop.index, LANES * bytes_each), bytes_each
            )
        return context.get_dummy_value()

    return types.void(width, *(types.int64,) * 4), code


@intrinsic(prefer_literal=True)
def _rotate_head(
    typing_context: Any, width: Any, source: Any, cos: Any, sin: Any, half: Any, out: Any
) -> Any:
    """Rotary position of one head: element i is paired with element i + half."""
    bytes_each = width.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, source, cos, sin, half, out = arguments
        emit = Emitter(builder)
        distance = builder.mul(half, WORD(bytes_each))
        with cgutils.for_range(builder, builder.lshr(half, WORD(4))) as loop:
            low, angle_cos, angle_sin, target = (
                emit.offset(address, loop.index, LANES * bytes_each) for address in (source, cos, sin, out)
            )
            first = emit.load_numbers(low, bytes_each)
            second = emit.load_numbers(builder.add(low, distance), bytes_each)
            c, s = emit.load_numbers(angle_cos, bytes_each), emit.load_numbers(angle_sin, bytes_each)
            parts = [
                emit.rounded(builder.fmul(a, b), bytes_each)
                for a, b in ((first, c), (second, s), (second, c), (first, s))
            ]
            emit.store_numbers(builder.fsub(parts[0], parts[1]), target, bytes_each)
            emit.store_numbers(builder.fadd(parts[2], parts[3]), builder.add(target, distance), bytes_each)
        return context.get_dummy_value()

    return types.void(width, *(types.int64,) * 5), code


@cache
def layer_kernels(width: int) -> LayerKernels:
    """The functions for numbers of ``width`` bytes (4: float32, 2: bfloat16); every size is a multiple of 16."""

    @njit(nogil=True, cache=True)
    def normalise(hidden: Any, addend: Any, weight: Any, epsilon: Any, out: Any) -> None:
        """RMS norm of every row of ``hidden`` (n, size) to ``out``; ``weight`` (size,).

        With an ``addend`` like ``hidden`` (empty for none), ``hidden += addend`` first.
        """
        size = weight.shape[0]
        other = addend.ctypes.data if addend.shape[0] else 0
        for row in range(hidden.shape[0] // size):
            place = row * size * width
            added = other + place if other else 0
            _normalise_row(
                width,
                hidden.ctypes.data + place,
                added,
                weight.ctypes.data,
                out.ctypes.data + place,
                size,
                epsilon,
            )

    @njit(nogil=True, cache=True)
    def silu_multiply(gate_up: Any, size: int, out: Any) -> None:
        """silu(gate) * up of rows (gate, up), each ``size`` long, to ``out`` (n, size)."""
        for row in range(out.shape[0] // size):
            gate = gate_up.ctypes.data + 2 * row * size * width
            _silu_row(width, gate, gate + size * width, out.ctypes.data + row * size * width, size)

    @njit(nogil=True, cache=True)
    def rotate_and_write(
        qkv: Any,
        cos: Any,
        sin: Any,
        positions: Any,
        slots: Any,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Any,
        k_norm: Any,
        epsilon: Any,
        queries: Any,
        keys: Any,
        values: Any,
    ) -> None:
        """Split rows of ``qkv`` (n, (num_heads + 2 * num_kv_heads) * head_dim); positions in; K and V to the cache.

        ``cos``, ``sin``: (max_positions, head_dim / 2); ``positions``, ``slots``: (n,) int64; ``q_norm``, ``k_norm``:
        (head_dim,), or empty for a model without; ``queries``: (n, num_heads, head_dim); ``keys``, ``values``: one
        layer's (num_slots, num_kv_heads, head_dim). Changes ``qkv``.
        """
        half, head_bytes = head_dim // 2, head_dim * width
        for index in range(positions.shape[0]):
            source = qkv.ctypes.data + index * (num_heads + 2 * num_kv_heads) * head_bytes
            angle = positions[index] * half * width
            target = queries.ctypes.data + index * num_heads * head_bytes
            slot = slots[index] * num_kv_heads * head_bytes
            for head in range(num_heads + num_kv_heads):
                if q_norm.shape[0]:
                    weight = q_norm.ctypes.data if head < num_heads else k_norm.ctypes.data
                    _normalise_row(width, source, 0, weight, source, head_dim, epsilon)
                if head == num_heads:
                    target = keys.ctypes.data + slot
                _rotate_head(width, source, cos.ctypes.data + angle, sin.ctypes.data + angle, half, target)
                source += head_bytes
                target += head_bytes
            first = (index + 1) * (num_heads + 2 * num_kv_heads) * head_dim - num_kv_heads * head_dim
            place = slots[index] * num_kv_heads * head_dim
            values[place : place + num_kv_heads * head_dim] = qkv[first : first + num_kv_heads * head_dim]

    return LayerKernels(normalise, silu_multiply, rotate_and_write)
