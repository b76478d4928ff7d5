"""Errors as reasons on the wire, and back."""

from transport.errors import (
    AuthError,
    ChecksumError,
    ProtocolError,
    TransferAborted,
    TransferTimeout,
    TransportError,
    TruncatedTransfer,
)
from transport.messages import FailReason, KVFailure

_REASONS: tuple[tuple[type[TransportError], FailReason], ...] = (
    (AuthError, FailReason.AUTH),
    (ChecksumError, FailReason.CHECKSUM),
    (TransferTimeout, FailReason.TIMEOUT),
    (TruncatedTransfer, FailReason.TRUNCATED),
    (ProtocolError, FailReason.PROTOCOL),
    (TransferAborted, FailReason.CLOSED),
)


def reason_of(error: TransportError) -> FailReason:
    """Why a transfer fails when this error ended its connection."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), FailReason.PEER_CLOSED)


def error_of(failure: KVFailure) -> TransportError:
    """The receiver's FAIL as this side's error."""
    text = f"the receiver failed the transfer ({failure.reason}): {failure.detail}"
    if failure.reason is FailReason.CHECKSUM:
        return ChecksumError(text)
    if failure.reason is FailReason.TIMEOUT:
        return TransferTimeout(text)
    if failure.reason is FailReason.PROTOCOL:
        return ProtocolError(text)
    return TransferAborted(text)


def forget_frames(error: TransportError) -> None:
    """Takes the traceback off an error that will outlive its transfer: the frames in it hold the transfer's views."""
    error.__cause__ = error.__context__ = None
    error.__traceback__ = None
