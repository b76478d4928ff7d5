"""What a supervisor and its nursery say to each other: one MessagePack message a packet, answers in order."""

from typing import Final

import msgspec

MAX_MESSAGE_BYTES: Final = 65536
MAX_FDS: Final = 16


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="msg"):
    pass


class Fork(_Message, frozen=True, kw_only=True, tag="fork"):
    """Make a worker; its output goes to ``log_path``.

    The packet carries its descriptors, the parent link first; in the worker they get ``numbers``, those that they have
    in the supervisor, so that messages may name them.
    """

    child_id: str
    log_path: str
    numbers: tuple[int, ...]


class Reap(_Message, frozen=True, kw_only=True, tag="reap"):
    """Wait for a worker that has ended. Until then its pid belongs to nobody else."""

    pid: int


class NurseryReady(_Message, frozen=True, kw_only=True, tag="nursery_ready"):
    """Everything is imported."""

    pid: int


class Forked(_Message, frozen=True, kw_only=True, tag="forked"):
    pid: int


class Reaped(_Message, frozen=True, kw_only=True, tag="reaped"):
    """``code`` as ``subprocess`` has it (negative: a signal); None = no such child."""

    pid: int
    code: int | None


Request = Fork | Reap
Answer = NurseryReady | Forked | Reaped

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode_request(request: Request) -> bytes:
    return _encoder.encode(request)


def decode_request(packet: bytes) -> Request:
    """Raises msgspec.DecodeError."""
    return _requests.decode(packet)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(packet: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(packet)
