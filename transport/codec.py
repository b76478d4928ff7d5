"""How KV rows look on the wire. This module holds the interface and ``raw``; it needs no numeric library.

A codec is stateless and turns one DATA frame's rows into wire bytes and back. Rows are (token, head) vectors of
``head_dim`` elements, in the order in which the views list them.

| codec | wire bytes per row | error |
|---|---|---|
| raw | head_dim x dtype bytes | none, bitwise |
| int8 (``int8_codec``) | head_dim + 2 | at most half a scale per element, see there |
| lossless (``lossless_codec``) | depends on the numbers, at most as raw | none, bitwise |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transport.errors import ProtocolError, UnknownCodec
from transport.messages import DTYPE_BYTES, KVContract


@dataclass(frozen=True, slots=True)
class RowShape:
    """What is in one DATA frame: ``num_rows`` vectors of ``head_dim`` elements of ``dtype``."""

    num_rows: int
    head_dim: int
    dtype: str

    @property
    def raw_bytes(self) -> int:
        return self.num_rows * self.head_dim * DTYPE_BYTES[self.dtype]


def row_shape(contract: KVContract, num_tokens: int) -> RowShape:
    return RowShape(num_tokens * contract.num_kv_heads, contract.head_dim, contract.dtype)


class Codec(Protocol):
    """``is_identity`` says that wire bytes are the stored bytes, so that they may move without this codec."""

    @property
    def name(self) -> str: ...

    @property
    def is_identity(self) -> bool: ...

    def wire_bytes_range(self, shape: RowShape) -> tuple[int, int]:
        """Fewest and most wire bytes for these rows; equal for codecs of fixed rate."""

    def encode(self, views: Sequence[memoryview], shape: RowShape, wire: memoryview) -> int:
        """Writes the wire form into ``wire`` (at least the most bytes long); returns the bytes written."""

    def decode(self, wire: memoryview, shape: RowShape, views: Sequence[memoryview]) -> None:
        """Fills the views. Raises ProtocolError if the wire bytes cannot be of this shape."""


LOSSY_CODECS = frozenset({"int8"})
"""Names of those whose decoded rows differ from what was encoded."""


class RawCodec:
    """Stored bytes as they are. ``encode`` and ``decode`` copy; the v2 path never calls them."""

    name = "raw"
    is_identity = True

    def wire_bytes_range(self, shape: RowShape) -> tuple[int, int]:
        return shape.raw_bytes, shape.raw_bytes

    def encode(self, views: Sequence[memoryview], shape: RowShape, wire: memoryview) -> int:
        require_bytes(views, shape)
        position = 0
        for view in views:
            wire[position : position + view.nbytes] = view.cast("B")
            position += view.nbytes
        return position

    def decode(self, wire: memoryview, shape: RowShape, views: Sequence[memoryview]) -> None:
        require_bytes(views, shape)
        if wire.nbytes != shape.raw_bytes:
            raise ProtocolError(f"raw rows came as {wire.nbytes} bytes; due are {shape.raw_bytes}")
        position = 0
        for view in views:
            view.cast("B")[:] = wire[position : position + view.nbytes]
            position += view.nbytes


def require_bytes(views: Sequence[memoryview], shape: RowShape) -> None:
    """Raises ProtocolError unless the views hold exactly the rows."""
    num_bytes = sum(view.nbytes for view in views)
    if num_bytes != shape.raw_bytes:
        raise ProtocolError(f"{shape.num_rows} rows are {shape.raw_bytes} bytes; the views hold {num_bytes}")


def find_codec(name: str, codecs: Sequence[Codec]) -> Codec:
    """Raises UnknownCodec naming those that are allowed."""
    for codec in codecs:
        if codec.name == name:
            return codec
    raise UnknownCodec(name, [codec.name for codec in codecs])
