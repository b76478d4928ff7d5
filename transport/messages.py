"""What the control frames of a transfer say. Typed payloads, encoded with MessagePack; no sockets, no state.

| frame | payload |
|---|---|
| OPEN | ``KVHeader`` |
| ACCEPT | ``KVAccept`` |
| REJECT | ``KVReject`` |
| COMMIT | ``KVCommit`` |
| ACK | ``KVAck`` |
| FAIL, ABORT | ``KVFailure`` |
| PONG | ``Pong`` |
"""

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import msgspec

from transport.errors import MismatchError, ProtocolError, StartTokenError

SCHEMA_VERSION = 3
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Dimension = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Detail = Annotated[str, msgspec.Meta(max_length=4096)]


class RejectReason(StrEnum):
    """Why a receiver refuses a transfer before any of its data is sent."""

    MISMATCH = "mismatch"  # field, ours and theirs say what differs
    FULL = "full"  # no blocks free for prompt and output
    UNKNOWN_REQUEST = "unknown_request"
    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # the receiving side did not decide in time
    CLOSING = "closing"
    PROTOCOL = "protocol"


class FailReason(StrEnum):
    """Why a transfer that had begun did not complete."""

    ABORTED = "aborted"  # the sending side gave it up
    CANCELLED = "cancelled"  # the receiving side gave it up
    CHECKSUM = "checksum"
    PROTOCOL = "protocol"  # wrong order, counts or digest
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"  # the stream ended in the middle
    PEER_CLOSED = "peer_closed"
    AUTH = "auth"
    REFUSED = "refused"  # verified, but the receiving side would not admit it
    CLOSED = "closed"  # this side shut down


class KVContract(msgspec.Struct, frozen=True, kw_only=True):
    """What both ends must agree on exactly before a byte of KV may move, and each one's own ``block_size``.

    Block sizes may differ: what moves is tokens, and in ``layout`` a token's row is one run of bytes.
    """

    model_fingerprint: Name
    num_layers: Dimension
    num_kv_heads: Dimension
    head_dim: Dimension
    dtype: Literal["float32", "bfloat16", "float16"]
    block_size: Dimension
    layout: Name
    schema_version: int = SCHEMA_VERSION

    @property
    def row_bytes(self) -> int:
        """Bytes of one (token, head) row as stored."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer's keys (or values) as stored."""
        return self.num_kv_heads * self.row_bytes


class KVHeader(KVContract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Opens a transfer: whose KV it is, its shape, and how it will travel."""

    request_id: Name
    attempt: Count
    num_tokens: Positive
    codec: Name = "raw"
    path: Literal["v1", "v2"] = "v2"

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tokens as stored: 2 x layers x tokens x heads x head_dim x dtype bytes."""
        return self.raw_bytes_from(0)

    def raw_bytes_from(self, start_token: int) -> int:
        """Bytes of the tokens from ``start_token`` on as stored: what is due once the receiver has said that."""
        return 2 * self.num_layers * (self.num_tokens - start_token) * self.token_bytes


class KVAccept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room is reserved, and the receiver holds the KV of the first ``start_token`` tokens already: they stay away.

    ``start_token`` is whole blocks of the receiver and below ``num_tokens``, so that there is always something to
    send and to commit. It decodes whatever its value; ``check_start_token`` judges it.
    """

    start_token: int
    block_size: Dimension  # the receiver's


def check_start_token(start_token: int, block_size: int, num_tokens: int) -> None:
    """Raises StartTokenError unless a receiver with blocks of this size can hold so many of ``num_tokens``."""
    most = (num_tokens - 1) // block_size * block_size
    if not 0 <= start_token <= most or start_token % block_size:
        raise StartTokenError(start_token, block_size, most)


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill knows at its end. ``seed`` and ``output_position`` are the whole state of the sampler."""

    first_token_id: Count
    seed: Count
    output_position: Count
    prefill_started_at: float  # time.monotonic() of the sender's host
    prefill_done_at: float


class KVCommit(PrefillResult, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closes a transfer: the prefill's result, and what the receiver must have seen."""

    start_token: Count  # as the ACCEPT said; all below is about the tokens from there on
    num_frames: Count
    payload_bytes: Count  # KV bytes on the wire, without frame headers and slices
    raw_bytes: Count  # the same KV as stored
    digest: Annotated[int, msgspec.Meta(ge=0)]  # TransferDigest of all DATA frames


class KVAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receiver has verified and admitted the transfer. Times are time.monotonic() of the receiver's host."""

    received_at: float  # last byte of the last DATA frame
    verified_at: float


class KVReject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: RejectReason
    detail: Detail = ""
    field: Detail = ""
    ours: Detail = ""  # the receiver's value
    theirs: Detail = ""  # the value in the OPEN


class KVFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: FailReason
    detail: Detail = ""


class Pong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    payload_bytes: Count  # size of the PING's payload


class _SchemaVersion(msgspec.Struct, frozen=True):
    schema_version: int


Message = TypeVar("Message", KVHeader, KVAccept, KVReject, KVCommit, KVAck, KVFailure, Pong)


def encode(message: KVHeader | KVAccept | KVReject | KVCommit | KVAck | KVFailure | Pong) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(payload: bytes | bytearray | memoryview, kind: type[Message]) -> Message:
    """Raises ProtocolError for any payload that is not exactly one message of this kind."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__} does not decode: {error}") from error


def decode_kv_header(payload: bytes | bytearray | memoryview) -> KVHeader:
    """Raises MismatchError if it is of another schema, whatever its other fields; else as ``decode``."""
    try:
        version = msgspec.msgpack.decode(payload, type=_SchemaVersion).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"KVHeader does not decode: {error}") from error
    if version != SCHEMA_VERSION:
        raise MismatchError("schema_version", str(SCHEMA_VERSION), str(version))
    return decode(payload, KVHeader)


def mismatch(ours: KVContract, theirs: KVContract) -> tuple[str, str, str] | None:
    """The first field that differs though it must not, as (field, ours, theirs), or None."""
    for field in KVContract.__struct_fields__:
        if field == "block_size":
            continue
        our_value = str(msgspec.structs.asdict(ours)[field])
        their_value = str(msgspec.structs.asdict(theirs)[field])
        if our_value != their_value:
            return field, our_value, their_value
    return None
