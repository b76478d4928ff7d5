"""Matrix tiles of x86 processors with AMX: eight registers of 16 rows of 64 bytes, as calls inside compiled code.

Tile numbers are literals. ``multiply(c, a, b)`` adds to the 16 x 16 float32 in ``c`` the product of ``a``, 16 x 32
bfloat16 in row order, and ``b``, 32 x 16 bfloat16 with the rows interleaved in pairs (row 2p and 2p + 1 of a column
lie side by side in one 32-bit word of line p). Addresses are integers, strides are bytes.
"""

from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()

ROWS, PAIRS = 16, 16
"""Rows of a tile, and 32-bit words in a row."""


@cache
def is_available() -> bool:
    """True if this processor multiplies bfloat16 tiles and the system lets this process use them."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(torch.cpu._init_amx())


_PALETTE = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8])
"""The configuration in which all eight tiles are whole: bytes in a row, then rows, of each."""


def _call(builder: ir.IRBuilder, name: str, arguments: list[Any]) -> None:
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = ir.Function(module, kind, name)
    builder.call(function, arguments)


@intrinsic
def configure(typing_context: Any) -> Any:
    """Make all eight tiles whole; ``release`` when done. Only where ``is_available`` has returned True before."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        palette = context.insert_const_bytes(builder.module, _PALETTE, "amx_palette")
        _call(builder, "llvm.x86.ldtilecfg", [palette])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def release(typing_context: Any) -> Any:
    """Give the tiles back, so that a task switch need not save them."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic(prefer_literal=True)
def clear(typing_context: Any, tile: Any) -> Any:
    """Set a tile to zeros."""
    number = _BYTE(tile.literal_value)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilezero", [number])
        return context.get_dummy_value()

    return types.void(tile), code


@intrinsic(prefer_literal=True)
def load_tile(typing_context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Read 16 rows of 64 bytes, ``stride`` bytes apart."""
    return _memory_operation("llvm.x86.tileloadd64", tile)


@intrinsic(prefer_literal=True)
def store_tile(typing_context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write 16 rows of 64 bytes, ``stride`` bytes apart."""
    return _memory_operation("llvm.x86.tilestored64", tile)


def _memory_operation(name: str, tile: Any) -> Any:
    number = _BYTE(tile.literal_value)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = builder.inttoptr(arguments[1], _POINTER)
        _call(builder, name, [number, address, arguments[2]])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def multiply(typing_context: Any, c: Any, a: Any, b: Any) -> Any:
    """c += a @ b, summed in float32."""
    numbers = [_BYTE(tile.literal_value) for tile in (c, a, b)]

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tdpbf16ps", numbers)
        return context.get_dummy_value()

    return types.void(c, a, b), code
