"""Cuts a stream into frames while letting DATA land where it belongs. Knows no socket and no transfer.

``buffers()`` says where the next bytes go and never reaches past the part of the frame that is due, so ``received()``
yields at most one thing. The checksum is computed over each piece as it comes, while it is still in the CPU's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from transport.errors import FramingError
from transport.frame import (
    HEADER_BYTES,
    SLICE_BYTES,
    DataSlice,
    FrameHeader,
    FrameType,
    decode_header,
    decode_slice,
)
from transport.iovec import IoVec

WASTE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class SliceArrived:
    """A DATA frame began. Call ``direct`` before the next ``buffers``, or its bytes go to waste."""

    header: FrameHeader
    part: DataSlice
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A frame is whole. ``payload`` is that of a control frame; DATA is where it was directed, PING is gone."""

    header: FrameHeader
    payload: bytes
    is_intact: bool


class FrameReader:
    def __init__(self) -> None:
        self._waste = memoryview(bytearray(WASTE_BYTES))
        self._header: FrameHeader | None = None
        self._part: DataSlice | None = None
        self._control: bytearray | None = None
        self._due: bytearray | None = None  # header or slice, while they are incomplete
        self._target: IoVec | None = None  # None: the rest of the frame goes to waste
        self._remaining_bytes = 0  # of the frame's payload
        self._hasher = xxhash.xxh3_64()
        self._expect(HEADER_BYTES)

    @property
    def is_inside_frame(self) -> bool:
        """Part of a frame has arrived and more of it is due."""
        return self._header is not None or (
            self._target is not None and self._target.remaining_bytes < HEADER_BYTES
        )

    @property
    def body_bytes_due(self) -> int:
        """What is still to come of a DATA frame's KV; 0 anywhere else."""
        return self._remaining_bytes if self._part is not None else 0

    def buffers(self) -> list[memoryview]:
        if self._target is not None:
            return self._target.head()
        return [self._waste[: min(self._remaining_bytes, WASTE_BYTES)]]

    def received(self, num_bytes: int) -> SliceArrived | FrameArrived | None:
        """``num_bytes`` have been put into ``buffers()``. Raises FramingError."""
        pieces = [self._waste[:num_bytes]] if self._target is None else self._target.advance(num_bytes)
        if self._header is not None:
            self._remaining_bytes -= num_bytes
            for piece in pieces:
                self._hasher.update(piece)
        if self._target is not None and self._target.remaining_bytes:
            return None
        if self._header is None:
            return self._header_arrived()
        if self._header.type is FrameType.DATA and self._part is None and self._due is not None:
            self._part = decode_slice(self._due)
            self._due = self._target = None
            if self._remaining_bytes:
                return SliceArrived(self._header, self._part, self._remaining_bytes)
        return None if self._remaining_bytes else self._frame_arrived(self._header)

    def direct(self, views: Sequence[memoryview]) -> None:
        """The rest of the present DATA frame goes into these views, which must have exactly its size."""
        target = IoVec(views)
        if target.num_bytes != self._remaining_bytes:
            raise ValueError(
                f"the views hold {target.num_bytes} bytes; the frame has {self._remaining_bytes}"
            )
        self._target = target

    def discard_rest(self) -> None:
        """Lets go of the views given to ``direct``; what is still due of the frame goes to waste."""
        if self._part is not None:
            self._target = None

    def _expect(self, num_bytes: int) -> None:
        self._due = bytearray(num_bytes)
        self._target = IoVec([self._due])

    def _header_arrived(self) -> FrameArrived | None:
        header = decode_header(self._due or b"")
        self._header, self._due, self._target = header, None, None
        self._remaining_bytes = header.payload_bytes
        self._hasher = xxhash.xxh3_64()
        if header.type is FrameType.DATA:
            if header.payload_bytes <= SLICE_BYTES:
                raise FramingError(
                    f"DATA payload is {header.payload_bytes} bytes; allowed is above {SLICE_BYTES}"
                )
            self._expect(SLICE_BYTES)
        elif header.type is not FrameType.PING and header.payload_bytes:
            self._control = bytearray(header.payload_bytes)
            self._target = IoVec([self._control])
        return None if header.payload_bytes else self._frame_arrived(header)

    def _frame_arrived(self, header: FrameHeader) -> FrameArrived:
        payload = b"" if self._control is None else bytes(self._control)
        self._header = self._part = self._control = None
        self._expect(HEADER_BYTES)
        return FrameArrived(header, payload, self._hasher.intdigest() == header.checksum)
