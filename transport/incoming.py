"""What a receiving connection keeps per transfer and per arriving DATA frame, and how an OPEN is judged."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transport.codec import Codec, find_codec, row_shape
from transport.errors import MismatchError, ProtocolError, UnknownCodec
from transport.events import ReceiveStats
from transport.frame import DataSlice
from transport.frame_reader import SliceArrived
from transport.instructions import Destination
from transport.iovec import Scratch, total_bytes
from transport.kv_transfer import ReceiverTransfer
from transport.messages import (
    KVCommit,
    KVContract,
    KVHeader,
    KVReject,
    RejectReason,
    decode_kv_header,
    mismatch,
)


def nowhere(layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
    """The destination of a transfer that has none (yet, or any more)."""
    return []


@dataclass(slots=True)
class Incoming:
    transfer: ReceiverTransfer
    codec: Codec
    destination: Destination = nowhere

    def stats(self, commit: KVCommit, now: float) -> ReceiveStats:
        transfer = self.transfer
        return ReceiveStats(
            start_token=commit.start_token,
            payload_bytes=commit.payload_bytes,
            raw_bytes=commit.raw_bytes,
            num_frames=commit.num_frames,
            opened_at=transfer.opened_at,
            accepted_at=transfer.accepted_at,
            first_frame_at=transfer.first_frame_at,
            last_frame_at=transfer.last_frame_at,
            verified_at=now,
        )


@dataclass(slots=True)
class Body:
    """The DATA frame that is arriving: straight into ``views``, or into ``staging`` to be decoded from there.

    ``doubt`` is why it will be refused, unless it proves to be damaged, which would explain the doubt.
    """

    transfer_id: int
    part: DataSlice
    wire_bytes: int
    views: list[memoryview] = field(default_factory=list)
    staging: memoryview | None = None
    doubt: ProtocolError | None = None

    @property
    def target(self) -> list[memoryview]:
        return self.views if self.staging is None else [self.staging]


def begin_body(incoming: Incoming, arrived: SliceArrived, scratch: Scratch, now: float) -> Body:
    """Finds where a DATA frame belongs. Never raises for what the peer did: that is left as a doubt."""
    header, part = incoming.transfer.header, arrived.part
    body = Body(arrived.header.transfer_id, part, arrived.wire_bytes)
    try:
        incoming.transfer.data_begins(part, now)
        shape = row_shape(header, part.num_tokens)
        fewest, most = incoming.codec.wire_bytes_range(shape)
        if not fewest <= arrived.wire_bytes <= most:
            raise ProtocolError(
                f"{part.num_tokens} tokens came as {arrived.wire_bytes} bytes; {incoming.codec.name} makes "
                f"{fewest} to {most}"
            )
        views = incoming.destination(part.layer, part.kv, part.start_token, part.num_tokens)
        have_bytes = total_bytes(views)
        if have_bytes != shape.raw_bytes:
            raise ProtocolError(f"the destination has {have_bytes} bytes; the frame is for {shape.raw_bytes}")
    except ProtocolError as error:
        body.doubt = error
        return body
    body.views = views
    if header.path == "v1":
        body.staging = memoryview(bytearray(arrived.wire_bytes))
    elif not incoming.codec.is_identity:
        body.staging = scratch.view(arrived.wire_bytes)
    return body


def judge_open(
    payload: bytes, expected: KVContract, codecs: Sequence[Codec]
) -> tuple[KVHeader, Codec] | KVReject:
    """The header and its codec if this side could take such a transfer at all."""
    try:
        header = decode_kv_header(payload)
        difference = mismatch(expected, header)
        if difference is not None:
            raise MismatchError(*difference)
        return header, find_codec(header.codec, codecs)
    except MismatchError as error:
        return _reject(RejectReason.MISMATCH, error, error.field, error.ours, error.theirs)
    except UnknownCodec as error:
        return _reject(RejectReason.MISMATCH, error, "codec", ", ".join(error.allowed), error.name)
    except ProtocolError as error:
        return _reject(RejectReason.PROTOCOL, error)


def _reject(
    reason: RejectReason, error: Exception, field: str = "", ours: str = "", theirs: str = ""
) -> KVReject:
    return KVReject(
        reason=reason, detail=str(error)[:4096], field=field, ours=ours[:4096], theirs=theirs[:4096]
    )
