"""INT8 on the wire: one float32 scale per (token, head) row, symmetric. The only module here that needs torch.

Wire form of a frame with R rows of D elements: R float32 scales, then R x D int8, in machine byte order like the
stored KV itself: R x (D + 4) bytes, so 0.53 of bfloat16 and 0.27 of float32 at D = 64.

    scale = max(amax(|row|) / 127, smallest normal float32)        q = round(x / scale)        x' = q * scale

Error: |x - x'| <= 0.5001 * scale for every element (half a step, plus float32 rounding of the two products), and then
the rounding of x' to the stored dtype (bfloat16: at most 2**-8 of |x'|; float16: 2**-11). A row that holds an
infinity or a NaN arrives with no finite element.

Rows are handled in tiles that stay in a core's second-level cache, each in a few in-place passes: over a whole tensor
the same passes run at memory speed several times over.
"""

from collections.abc import Sequence

import torch

from transport.codec import RowShape, require_bytes
from transport.errors import ProtocolError
from transport.iovec import IoVec

TILE_ELEMENTS = 64 * 1024  # float32: 256 KiB, and as much again for the absolute values
SCALE_BYTES = 4
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Int8Codec:
    name = "int8"
    is_identity = False

    def wire_bytes_range(self, shape: RowShape) -> tuple[int, int]:
        num_bytes = shape.num_rows * (shape.head_dim + SCALE_BYTES)
        return num_bytes, num_bytes

    def encode(self, views: Sequence[memoryview], shape: RowShape, wire: memoryview) -> int:
        """The views must be writable memory. Raises ProtocolError if they do not add up to the shape."""
        require_bytes(views, shape)
        runs = IoVec(views)
        scales, levels = _wire_tensors(wire, shape)
        tile = _Tile(shape)
        inverse = torch.empty((tile.max_rows, 1), dtype=torch.float32)
        magnitude = torch.empty_like(tile.values)
        for start in range(0, shape.num_rows, tile.max_rows):
            num_rows = min(tile.max_rows, shape.num_rows - start)
            x, a, inv = tile.values[:num_rows], magnitude[:num_rows], inverse[:num_rows]
            scale = scales[start : start + num_rows]
            x.copy_(tile.gather(runs, num_rows))
            torch.amax(torch.abs(x, out=a), dim=1, keepdim=True, out=scale)
            torch.reciprocal(scale.div_(127.0).clamp_(min=_SMALLEST_NORMAL), out=inv)
            levels[start : start + num_rows].copy_(x.mul_(inv).round_())
        return self.wire_bytes_range(shape)[0]

    def decode(self, wire: memoryview, shape: RowShape, views: Sequence[memoryview]) -> None:
        """Raises ProtocolError as ``encode`` does, and if the wire bytes are too few or too many."""
        if wire.nbytes != self.wire_bytes_range(shape)[0]:
            raise ProtocolError(
                f"int8 rows came as {wire.nbytes} bytes; due are {self.wire_bytes_range(shape)[0]}"
            )
        require_bytes(views, shape)
        runs = IoVec(views)
        scales, levels = _wire_tensors(wire, shape)
        tile = _Tile(shape)
        for start in range(0, shape.num_rows, tile.max_rows):
            num_rows = min(tile.max_rows, shape.num_rows - start)
            x = tile.values[:num_rows]
            x.copy_(levels[start : start + num_rows]).mul_(scales[start : start + num_rows])
            tile.scatter(x, runs, num_rows)


class _Tile:
    """Some rows in cache: ``values`` (rows, D) in float32, and room for the same rows as stored.

    A run that holds a whole tile is used where it lies; shorter runs (single blocks) are put together first,
    because one numeric call on 6 KiB costs more than copying it.
    """

    def __init__(self, shape: RowShape) -> None:
        self.max_rows = max(1, min(shape.num_rows, TILE_ELEMENTS // shape.head_dim))
        self.values = torch.empty((self.max_rows, shape.head_dim), dtype=torch.float32)
        self._dtype = _DTYPES[shape.dtype]
        self._head_dim = shape.head_dim
        self._row_bytes = shape.raw_bytes // shape.num_rows
        self._stored = memoryview(bytearray(self.max_rows * self._row_bytes))

    def gather(self, runs: IoVec, num_rows: int) -> torch.Tensor:
        """The next rows as stored, (rows, D)."""
        pieces = runs.advance(num_rows * self._row_bytes)
        if len(pieces) == 1:
            return self._rows(pieces[0])
        position = 0
        for piece in pieces:
            self._stored[position : position + piece.nbytes] = piece
            position += piece.nbytes
        return self._rows(self._stored[:position])

    def scatter(self, values: torch.Tensor, runs: IoVec, num_rows: int) -> None:
        """Stores (rows, D) values into the next rows."""
        pieces = runs.advance(num_rows * self._row_bytes)
        if len(pieces) == 1:
            self._rows(pieces[0]).copy_(values)
            return
        self._rows(self._stored[: num_rows * self._row_bytes]).copy_(values)
        position = 0
        for piece in pieces:
            piece[:] = self._stored[position : position + piece.nbytes]
            position += piece.nbytes

    def _rows(self, run: memoryview) -> torch.Tensor:
        return torch.frombuffer(run, dtype=self._dtype).view(-1, self._head_dim)


def _wire_tensors(wire: memoryview, shape: RowShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (R, 1) and levels (R, D) over the wire bytes."""
    scales = torch.frombuffer(wire, dtype=torch.float32, count=shape.num_rows)
    num_levels = shape.num_rows * shape.head_dim
    levels = torch.frombuffer(wire, dtype=torch.int8, count=num_levels, offset=SCALE_BYTES * shape.num_rows)
    return scales.view(-1, 1), levels.view(-1, shape.head_dim)
