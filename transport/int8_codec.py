"""INT8 on the wire: one scale per (token, head) row, symmetric. Compiled; runs without the GIL.

Wire form of a frame with R rows of D elements: R scales, each the upper half of a float32 (a bfloat16), then R x D
int8, in machine byte order like the stored KV itself: R x (D + 2) bytes, so of bfloat16 0.508 at D = 128, 0.516 at
D = 64 and 0.531 at D = 32.

    scale = max(amax(|row|) / 127, 2**-126), rounded up to 8 significant bits
    level = round(x / scale), ties to even, so -127 ... 127        x' = level * scale

Error: |x - x'| <= 0.5001 * scale for every element (half a step, plus float32 rounding of the two products), where
scale <= max(amax(|row|) / 127 * (1 + 2**-7), 2**-126), and then the rounding of x' to the stored dtype (bfloat16: at
most 2**-8 of |x'|; float16: 2**-11).

- A row of zeros arrives as zeros; -0 as 0.
- A row whose numbers all are below 2**-127 (denormal) arrives as zeros, which the bound allows.
- A row that holds an infinity or a NaN arrives as NaN in every element: its scale is NaN.
- Where x' would be beyond the stored dtype's largest number, it is that number: nothing finite becomes infinite.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.codec import RowShape, require_bytes
from transport.codec_kernels import int8_kernels, lanes_of
from transport.errors import ProtocolError
from transport.row_tiles import stored_tiles, tiles_to_store

SCALE_BYTES = 2
_FLOAT16_MAX = np.float32(65504)
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 4}
"""Bytes of a number as the kernels see it: float16 is converted to float32 first."""


class Int8Codec:
    name = "int8"
    is_identity = False

    def wire_bytes_range(self, shape: RowShape) -> tuple[int, int]:
        num_bytes = shape.num_rows * (shape.head_dim + SCALE_BYTES)
        return num_bytes, num_bytes

    def encode(self, views: Sequence[memoryview], shape: RowShape, wire: memoryview) -> int:
        """Raises ProtocolError if the views do not add up to the shape."""
        require_bytes(views, shape)
        scales, levels = _wire_arrays(wire, shape)
        quantise = int8_kernels(_WIDTHS[shape.dtype], lanes_of(shape.head_dim)).quantise
        for first_row, stored in stored_tiles(views, shape):
            quantise(_numbers(stored, shape.dtype), shape.head_dim, first_row, scales, levels)
        return self.wire_bytes_range(shape)[0]

    def decode(self, wire: memoryview, shape: RowShape, views: Sequence[memoryview]) -> None:
        """Raises ProtocolError as ``encode`` does, and if the wire bytes are too few or too many."""
        if wire.nbytes != self.wire_bytes_range(shape)[0]:
            raise ProtocolError(
                f"int8 rows came as {wire.nbytes} bytes; due are {self.wire_bytes_range(shape)[0]}"
            )
        require_bytes(views, shape)
        scales, levels = _wire_arrays(wire, shape)
        restore = int8_kernels(_WIDTHS[shape.dtype], lanes_of(shape.head_dim)).restore
        for first_row, room in tiles_to_store(views, shape):
            if shape.dtype == "float16":
                stored = np.frombuffer(room, np.float16)
                numbers = np.empty(stored.size, np.float32)
                restore(scales, levels, shape.head_dim, first_row, numbers.view(np.uint32))
                stored[:] = np.clip(numbers, -_FLOAT16_MAX, _FLOAT16_MAX)
            else:
                restore(scales, levels, shape.head_dim, first_row, _numbers(room, shape.dtype))


def _numbers(stored: bytes | memoryview, dtype: str) -> Any:
    """Stored rows as the kernels take them: flat; a view but for float16."""
    if dtype == "float16":
        return np.frombuffer(stored, np.float16).astype(np.float32).view(np.uint32)
    return np.frombuffer(stored, np.uint32 if dtype == "float32" else np.uint16)


def _wire_arrays(wire: memoryview, shape: RowShape) -> tuple[Any, Any]:
    """Scales (R,) and levels (R x D,) over the wire bytes."""
    scales = np.frombuffer(wire, np.uint16, count=shape.num_rows)
    levels = np.frombuffer(
        wire, np.uint8, count=shape.num_rows * shape.head_dim, offset=SCALE_BYTES * shape.num_rows
    )
    return scales, levels
