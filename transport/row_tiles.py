"""Rows that lie in many short runs, handed to numeric code in pieces worth a call. Copies only what is in pieces.

A run that holds a whole tile is used where it lies; shorter runs (single blocks) are put together first, because one
numeric call on 6 KiB costs more than copying it.
"""

from collections.abc import Iterator, Sequence

from transport.codec import RowShape
from transport.iovec import IoVec

TILE_BYTES = 256 * 1024
"""Of stored rows at once: they stay in a core's second-level cache."""


def stored_tiles(views: Sequence[memoryview], shape: RowShape) -> Iterator[tuple[int, bytes | memoryview]]:
    """(first row, its and the following rows' bytes), to be read before the next one is asked for."""
    runs = IoVec(views)
    for first_row, num_bytes in _tiles(shape):
        pieces = runs.advance(num_bytes)
        yield first_row, pieces[0] if len(pieces) == 1 else b"".join(pieces)


def tiles_to_store(views: Sequence[memoryview], shape: RowShape) -> Iterator[tuple[int, memoryview]]:
    """(first row, room for its and the following rows' bytes), to be filled before the next one is asked for."""
    runs = IoVec(views)
    room = memoryview(bytearray())
    for first_row, num_bytes in _tiles(shape):
        pieces = runs.advance(num_bytes)
        if len(pieces) == 1:
            yield first_row, pieces[0]
            continue
        if room.nbytes < num_bytes:
            room = memoryview(bytearray(num_bytes))
        yield first_row, room[:num_bytes]
        position = 0
        for piece in pieces:
            piece[:] = room[position : position + piece.nbytes]
            position += piece.nbytes


def _tiles(shape: RowShape) -> Iterator[tuple[int, int]]:
    """(first row, bytes) of each tile."""
    if not shape.num_rows:
        return
    row_bytes = shape.raw_bytes // shape.num_rows
    step = max(1, TILE_BYTES // row_bytes)
    for first_row in range(0, shape.num_rows, step):
        yield first_row, min(step, shape.num_rows - first_row) * row_bytes
