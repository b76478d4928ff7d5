"""Frames: how bytes on a connection are cut into messages. Knows no socket and no message content.

One frame, network byte order::

    magic "PDKV" | version u8 | type u8 | flags u16 | transfer id u64 | payload bytes u32 | payload XXH3-64 u64
    | header checksum u32 (low half of the XXH3-64 of the 28 bytes before it) | payload

The payload of a DATA frame opens with a ``DataSlice`` of 16 bytes (layer u32, kv u8, 3 zero bytes, start token
u32, number of tokens u32) that says which part of the cache follows; the payload checksum covers it. A header that
fails its checks is a ``FramingError``: nothing after it can be trusted. A payload that fails its checksum is a
``ChecksumError``: the next frame is still where the header said.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum

import xxhash

from transport.errors import ChecksumError, FramingError, ProtocolError, TruncatedTransfer

MAGIC = b"PDKV"
PROTOCOL_VERSION = 1
MAX_DATA_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_CONTROL_PAYLOAD_BYTES = 64 * 1024

_FIELDS = struct.Struct("!4sBBHQIQ")
_CHECK = struct.Struct("!I")
_SLICE = struct.Struct("!IB3xII")
_DIGEST_PART = struct.Struct("!Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
SLICE_BYTES = _SLICE.size


class FrameType(IntEnum):
    AUTH_HELLO = 1
    AUTH_CHALLENGE = 2
    AUTH_RESPONSE = 3
    AUTH_OK = 4
    OPEN = 16  # sender -> receiver: KVHeader
    ACCEPT = 17  # receiver -> sender: KVAccept, room is reserved
    REJECT = 18  # receiver -> sender: KVReject
    DATA = 19  # sender -> receiver: DataSlice and KV bytes
    COMMIT = 20  # sender -> receiver: KVCommit
    ACK = 21  # receiver -> sender: KVAck, everything verified
    FAIL = 22  # receiver -> sender: KVFailure, the transfer is lost
    ABORT = 23  # sender -> receiver: KVFailure, the transfer is given up
    PING = 32  # probe: payload is discarded
    PONG = 33  # answer to a PING


_BULK_TYPES = frozenset({FrameType.DATA, FrameType.PING})


class NeedData(Enum):
    NEED_DATA = "NEED_DATA"


NEED_DATA = NeedData.NEED_DATA


@dataclass(frozen=True, slots=True)
class FrameHeader:
    type: FrameType
    transfer_id: int
    payload_bytes: int
    checksum: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    type: FrameType
    transfer_id: int
    payload: bytes = b""
    flags: int = 0


@dataclass(frozen=True, slots=True)
class DataSlice:
    """Which part of the cache a DATA frame carries: some tokens of one layer's keys (kv 0) or values (kv 1)."""

    layer: int
    kv: int
    start_token: int
    num_tokens: int

    @property
    def end_token(self) -> int:
        return self.start_token + self.num_tokens


def payload_checksum(parts: Iterable[bytes | memoryview]) -> int:
    """XXH3-64 of the parts as if they were one string of bytes; copies nothing."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


class TransferDigest:
    """XXH3-64 over the checksums of a transfer's DATA frames in the order of the wire."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def update(self, checksum: int) -> None:
        self._hasher.update(_DIGEST_PART.pack(checksum))

    def value(self) -> int:
        return self._hasher.intdigest()


def max_payload_bytes(frame_type: FrameType) -> int:
    return MAX_DATA_PAYLOAD_BYTES if frame_type in _BULK_TYPES else MAX_CONTROL_PAYLOAD_BYTES


def encode_header(header: FrameHeader) -> bytes:
    """The 32 bytes before a payload. Raises ProtocolError if the payload is larger than its type may be."""
    limit = max_payload_bytes(header.type)
    if header.payload_bytes > limit:
        raise ProtocolError(
            f"{header.type.name} payload is {header.payload_bytes} bytes; allowed is at most {limit}"
        )
    fields = _FIELDS.pack(
        MAGIC,
        PROTOCOL_VERSION,
        header.type,
        header.flags,
        header.transfer_id,
        header.payload_bytes,
        header.checksum,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF)


def decode_header(raw: bytes | bytearray | memoryview) -> FrameHeader:
    """Checks and unpacks exactly ``HEADER_BYTES`` bytes.

    Raises FramingError for a bad magic, version, header checksum, type or length, in this order.
    """
    fields = bytes(raw[: _FIELDS.size])
    magic, version, type_number, flags, transfer_id, payload_bytes, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise FramingError(f"frame starts with {magic!r}; allowed is {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise FramingError(f"protocol version is {version}; ours is {PROTOCOL_VERSION}")
    (check,) = _CHECK.unpack(raw[_FIELDS.size : HEADER_BYTES])
    if check != xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF:
        raise FramingError("frame header is damaged: its checksum does not match")
    try:
        frame_type = FrameType(type_number)
    except ValueError:
        raise FramingError(f"frame type {type_number} is unknown") from None
    limit = max_payload_bytes(frame_type)
    if payload_bytes > limit:
        raise FramingError(f"{frame_type.name} payload is {payload_bytes} bytes; allowed is at most {limit}")
    return FrameHeader(frame_type, transfer_id, payload_bytes, checksum, flags)


def encode_frame(frame: Frame) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(frame.payload)
    header = FrameHeader(frame.type, frame.transfer_id, len(frame.payload), checksum, frame.flags)
    return encode_header(header) + frame.payload


def encode_slice(part: DataSlice) -> bytes:
    return _SLICE.pack(part.layer, part.kv, part.start_token, part.num_tokens)


def decode_slice(raw: bytes | bytearray | memoryview) -> DataSlice:
    return DataSlice(*_SLICE.unpack(raw[:SLICE_BYTES]))


class FrameDecoder:
    """Bytes in, whole frames out. Copies payloads, so it serves control traffic and the v1 path."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: FrameHeader | None = None
        self._framing_error: FramingError | None = None

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_frame(self) -> Frame | NeedData:
        """The next whole frame, or NEED_DATA.

        Raises FramingError (and then always again) or ChecksumError (once; the damaged frame is skipped).
        """
        if self._framing_error is not None:
            raise self._framing_error
        if self._header is None:
            if len(self._buffer) < HEADER_BYTES:
                return NEED_DATA
            try:
                self._header = decode_header(self._buffer)
            except FramingError as error:
                self._framing_error = error
                raise
        header = self._header
        end = HEADER_BYTES + header.payload_bytes
        if len(self._buffer) < end:
            return NEED_DATA
        payload = bytes(memoryview(self._buffer)[HEADER_BYTES:end])
        del self._buffer[:end]
        self._header = None
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            raise ChecksumError(f"{header.type.name} payload of transfer {header.transfer_id} is damaged")
        return Frame(header.type, header.transfer_id, payload, header.flags)

    def receive_eof(self) -> None:
        """Call at end of stream. Raises TruncatedTransfer if a frame has begun and not ended."""
        if self._buffer:
            raise TruncatedTransfer(f"the stream ended inside a frame, after {len(self._buffer)} bytes of it")
