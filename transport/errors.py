"""Everything that can go wrong between two workers, by whose fault it is and what it costs.

A ``ProtocolError`` means the peer (or a caller) broke a rule; whether the connection can go on depends on
whether framing is intact, which ``FramingError`` says. The others are facts of life: bytes were damaged,
the stream ended early, nobody answered, the peer left.
"""

from collections.abc import Sequence


class TransportError(Exception):
    """Base of every error this package raises on purpose."""


class ProtocolError(TransportError):
    """A message that the rules do not allow: unknown type, wrong order, does not decode, too large."""


class FramingError(ProtocolError):
    """Frame boundaries are lost (bad magic, version, length or header checksum): the connection must close."""


class InvalidTransition(ProtocolError):
    """An event that a transfer's state does not allow. Carries the transfer's story so far."""

    def __init__(self, transfer: str, state: str, event: str, story: Sequence[str]) -> None:
        super().__init__(
            f"transfer {transfer}: {event} is not allowed in state {state}; story: {', '.join(story)}"
        )
        self.transfer = transfer
        self.state = state
        self.event = event
        self.story = tuple(story)


class StartTokenError(ProtocolError):
    """A receiver says that it holds so many leading tokens as no receiver can."""

    def __init__(self, start_token: int, block_size: int, most: int) -> None:
        super().__init__(
            f"start_token is {start_token}; allowed is 0 to {most} in whole blocks of {block_size} tokens"
        )
        self.start_token = start_token


class ChecksumError(TransportError):
    """Bytes arrived damaged. Framing is intact; only this frame's transfer is lost."""


class CompressionError(ProtocolError):
    """A frame whose checksum is right, so as its sender meant it, does not decompress to exactly what is due."""


class TruncatedTransfer(TransportError):
    """The stream ended in the middle of a frame or of a transfer."""


class AuthError(TransportError):
    """The peer did not prove that it knows the cluster's secret, or talks on the wrong channel."""


class TransferTimeout(TransportError):
    """Something that has a time limit took longer. The message names what and the limit."""


class PeerClosed(TransportError):
    """The connection is gone: closed, reset or refused."""


class OutboxFull(TransportError):
    """More frames are waiting on one connection than it may hold."""


class TransferAborted(TransportError):
    """The transfer was given up on purpose, by this side or by the peer."""


class UnknownCodec(TransportError):
    """A codec name that this side cannot handle; the message names those it can."""

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        super().__init__(f"codec is {name!r}; allowed here: {', '.join(allowed)}")
        self.name = name
        self.allowed = tuple(allowed)


class MismatchError(TransportError):
    """Sender and receiver do not hold the same model or speak the same schema."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field} differs: ours is {ours}, theirs is {theirs}")
        self.field = field
        self.ours = ours
        self.theirs = theirs
