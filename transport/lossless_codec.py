"""Lossless on the wire: the highest byte of every number compressed with Zstandard, the others as they are.

A number's highest byte is its sign and (most of) its exponent: in real KV these repeat and take about 0.35 of their
bytes. The bytes of the mantissa are noise that no compressor shortens by more than a few per cent, at twice the time,
so they travel plain. That makes about 0.67 of bfloat16 and 0.84 of float32.

Wire form of a frame with N numbers of W bytes: W - 1 planes of N bytes, those of the lowest bytes first; then the
plane of the highest bytes as one Zstandard frame that states its content size, or plain where that is not shorter.

What comes from the wire is not believed: a frame must state exactly N bytes of content before a byte of room is made
for it, its window may not be larger, it may need no dictionary, and nothing may follow it.
"""

import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from transport.codec import RowShape, require_bytes
from transport.codec_kernels import plane_kernels
from transport.errors import CompressionError, ProtocolError
from transport.messages import DTYPE_BYTES
from transport.row_tiles import stored_tiles, tiles_to_store

LEVEL = 1
_SMALLEST_WINDOW_BYTES = 1024  # the format knows none below
_ARRAY_TYPES = {2: np.uint16, 4: np.uint32}


class _Contexts(threading.local):
    """One of each per thread: neither may be used by two at once, and making one costs as much as a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


class LosslessCodec:
    name = "lossless"
    is_identity = False

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def wire_bytes_range(self, shape: RowShape) -> tuple[int, int]:
        """From a single byte for all the highest ones to none saved."""
        if not shape.raw_bytes:
            return 0, 0
        return shape.raw_bytes - _plane_bytes(shape) + 1, shape.raw_bytes

    def encode(self, views: Sequence[memoryview], shape: RowShape, wire: memoryview) -> int:
        """Raises ProtocolError if the views do not add up to the shape."""
        require_bytes(views, shape)
        width, total = DTYPE_BYTES[shape.dtype], _plane_bytes(shape)
        low = np.frombuffer(wire, np.uint8, count=(width - 1) * total)
        high = np.empty(total, np.uint8)
        split = plane_kernels(width).split
        for first_row, stored in stored_tiles(views, shape):
            numbers = np.frombuffer(stored, _ARRAY_TYPES[width])
            split(numbers, first_row * shape.head_dim, total, low, high)
        compressed: bytes | memoryview = self._contexts.compressor.compress(high.data)
        if len(compressed) >= total:
            compressed = high.data
        end = low.size + len(compressed)
        wire[low.size : end] = compressed
        return int(end)

    def decode(self, wire: memoryview, shape: RowShape, views: Sequence[memoryview]) -> None:
        """Raises ProtocolError as ``encode`` does and for a length that cannot be, and CompressionError for highest
        bytes that do not decompress to exactly what is due. The views may be half-filled then."""
        fewest, most = self.wire_bytes_range(shape)
        if not fewest <= wire.nbytes <= most:
            raise ProtocolError(f"lossless rows came as {wire.nbytes} bytes; due are {fewest} to {most}")
        require_bytes(views, shape)
        width, total = DTYPE_BYTES[shape.dtype], _plane_bytes(shape)
        low = np.frombuffer(wire, np.uint8, count=(width - 1) * total)
        plane = wire[low.size :]
        high = np.frombuffer(plane if plane.nbytes == total else self._decompress(plane, total), np.uint8)
        join = plane_kernels(width).join
        for first_row, room in tiles_to_store(views, shape):
            join(low, high, first_row * shape.head_dim, total, np.frombuffer(room, _ARRAY_TYPES[width]))

    def _decompress(self, plane: memoryview, num_bytes: int) -> bytes:
        try:
            frame = zstandard.get_frame_parameters(plane)
            if frame.content_size != num_bytes:
                stated = (
                    "no size" if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN else frame.content_size
                )
                raise CompressionError(f"a compressed plane states {stated}; due are {num_bytes} bytes")
            if frame.window_size > max(num_bytes, _SMALLEST_WINDOW_BYTES) or frame.dict_id:
                raise CompressionError(
                    f"a compressed plane wants a window of {frame.window_size} bytes and dictionary "
                    f"{frame.dict_id}; allowed are {num_bytes} bytes and none"
                )
            content = self._contexts.decompressor.decompress(
                plane, max_output_size=num_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise CompressionError(
                f"a compressed plane of {plane.nbytes} bytes is damaged: {error}"
            ) from None
        if len(content) != num_bytes:
            raise CompressionError(f"a compressed plane holds {len(content)} bytes; due are {num_bytes}")
        return content


def _plane_bytes(shape: RowShape) -> int:
    """One byte of every number."""
    return shape.num_rows * shape.head_dim
