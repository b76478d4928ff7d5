"""Compiled inner loops of the codecs: numbers in, numbers out, no wire, no frames. They run without the GIL.

Stored numbers are flat arrays: uint32 for the bits of float32, uint16 for those of bfloat16. A row is one vector (or a
few) all the way from load to store; LLVM cuts it into what the processor has.

Machine code is kept between runs in the user's cache directory. It is nobody's data and can be deleted at any time;
numba itself sees when this file, which is all that it comes from, has changed.
"""

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import platformdirs
from llvmlite import ir
from numba import int64, njit, types, uint8, uint16, uint32, void
from numba.extending import intrinsic

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: its reciprocal is still finite."""

_WORD = ir.IntType(32)
_SMALLEST = np.float32(SMALLEST_SCALE)
_LEVELS, _ONE, _ZERO = np.float32(127), np.float32(1), np.float32(0)
_NAN_SCALE, _NAN = np.uint32(0x7FC0), np.uint32(0x7FC00000)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_CEILING, _SIXTEEN, _BYTE = np.uint32(0xFFFF), np.uint32(16), np.uint32(8)


class Int8Kernels(NamedTuple):
    """``quantise(stored, dim, first_row, scales, levels)`` puts rows of ``dim`` numbers into rows ``first_row ...`` of
    the scales (the upper halves of float32) and levels. ``restore(scales, levels, dim, first_row, stored)`` is its
    reverse. What the numbers are is in ``int8_codec``."""

    quantise: Any
    restore: Any


class PlaneKernels(NamedTuple):
    """``split(stored, start, total, low, high)``: the bytes of the numbers ``start ...`` of ``total``, each number's
    highest byte to ``high`` and the others, a plane each, to ``low``. ``join`` is its reverse."""

    split: Any
    join: Any


def _cache_dir() -> Path:
    """Where machine code may be kept; a directory of this process alone where there is no home."""
    cache = Path(platformdirs.user_cache_dir("pdconsole")) / "kernels" / "transport"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pdconsole-kernels-"))


if not numba.config.CACHE_DIR:  # else whoever has set it may keep these, too
    numba.config.CACHE_DIR = str(_cache_dir())


def _array(number: Any, *, readonly: bool = False) -> Any:
    """Any memory will do: unaligned, too."""
    return types.Array(number, 1, "C", readonly=readonly, aligned=False)


def _compiled(signature: Any) -> Callable[[Any], Any]:
    decorate: Callable[[Any], Any] = njit(signature, nogil=True, cache=True)
    return decorate


@intrinsic(prefer_literal=True)
def _peak(typing_context: Any, width: Any, lanes: Any, stored: Any) -> Any:
    """The largest magnitude of ``lanes`` numbers, as the bits of a float32: these order like the magnitudes, infinity
    and NaN above all."""
    bytes_each, count = width.literal_value, lanes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        words = builder.and_(_load_words(builder, arguments[2], bytes_each, count), _words(count, 0x7FFFFFFF))
        reduce = _declared(builder, f"llvm.vector.reduce.umax.v{count}i32", [words.type], _WORD)
        return builder.call(reduce, [words])

    return types.uint32(width, lanes, types.int64), code


@intrinsic(prefer_literal=True)
def _quantise(typing_context: Any, width: Any, lanes: Any, stored: Any, inverse: Any, levels: Any) -> Any:
    """``lanes`` numbers times ``inverse``, to the nearest integers."""
    bytes_each, count = width.literal_value, lanes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, stored, inverse, levels = arguments
        floats = ir.VectorType(ir.FloatType(), count)
        numbers = builder.bitcast(_load_words(builder, stored, bytes_each, count), floats)
        scaled = builder.fmul(numbers, _spread(builder, inverse, count))
        # adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the lowest bits
        shifted = builder.bitcast(
            builder.fadd(scaled, ir.Constant(floats, [12582912.0] * count)), _word_vector(count)
        )
        _store(builder, builder.trunc(shifted, ir.VectorType(ir.IntType(8), count)), levels)
        return context.get_dummy_value()

    return types.void(width, lanes, types.int64, types.float32, types.int64), code


@intrinsic(prefer_literal=True)
def _restore(typing_context: Any, width: Any, lanes: Any, levels: Any, scale: Any, stored: Any) -> Any:
    """``lanes`` levels times ``scale``, to the nearest stored number, ties to even, never beyond the largest."""
    bytes_each, count = width.literal_value, lanes.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, levels, scale, stored = arguments
        floats = ir.VectorType(ir.FloatType(), count)
        integers = _load(builder, levels, ir.VectorType(ir.IntType(8), count))
        product = builder.fmul(builder.sitofp(integers, floats), _spread(builder, scale, count))
        words = builder.bitcast(product, _word_vector(count))
        infinity = 0x7F800000
        if bytes_each == 2:
            upper = _words(count, 16)
            odd = builder.and_(builder.lshr(words, upper), _words(count, 1))
            words = builder.lshr(builder.add(builder.add(words, odd), _words(count, 0x7FFF)), upper)
            infinity >>= 16
        magnitude = builder.and_(words, _words(count, 0x7FFFFFFF >> (32 - 8 * bytes_each)))
        is_infinite = builder.icmp_unsigned("==", magnitude, _words(count, infinity))
        words = builder.sub(words, builder.zext(is_infinite, words.type))
        if bytes_each == 2:
            words = builder.trunc(words, ir.VectorType(ir.IntType(16), count))
        _store(builder, words, stored)
        return context.get_dummy_value()

    return types.void(width, lanes, types.int64, types.float32, types.int64), code


@intrinsic
def _number_of(typing_context: Any, word: Any) -> Any:
    """The float32 of these bits."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


@intrinsic
def _bits_of(typing_context: Any, number: Any) -> Any:
    """The reverse of ``_number_of``."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _WORD)

    return types.uint32(types.float32), code


def _word_vector(count: int) -> Any:
    return ir.VectorType(_WORD, count)


def _words(count: int, value: int) -> Any:
    return ir.Constant(_word_vector(count), [value] * count)


def _spread(builder: ir.IRBuilder, scalar: Any, count: int) -> Any:
    one = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined), scalar, _WORD(0)
    )
    return builder.shuffle_vector(one, one, _words(count, 0))


def _load(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _load_words(builder: ir.IRBuilder, address: Any, width: int, count: int) -> Any:
    """Stored numbers as the bits of float32."""
    if width == 4:
        return _load(builder, address, _word_vector(count))
    halves = _load(builder, address, ir.VectorType(ir.IntType(16), count))
    return builder.shl(builder.zext(halves, _word_vector(count)), _words(count, 16))


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _declared(builder: ir.IRBuilder, name: str, arguments: list[Any], result: Any) -> Any:
    function = builder.module.globals.get(name)
    return function or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def lanes_of(dim: int) -> int:
    """How many numbers of a row of ``dim`` one step takes."""
    return math.gcd(dim, 64)


@functools.cache
def int8_kernels(width: int, lanes: int) -> Int8Kernels:
    """For numbers of ``width`` bytes (4: float32, 2: bfloat16) in rows of a multiple of ``lanes``; see ``lanes_of``."""
    stored_type = uint16 if width == 2 else uint32
    nan = np.uint32(_NAN if width == 4 else _NAN_SCALE)

    @_compiled(void(_array(stored_type, readonly=True), int64, int64, _array(uint16), _array(uint8)))
    def quantise(stored: Any, dim: Any, first_row: Any, scales: Any, levels: Any) -> None:
        place, out = stored.ctypes.data, levels.ctypes.data + first_row * dim
        for row in range(first_row, first_row + stored.size // dim):
            peak = _peak(width, lanes, place)
            for start in range(lanes, dim, lanes):
                peak = max(peak, _peak(width, lanes, place + start * width))
            half = _NAN_SCALE
            inverse = _ZERO
            if peak < _INFINITY:
                scale = max(_number_of(peak) / _LEVELS, _SMALLEST)
                half = (_bits_of(scale) + _CEILING) >> _SIXTEEN  # rounded up: no level beyond 127
                inverse = _ONE / _number_of(np.uint32(half << _SIXTEEN))
            scales[row] = half
            for start in range(0, dim, lanes):
                _quantise(width, lanes, place + start * width, inverse, out + start)
            place += dim * width
            out += dim

    @_compiled(
        void(_array(uint16, readonly=True), _array(uint8, readonly=True), int64, int64, _array(stored_type))
    )
    def restore(scales: Any, levels: Any, dim: Any, first_row: Any, stored: Any) -> None:
        place, out = levels.ctypes.data + first_row * dim, stored.ctypes.data
        for index in range(stored.size // dim):
            scale = np.uint32(np.uint32(scales[first_row + index]) << _SIXTEEN)
            if (scale & _MAGNITUDE) >= _INFINITY:
                stored[index * dim : (index + 1) * dim] = nan
            else:
                for start in range(0, dim, lanes):
                    _restore(width, lanes, place + start, _number_of(scale), out + start * width)
            place += dim
            out += dim * width

    return Int8Kernels(quantise, restore)


@functools.cache
def plane_kernels(width: int) -> PlaneKernels:
    """For numbers of ``width`` bytes, 2 or 4."""
    stored_type = uint16 if width == 2 else uint32

    @_compiled(void(_array(stored_type, readonly=True), int64, int64, _array(uint8), _array(uint8)))
    def split(stored: Any, start: Any, total: Any, low: Any, high: Any) -> None:
        count = stored.size
        for plane in range(width - 1):
            shift = np.uint32(plane) * _BYTE
            out = low[plane * total + start : plane * total + start + count]
            for i in range(count):
                out[i] = np.uint8(np.uint32(stored[i]) >> shift)
        top = np.uint32(width - 1) * _BYTE
        out = high[start : start + count]
        for i in range(count):
            out[i] = np.uint8(np.uint32(stored[i]) >> top)

    @_compiled(
        void(_array(uint8, readonly=True), _array(uint8, readonly=True), int64, int64, _array(stored_type))
    )
    def join(low: Any, high: Any, start: Any, total: Any, stored: Any) -> None:
        count = stored.size
        top = np.uint32(width - 1) * _BYTE
        part = high[start : start + count]
        for i in range(count):
            stored[i] = np.uint32(part[i]) << top
        for plane in range(width - 1):
            shift = np.uint32(plane) * _BYTE
            part = low[plane * total + start : plane * total + start + count]
            for i in range(count):
                stored[i] |= np.uint32(part[i]) << shift

    return PlaneKernels(split, join)
