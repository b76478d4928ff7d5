"""What a sending connection keeps per transfer, and how one DATA frame is put together. No state machine, no socket."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from transport.busy_meter import BusyTime
from transport.codec import Codec, row_shape
from transport.errors import ProtocolError
from transport.events import TransferFailed, TransferRejected, TransferStats
from transport.frame import (
    SLICE_BYTES,
    DataSlice,
    Frame,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_header,
    encode_slice,
    payload_checksum,
)
from transport.iovec import IoVec, Scratch, split_views, total_bytes
from transport.kv_transfer import SenderTransfer
from transport.messages import KVCommit, KVFailure, KVHeader, KVReject, PrefillResult, encode


@dataclass(slots=True)
class Outgoing:
    """One transfer on its way. ``held`` waits for ACCEPT; ``failure`` waits for the end of a half-written frame."""

    transfer: SenderTransfer
    codec: Codec
    held: list["HeldFrame"] = field(default_factory=list)
    failure: TransferFailed | None = None
    can_rest: bool = False  # its prompt is computed and much of its KV has still to leave
    busy: BusyTime = field(default_factory=BusyTime)
    opened_at: float = 0.0
    accepted_at: float = 0.0
    commit_sent_at: float = 0.0
    hidden_busy_s: float = 0.0

    @property
    def ids(self) -> tuple[int, str, int]:
        """What every event names: transfer id, request id, attempt."""
        header = self.transfer.header
        return self.transfer.transfer_id, header.request_id, header.attempt

    def rejected(self, reject: KVReject) -> TransferRejected:
        """The receiver's REJECT from this side: its "theirs" is ours."""
        return TransferRejected(
            *self.ids, reject.reason, reject.detail, reject.field, ours=reject.theirs, theirs=reject.ours
        )

    def stats(self, acked_at: float) -> TransferStats:
        coverage = self.transfer.coverage
        first_frame_at = self.transfer.first_frame_at
        return TransferStats(
            start_token=coverage.start_token,
            payload_bytes=coverage.payload_bytes,
            raw_bytes=coverage.raw_bytes,
            num_frames=coverage.num_frames,
            opened_at=self.opened_at,
            accepted_at=self.accepted_at,
            first_frame_at=acked_at if first_frame_at is None else first_frame_at,
            commit_sent_at=self.commit_sent_at,
            acked_at=acked_at,
            busy_s=self.busy.busy_s,
            hidden_busy_s=self.hidden_busy_s,
        )


@dataclass(frozen=True, slots=True)
class QueuedOpen:
    outgoing: Outgoing


@dataclass(frozen=True, slots=True)
class QueuedData:
    outgoing: Outgoing
    part: DataSlice
    views: Sequence[memoryview]

    def due(self) -> "QueuedData | None":
        """What of it the receiver does not hold yet; None where that is nothing."""
        part, start_token = self.part, self.outgoing.transfer.coverage.start_token
        if part.start_token >= start_token:
            return self
        if part.end_token <= start_token:
            return None
        token_bytes = self.outgoing.transfer.header.token_bytes
        rest = DataSlice(part.layer, part.kv, start_token, part.end_token - start_token)
        sizes = [(start_token - part.start_token) * token_bytes, rest.num_tokens * token_bytes]
        return QueuedData(self.outgoing, rest, split_views(self.views, sizes)[1])


@dataclass(frozen=True, slots=True)
class QueuedCommit:
    outgoing: Outgoing
    prefill: PrefillResult


@dataclass(frozen=True, slots=True)
class QueuedAbort:
    """Outlives its transfer: the peer is told although the transfer has ended here."""

    frame: IoVec


HeldFrame = QueuedData | QueuedCommit
QueuedFrame = QueuedOpen | HeldFrame | QueuedAbort


def split_data(
    header: KVHeader, part: DataSlice, views: Sequence[memoryview], max_frame_bytes: int
) -> list[tuple[DataSlice, Sequence[memoryview]]]:
    """Cuts a part into frames of about ``max_frame_bytes``, at multiples of the sender's block size.

    Raises ProtocolError if the views do not hold exactly this part.
    """
    due_bytes = part.num_tokens * header.token_bytes
    have_bytes = total_bytes(views)
    if have_bytes != due_bytes:
        raise ProtocolError(
            f"layer {part.layer}, kv {part.kv}, {part.num_tokens} tokens: the views hold {have_bytes} bytes; "
            f"due are {due_bytes}"
        )
    if due_bytes <= max_frame_bytes:
        return [(part, views)]
    blocks_per_frame = max(1, max_frame_bytes // (header.block_size * header.token_bytes))
    step = blocks_per_frame * header.block_size
    first_cut = (part.start_token // header.block_size) * header.block_size + step
    bounds = [part.start_token, *range(first_cut, part.end_token, step), part.end_token]
    parts = [DataSlice(part.layer, part.kv, start, end - start) for start, end in itertools.pairwise(bounds)]
    pieces = split_views(views, [piece.num_tokens * header.token_bytes for piece in parts])
    return list(zip(parts, pieces, strict=True))


def control_frame(
    frame_type: FrameType, transfer: SenderTransfer, message: KVHeader | KVCommit | KVFailure
) -> IoVec:
    """A whole frame of one of the sender's messages."""
    return IoVec([encode_frame(Frame(frame_type, transfer.transfer_id, encode(message)))])


@dataclass(frozen=True, slots=True)
class DataFrame:
    """A DATA frame ready for the socket. For ``raw`` on v2 the vector points into the caller's memory."""

    vector: IoVec
    wire_bytes: int
    checksum: int


def build_data_frame(item: QueuedData, scratch: Scratch, corrupt: bool) -> DataFrame:
    """Encodes into ``scratch``, so the frame must have left before the next one is built."""
    header = item.outgoing.transfer.header
    payload = list(item.views)
    if not item.outgoing.codec.is_identity:
        shape = row_shape(header, item.part.num_tokens)
        wire = scratch.view(item.outgoing.codec.wire_bytes_range(shape)[1])
        payload = [wire[: item.outgoing.codec.encode(item.views, shape, wire)]]
    part = encode_slice(item.part)
    wire_bytes = total_bytes(payload)
    checksum = payload_checksum([part, *payload])
    frame_header = encode_header(
        FrameHeader(FrameType.DATA, item.outgoing.transfer.transfer_id, SLICE_BYTES + wire_bytes, checksum)
    )
    if corrupt:
        first = memoryview(payload[0]).cast("B")
        payload[:1] = [memoryview(bytes([first[0] ^ 1])), first[1:]]
    if header.path == "v1":
        return DataFrame(IoVec([b"".join([frame_header, part, *payload])]), wire_bytes, checksum)
    return DataFrame(IoVec([frame_header, part, *payload]), wire_bytes, checksum)
