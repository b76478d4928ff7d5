"""Hostile bytes for both ends of the wire: recorded transfers, mutated, and what must hold whatever came.

``python -m tests.transport.fuzz --frames 1000000 --seed 1`` is the long run (its record: ``docs/fuzzing.md``), with
``--guided`` led by the coverage of ``transport`` (needs the package atheris). The suite runs a few seconds of it.

What must hold, for any bytes of an authenticated peer:
- nothing but a TransportError comes out, and only errors of the protocol's rules end a connection;
- the receiver always says where the next byte goes (no hang) and never keeps more than one control frame;
- each accepted transfer ends exactly once, each of the sender's transfers too;
- afterwards nobody holds a view of any block;
- what completes has the bytes that were sent, unless the sender itself signed others.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import os
import platform
import random
import resource
import signal
import struct
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import xxhash

from tests.transport.wire import ACCEPT, LIMITS, PREFILL, FakeLink, KVMemory, make_contract, make_header
from transport.codec import Codec, RawCodec
from transport.errors import ProtocolError, TransportError, TruncatedTransfer
from transport.events import TransferAccepted
from transport.frame import (
    HEADER_BYTES,
    MAX_DATA_PAYLOAD_BYTES,
    DataSlice,
    Frame,
    FrameDecoder,
    FrameType,
    decode_header,
    encode_frame,
)
from transport.instructions import AskToAdmit, AskToReserve, ReportFailure, SendReply
from transport.int8_codec import Int8Codec
from transport.link import UNSHAPED
from transport.lossless_codec import LosslessCodec
from transport.messages import FailReason, KVAck, KVFailure, KVHeader, KVReject, RejectReason, encode
from transport.receiver_connection import ReceiverConnection
from transport.sender_connection import SenderConnection

CODECS: tuple[Codec, ...] = (RawCodec(), Int8Codec(), LosslessCodec())
CONTRACT = make_contract()
TOKENS = 10
MOST_TOKENS = 10_000
"""What a session's receiver has room for."""

HANG_S = 60

INTERESTING = (0, 1, 2, 3, 15, 16, 17, 31, 127, 128, 255, 256, 4095, 65535, 65536, 65537, 2**20, 2**26, 2**26 + 1,
               2**31 - 1, 2**31, 2**32 - 1)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutation:
    """``kind`` indexes KINDS, ``frame`` the stream's frames; both are taken modulo."""

    kind: int
    frame: int
    position: int
    value: int


HONEST = ("flip", "cut", "drop", "double", "swap", "insert", "end")
"""What a damaged or broken link does: no checksum is made right again."""

FORGED = ("type", "transfer", "length", "payload bit", "payload", "slice", "splice", "control")
"""What a hostile sender does: frames that are well signed."""

KINDS = HONEST + FORGED


@dataclass(frozen=True, slots=True)
class Recording:
    """One connection's stream as frames, and what each transfer's cache must hold in the end."""

    frames: tuple[bytes, ...]
    contents: dict[str, bytes]


def split_frames(stream: bytes) -> list[bytes]:
    frames = []
    while stream:
        end = HEADER_BYTES + decode_header(stream[:HEADER_BYTES]).payload_bytes
        frames.append(stream[:end])
        stream = stream[end:]
    return frames


@cache
def recording(codec: str) -> Recording:
    """Two transfers that interleave, in pieces, both complete."""
    link = FakeLink(CONTRACT, CODECS)
    sources = {1: KVMemory(CONTRACT, TOKENS, fill=3), 2: KVMemory(CONTRACT, TOKENS, fill=5)}
    memories: dict[str, KVMemory] = {}
    stream = bytearray()
    deliver = link.deliver

    def keep(data: bytes) -> None:
        stream.extend(data)
        deliver(data)

    link.deliver = keep  # type: ignore[method-assign]
    for transfer_id in sources:
        header = make_header(CONTRACT, request_id=f"r{transfer_id}", codec=codec, num_tokens=TOKENS)
        link.sender.open(transfer_id, header, link.now)
        link.carry()
        memories[header.request_id] = KVMemory(CONTRACT, TOKENS)
        link.accept(link.asked[-1], memories[header.request_id])
        link.carry()
    for start, count in ((0, 4), (4, 3), (7, 3)):
        for layer in range(CONTRACT.num_layers):
            for kv in (0, 1):
                for transfer_id, source in sources.items():
                    link.send(transfer_id, source, layer, kv, start, count)
    for transfer_id in sources:
        link.sender.commit(transfer_id, PREFILL, link.now)
    link.carry()
    assert len(link.completed) == 2
    return Recording(
        tuple(split_frames(bytes(stream))), {name: memory.content() for name, memory in memories.items()}
    )


def mutated(frames: Sequence[bytes], mutations: Sequence[Mutation]) -> tuple[list[bytes], bool]:
    """The stream with every mutation done to it in turn; and whether any of it was forged."""
    stream, is_forged = list(frames), False
    for mutation in mutations:
        if not stream:
            break
        kind = KINDS[mutation.kind % len(KINDS)]
        at = mutation.frame % len(stream)
        if kind in HONEST:
            _damage(stream, at, kind, mutation)
        elif len(stream[at]) >= HEADER_BYTES:
            is_forged = True
            stream[at] = _forge(stream[at], stream, kind, mutation)
    return stream, is_forged


def _damage(stream: list[bytes], at: int, kind: str, mutation: Mutation) -> None:
    frame = stream[at]
    match kind:
        case "flip":
            bit = mutation.position % (8 * len(frame)) if frame else 0
            stream[at] = _flipped(frame, bit)
        case "cut":
            stream[at] = frame[: mutation.position % (len(frame) + 1)]
        case "drop":
            del stream[at]
        case "double":
            stream.insert(mutation.position % (len(stream) + 1), frame)
        case "swap":
            other = mutation.position % len(stream)
            stream[at], stream[other] = stream[other], frame
        case "insert":
            garbage = random.Random(mutation.value).randbytes(mutation.position % 100)
            stream.insert(at, garbage)
        case "end":
            del stream[at + 1 :]
            stream[at] = frame[: mutation.position % (len(frame) + 1)]


def _forge(frame: bytes, stream: Sequence[bytes], kind: str, mutation: Mutation) -> bytes:
    """Another frame whose header, and but for a wrong length whose payload, has a right checksum."""
    head, payload = bytearray(frame[:28]), bytearray(frame[HEADER_BYTES:])
    number = INTERESTING[mutation.value % len(INTERESTING)]
    match kind:
        case "type":
            head[5] = (
                mutation.value % 256 if mutation.position % 4 == 0 else list(FrameType)[mutation.value % 14]
            )
        case "transfer":
            head[8:16] = struct.pack("!Q", number)
        case "length":
            head[16:20] = struct.pack("!I", number)
        case "payload bit":
            payload = bytearray(
                _flipped(bytes(payload), mutation.position % (8 * len(payload)) if payload else 0)
            )
        case "payload":
            payload = bytearray(random.Random(mutation.value).randbytes(mutation.position % 500))
        case "slice":
            field = ("!I", 0), ("!B", 4), ("!I", 8), ("!I", 12)
            form, offset = field[mutation.position % 4]
            if len(payload) >= 16:
                struct.pack_into(form, payload, offset, number % 256 if form == "!B" else number)
        case "splice":
            payload = bytearray(stream[mutation.position % len(stream)][HEADER_BYTES:])
        case "control":
            payload = bytearray(_some_message(mutation))
    if kind != "length":
        head[16:20] = struct.pack("!I", len(payload))
    head[20:28] = struct.pack("!Q", xxhash.xxh3_64_intdigest(bytes(payload)))
    check = xxhash.xxh3_64_intdigest(bytes(head)) & 0xFFFFFFFF
    return bytes(head) + struct.pack("!I", check) + bytes(payload)


def _some_message(mutation: Mutation) -> bytes:
    """A message that decodes, at a place where it may make no sense."""
    number = mutation.value
    messages = (
        make_header(
            CONTRACT, request_id=f"r{number % 3}", attempt=number % 2, num_tokens=number % 2**31 or 1
        ),
        make_header(CONTRACT, request_id="x", codec=("raw", "int8", "lossless", "zip")[number % 4]),
        msgspec.structs.replace(ACCEPT, start_token=number - 2**31),
        KVAck(received_at=float(number), verified_at=float("nan")),
        KVFailure(reason=list(FailReason)[number % len(FailReason)], detail="x" * (number % 4096)),
        KVReject(reason=list(RejectReason)[number % len(RejectReason)]),
    )
    return encode(messages[mutation.position % len(messages)])


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    return bytes(changed)


class ReceiverSession:
    """The receiving end against one hostile connection; everything it reserves is real memory."""

    def __init__(self, recorded: Recording) -> None:
        self.num_completed = 0
        self._recorded = recorded
        self._core = ReceiverConnection(CONTRACT, CODECS, LIMITS)
        self._memories: dict[tuple[str, int], KVMemory] = {}
        self._open: set[tuple[str, int]] = set()
        self._replies = FrameDecoder()
        self._now = 100.0

    def play(self, stream: bytes, chunk: int, *, is_forged: bool) -> None:
        """Raises AssertionError for what must not be."""
        reason, error = FailReason.PEER_CLOSED, TransportError("the peer left")
        try:
            while stream:
                views = self._core.buffers()
                assert views, "nowhere to put the next byte"
                assert sum(view.nbytes for view in views) <= MAX_DATA_PAYLOAD_BYTES
                piece, target = stream[: min(chunk, views[0].nbytes)], views[0]
                assert piece, "no room for the next byte"
                target[: len(piece)] = piece
                del views, target
                stream = stream[len(piece) :]
                self._now += 0.001
                self._core.received(len(piece), self._now)
                self._carry_out(is_forged=is_forged)
            self._core.tick(self._now)
            with contextlib.suppress(TruncatedTransfer):
                self._core.receive_eof()
        except ProtocolError as broken:
            reason, error = FailReason.PROTOCOL, broken
        self._core.connection_lost(reason, error, self._now)
        self._carry_out(is_forged=is_forged)
        assert not self._open, f"{self._open} never ended"
        assert all(memory.is_free() for memory in self._memories.values()), "a view of a block is held"

    def _carry_out(self, *, is_forged: bool) -> None:
        while instructions := self._core.take_instructions():
            for instruction in instructions:
                match instruction:
                    case AskToReserve(header=header):
                        self._reserve(instruction.transfer_id, header)
                    case AskToAdmit(header=header):
                        name = (header.request_id, header.attempt)
                        content = self._memories[name].content()
                        known = self._recorded.contents.get(header.request_id)
                        assert is_forged or content == known, f"{name} completed with wrong bytes"
                        self._open.remove(name)
                        self.num_completed += 1
                        self._core.admitted(instruction.transfer_id, True, self._now)
                    case ReportFailure(header=header):
                        self._open.remove((header.request_id, header.attempt))
                    case SendReply(frame=frame):
                        self._replies.receive_data(frame)
                        assert isinstance(self._replies.next_frame(), Frame)

    def _reserve(self, transfer_id: int, header: KVHeader) -> None:
        name = (header.request_id, header.attempt)
        if header.num_tokens > MOST_TOKENS or name in self._open:
            self._core.reject(transfer_id, RejectReason.FULL, "no room", self._now)
            return
        memory = self._memories[name] = KVMemory(CONTRACT, header.num_tokens)
        self._open.add(name)
        self._core.accept(transfer_id, header, memory.views, self._now)


class SenderSession:
    """The sending end against a hostile receiver: two transfers with all their data, and whatever answers come."""

    def __init__(self, codec: str) -> None:
        self._core = SenderConnection(CODECS, LIMITS, UNSHAPED)
        self._source = KVMemory(CONTRACT, TOKENS, fill=3)
        self._now = 100.0
        for transfer_id in (1, 2):
            header = make_header(CONTRACT, request_id=f"r{transfer_id}", codec=codec, num_tokens=TOKENS)
            self._core.open(transfer_id, header, self._now)
            for layer in range(CONTRACT.num_layers):
                for kv in (0, 1):
                    part = DataSlice(layer, kv, 0, TOKENS)
                    self._core.send(transfer_id, part, self._source.views(layer, kv, 0, TOKENS), self._now)
            self._core.commit(transfer_id, PREFILL, self._now)

    def play(self, stream: bytes, chunk: int) -> None:
        """Raises AssertionError for what must not be."""
        ended: list[int] = []
        error: TransportError = TransportError("the peer left")
        try:
            self._write()
            while stream:
                self._now += 0.001
                self._core.receive_data(stream[:chunk], self._now)
                stream = stream[chunk:]
                self._write()
                ended += self._ends()
            with contextlib.suppress(TruncatedTransfer):
                self._core.receive_eof()
        except ProtocolError as broken:
            error = broken
        self._core.connection_lost(error, self._now, keep_unopened=False)
        ended += self._ends()
        assert sorted(ended) == [1, 2], f"transfers ended: {ended}"
        assert self._source.is_free(), "a view of a block is held"

    def _write(self) -> None:
        while buffers := self._core.buffers(self._now):
            self._core.sent(sum(view.nbytes for view in buffers), self._now)

    def _ends(self) -> list[int]:
        events = self._core.take_events()
        return [event.transfer_id for event in events if not isinstance(event, TransferAccepted)]


@cache
def answers() -> tuple[bytes, ...]:
    """What a good receiver says to a SenderSession, and other answers it could give."""
    ack, failure = (
        KVAck(received_at=1.0, verified_at=2.0),
        KVFailure(reason=FailReason.CHECKSUM, detail="damaged"),
    )
    said = [
        (FrameType.ACCEPT, 1, ACCEPT),
        (FrameType.ACCEPT, 2, msgspec.structs.replace(ACCEPT, start_token=4)),
        (FrameType.ACK, 1, ack),
        (FrameType.FAIL, 2, failure),
        (FrameType.REJECT, 3, KVReject(reason=RejectReason.FULL)),
        (FrameType.ACK, 2, ack),
    ]
    return tuple(
        encode_frame(Frame(kind, transfer_id, encode(message))) for kind, transfer_id, message in said
    )


def play(codec: str, mutations: Sequence[Mutation], chunk: int) -> int:
    """One session at either end. Returns how many frames they were fed. Raises AssertionError with the story."""
    recorded = recording(codec)
    frames, is_forged = mutated(recorded.frames, mutations)
    ReceiverSession(recorded).play(b"".join(frames), chunk, is_forged=is_forged)
    replies, _ = mutated(answers(), mutations)
    SenderSession(codec).play(b"".join(replies), chunk)
    return len(frames) + len(replies)


def mutations_of(data: bytes) -> list[Mutation]:
    """Any bytes as mutations, eight each."""
    return [Mutation(*struct.unpack_from("!BBHI", data, at)) for at in range(0, len(data) - 7, 8)]


def random_session(rng: random.Random) -> tuple[str, list[Mutation], int]:
    codec = rng.choice(CODECS).name
    count = rng.choice((1, 1, 1, 2, 2, 3, 5, 8))
    return codec, mutations_of(rng.randbytes(8 * count)), rng.choice((1, 7, 64, 1000, 1 << 20))


# the long run


def _hangs(signum: int, frame: object) -> None:
    raise AssertionError(f"a session took longer than {HANG_S} s")


def run(num_frames: int, seed: int, hang_s: int = 0) -> dict[str, object]:
    """Random sessions until so many frames were fed, each within ``hang_s`` (0 = not watched). JSON-ready."""
    rng = random.Random(seed)
    findings: list[str] = []
    done = sessions = 0
    began_at = time.monotonic()
    if hang_s:
        signal.signal(signal.SIGALRM, _hangs)
    for codec in CODECS:
        recording(codec.name)
    began_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    while done < num_frames and len(findings) < 10:
        session = random_session(rng)
        if hang_s:
            signal.alarm(hang_s)
        try:
            done += play(*session)
        except Exception as error:  # noqa: BLE001  # whatever comes out is a finding
            findings.append(f"{type(error).__name__}: {error} in {session}")
        sessions += 1
    if hang_s:
        signal.alarm(0)
    return {
        "frames": done,
        "sessions": sessions,
        "seed": seed,
        "findings": findings,
        "minutes": round((time.monotonic() - began_at) / 60, 1),
        "grew_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - began_bytes,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "xxhash": xxhash.VERSION,
        "msgspec": msgspec.__version__,
    }


def _is_watched(module: str) -> bool:
    """Of the wire, and run by Python itself."""
    return module.startswith("transport.") and module != "transport.codec_kernels"


def run_guided(num_frames: int, seed: int) -> None:
    """Sessions led by what of ``transport`` they reach; ends the process. A finding is atheris's own report."""
    atheris = importlib.import_module("atheris")
    done = 0
    for codec in CODECS:
        recording(codec.name)

    def one(data: bytes) -> None:
        nonlocal done
        if len(data) < 10:
            return
        codec, chunk = CODECS[data[0] % 3].name, (1, 7, 64, 1000, 1 << 20)[data[1] % 5]
        done += play(codec, mutations_of(data[2:66]), chunk)
        if done >= num_frames:
            print(json.dumps({"guided_frames": done, "seed": seed, "findings": []}))
            sys.stdout.flush()
            os._exit(0)

    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and _is_watched(str(function.__module__)):
            atheris.instrument_func(function)
    atheris.Setup(
        [sys.argv[0], f"-seed={seed}", f"-timeout={HANG_S}", "-rss_limit_mb=2048", "-max_len=66"], one
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transport.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--guided", action="store_true", help="let coverage lead; needs the package atheris")
    args = parser.parse_args()
    if args.guided:
        run_guided(args.frames, args.seed)
    record = run(args.frames, args.seed, HANG_S)
    print(json.dumps(record, indent=2))
    return 1 if record["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
