"""Vector instructions for compiled code, sixteen float32 at a time; numbers in memory are float32 or bfloat16.

Used where a loop in Python is not turned into such code by itself. Addresses are integers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import binding, ir

LANES = 16
INT, WORD, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
_BFLOATS, PAIRS_OF_BFLOATS = (ir.VectorType(BFLOAT, count) for count in (LANES, 2 * LANES))
_EXP2 = (1.00000007, 0.69314697, 0.2402212, 0.05550713, 0.00967554, 0.00132765)
_COARSE_EXP2 = (0.99992807, 0.693261, 0.24261111, 0.05517157)
"""Polynomials of 2**f for f in [-0.5, 0.5], lowest power first, fitted for the smallest relative error."""


@cache
def converts_to_bfloat16() -> bool:
    """True if this processor has AVX512-BF16."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


class Emitter:
    """Emits vector instructions at the builder's place."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(FLOATS, [value] * LANES)

    def integer(self, value: int) -> ir.Constant:
        return ir.Constant(INTS, [value] * LANES)

    def spread(self, scalar: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(FLOATS, ir.Undefined), scalar, INT(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))

    def spread_word(self, word: Any) -> Any:
        """One 32-bit word sixteen times."""
        one = self.builder.insert_element(ir.Constant(INTS, ir.Undefined), word, INT(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))

    def multiply_add(self, a: Any, b: Any, total: Any, pairs: bool) -> Any:
        """``total`` + a * b of float32; ``pairs``: of both halves of 32-bit words of bfloat16, one after the other."""
        if not pairs:
            return self.fused(a, b, total)
        return self.dot_pairs(total, *(self.builder.bitcast(each, PAIRS_OF_BFLOATS) for each in (a, b)))

    def dot_pairs(self, sums: Any, a: Any, b: Any) -> Any:
        """sums + the product of each pair of bfloat16 of ``a`` and ``b`` (32 each), by AVX512-BF16."""
        function = self.declared("llvm.x86.avx512bf16.dpbf16ps.512", [FLOATS, a.type, b.type], FLOATS)
        return self.builder.call(function, [sums, a, b])

    def spread_from(self, address: Any) -> Any:
        """The 32-bit word at an address in all lanes."""
        return self.spread(self.builder.load(self.builder.inttoptr(address, FLOAT.as_pointer()), align=4))

    def load(self, address: Any, kind: Any = FLOATS) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        function = self.declared("llvm.fma.v16f32", [FLOATS] * 3, FLOATS)
        return self.builder.call(function, [a, b, c])

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def exp2(self, x: Any, *, coarse: bool = False) -> Any:
        """2**x for -126 <= x < 127, below as at -126; within 3e-7 of its value.

        ``coarse``: within 8e-5, for what becomes bfloat16.
        """
        b = self.builder
        x = self.larger(x, self.constant(-126.0))
        magic = self.constant(12582912.0)  # adding 1.5 * 2**23 leaves the nearest integer in the lowest bits
        shifted = b.fadd(x, magic)
        fraction = b.fsub(x, b.fsub(shifted, magic))
        polynomial = _COARSE_EXP2 if coarse else _EXP2
        power: Any = self.constant(polynomial[-1])
        for coefficient in reversed(polynomial[:-1]):
            power = self.fused(power, fraction, self.constant(coefficient))
        exponent = b.shl(b.bitcast(shifted, INTS), self.integer(23))
        return b.bitcast(b.add(b.bitcast(power, INTS), exponent), FLOATS)

    def load_numbers(self, address: Any, width: int) -> Any:
        """Sixteen stored numbers, ``width`` bytes each (2: bfloat16), as float32."""
        if width == 4:
            return self.load(address)
        words = self.builder.zext(self.load(address, _HALVES), INTS)
        return self.builder.bitcast(self.builder.shl(words, self.integer(16)), FLOATS)

    def interleaved(self, low: Any, high: Any) -> Any:
        """Sixteen bfloat16 at each of two addresses as 32-bit words, those of ``low`` in the lower halves."""
        lower, upper = (self.builder.zext(self.load(address, _HALVES), INTS) for address in (low, high))
        return self.builder.or_(self.builder.shl(upper, self.integer(16)), lower)

    def store_numbers(self, value: Any, address: Any, width: int) -> None:
        """The reverse of ``load_numbers``; rounded to the nearest, ties to even."""
        if width == 2:
            value = self._halves(value)
        self.store(value, address)

    def rounded(self, value: Any, width: int) -> Any:
        """What ``load_numbers`` would give after ``store_numbers``."""
        if width == 4:
            return value
        words = self.builder.zext(self._halves(value), INTS)
        return self.builder.bitcast(self.builder.shl(words, self.integer(16)), FLOATS)

    def prefetch(self, address: Any) -> None:
        """Ask memory for a cache line, without waiting."""
        pointer = ir.IntType(8).as_pointer()
        function = self.declared("llvm.prefetch.p0", [pointer, INT, INT, INT], ir.VoidType())
        arguments = [
            self.builder.inttoptr(address, pointer),
            INT(0),
            INT(3),
            INT(1),
        ]  # to read, keep close, data
        self.builder.call(function, arguments)

    def sum(self, value: Any) -> Any:
        """The sixteen added up: half to half, until one is left."""
        count = LANES
        while count > 1:
            count //= 2
            kind = ir.VectorType(INT, count)
            low, high = (ir.Constant(kind, list(range(first, first + count))) for first in (0, count))
            value = self.builder.fadd(
                self.builder.shuffle_vector(value, value, low),
                self.builder.shuffle_vector(value, value, high),
            )
        return self.builder.extract_element(value, INT(0))

    def summed(self, lane: Callable[[int], Sequence[Any]], first: int = 0, step: int = 1) -> list[Any]:
        """What ``sum`` gives, bit for bit, of vectors whose lane l is in ``lane(l)``: several sums side by side."""
        if step == LANES:
            return list(lane(first))
        halves = (self.summed(lane, at, 2 * step) for at in (first, first + step))
        return [self.builder.fadd(one, other) for one, other in zip(*halves, strict=True)]

    def offset(self, address: Any, count: Any, size: int) -> Any:
        """``address + count * size``."""
        return self.builder.add(address, self.builder.mul(count, WORD(size)))

    def _halves(self, value: Any) -> Any:
        """Float32 as the bits of the nearest bfloat16, ties to even."""
        b = self.builder
        if converts_to_bfloat16():
            return b.bitcast(b.fptrunc(value, _BFLOATS), _HALVES)
        bits = b.bitcast(value, INTS)  # the conversion would be a call of a function that is not there
        odd = b.and_(b.lshr(bits, self.integer(16)), self.integer(1))
        rounded = b.add(bits, b.add(odd, self.integer(0x7FFF)))
        return b.trunc(b.lshr(rounded, self.integer(16)), _HALVES)

    def paired(self, low: Any, high: Any) -> Any:
        """Two vectors, rounded to bfloat16, as the lower and upper halves of 32-bit words."""
        b = self.builder
        half, mask = self.integer(0x8000), self.integer(-65536)
        lower = b.lshr(b.add(b.bitcast(low, INTS), half), self.integer(16))
        return b.or_(b.and_(b.add(b.bitcast(high, INTS), half), mask), lower)

    def declared(self, name: str, arguments: list[Any], result: Any) -> Any:
        module = self.builder.module
        function = module.globals.get(name)
        return function or ir.Function(module, ir.FunctionType(result, arguments), name)
