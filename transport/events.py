"""What a KVSender tells its owner about transfers. Each transfer ends with exactly one of the last three.

After that one, the sender touches none of the transfer's views again: its blocks may be freed.
"""

from dataclasses import dataclass

from transport.errors import TransportError
from transport.messages import FailReason, RejectReason


@dataclass(frozen=True, slots=True)
class TransferStats:
    """``payload_bytes`` are KV bytes on the wire, ``raw_bytes`` the same KV as stored, both of the tokens from
    ``start_token`` on: the receiver held those before it.

    ``busy_s`` is how long the link was busy with this transfer: it leaves out pauses in which the caller had nothing
    to send, so payload_bytes / busy_s is the achieved rate. Transfers that interleave share the time, so the sum over
    all transfers of a connection is the connection's busy time. ``hidden_busy_s`` is the part of it before
    prefill's end, never more.
    """

    start_token: int
    payload_bytes: int
    raw_bytes: int
    num_frames: int
    opened_at: float
    accepted_at: float
    first_frame_at: float
    commit_sent_at: float
    acked_at: float
    busy_s: float
    hidden_busy_s: float


@dataclass(frozen=True, slots=True)
class ReceiveStats:
    """The same transfer as its receiver saw it. Times are time.monotonic()."""

    start_token: int
    payload_bytes: int
    raw_bytes: int
    num_frames: int
    opened_at: float
    accepted_at: float
    first_frame_at: float
    last_frame_at: float
    verified_at: float


@dataclass(frozen=True, slots=True)
class TransferAccepted:
    """``start_token``: how many leading tokens the receiver holds already, so that they are not sent."""

    transfer_id: int
    request_id: str
    attempt: int
    start_token: int
    accepted_at: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class TransferRejected:
    transfer_id: int
    request_id: str
    attempt: int
    reason: RejectReason
    detail: str
    field: str  # for a mismatch: what differs, the sender's value ("ours") and the receiver's ("theirs")
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class TransferAcked:
    transfer_id: int
    request_id: str
    attempt: int
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class TransferFailed:
    transfer_id: int
    request_id: str
    attempt: int
    reason: FailReason
    error: TransportError


TransferEvent = TransferAccepted | TransferRejected | TransferAcked | TransferFailed
