"""What a receiving connection asks of the world around it. Plain values, carried out by ``receiver.py``."""

from collections.abc import Callable
from dataclasses import dataclass

from transport.errors import TransportError
from transport.events import ReceiveStats
from transport.messages import FailReason, KVCommit, KVHeader

Destination = Callable[[int, int, int, int], list[memoryview]]
"""(layer, kv, start_token, num_tokens) -> writable views of exactly these tokens, block after block. Never asked for
tokens that the receiver said it holds."""


@dataclass(frozen=True, slots=True)
class SendReply:
    frame: bytes


@dataclass(frozen=True, slots=True)
class AskToReserve:
    """Somebody must call ``accept`` or ``reject`` for it within the accept timeout."""

    transfer_id: int
    header: KVHeader


@dataclass(frozen=True, slots=True)
class AskToAdmit:
    """Everything is verified; somebody must call ``admitted`` at once."""

    transfer_id: int
    header: KVHeader
    commit: KVCommit
    stats: ReceiveStats


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """A reservation is void and its views are no longer touched."""

    header: KVHeader
    reason: FailReason
    error: TransportError


Instruction = SendReply | AskToReserve | AskToAdmit | ReportFailure
