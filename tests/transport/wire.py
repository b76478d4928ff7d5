"""Two real ends for tests: headers, memory for KV, a fake link between the two cores, and a real one over TCP."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transport.codec import Codec, RawCodec
from transport.errors import TransportError
from transport.events import ReceiveStats, TransferAccepted, TransferEvent
from transport.frame import DataSlice
from transport.instructions import AskToAdmit, AskToReserve, Instruction, ReportFailure, SendReply
from transport.kv_transfer import TransferLimits
from transport.link import UNSHAPED, LinkShape
from transport.messages import (
    FailReason,
    KVAccept,
    KVCommit,
    KVContract,
    KVHeader,
    PrefillResult,
    RejectReason,
)
from transport.receiver import KVReceiver
from transport.receiver_connection import ReceiverConnection
from transport.receiver_peer import OpenReply
from transport.sender import KVSender
from transport.sender_connection import SenderConnection

SECRET = b"a secret of the cluster, 32 bytes"
WAIT_S = 20.0
LIMITS = TransferLimits(accept_timeout_s=10, stall_timeout_s=10, ack_timeout_s=10, idle_timeout_s=30)
PREFILL = PrefillResult(
    first_token_id=17, seed=3, output_position=0, prefill_started_at=1.0, prefill_done_at=2.0
)
ACCEPT = KVAccept(start_token=0, block_size=4)


def make_contract(**changes: object) -> KVContract:
    fields: dict[str, object] = {
        "model_fingerprint": "abc",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 8,
        "dtype": "float32",
        "block_size": 4,
        "layout": "token_head_dim",
    }
    return KVContract(**(fields | changes))  # type: ignore[arg-type]


def make_header(contract: KVContract | None = None, **changes: object) -> KVHeader:
    contract = contract or make_contract()
    fields: dict[str, object] = {name: getattr(contract, name) for name in contract.__struct_fields__}
    fields |= {"request_id": "r1", "attempt": 0, "num_tokens": 10}
    return KVHeader(**(fields | changes))  # type: ignore[arg-type]


class KVMemory:
    """A cache of one request: blocks scattered in one bytearray, so that views are short runs."""

    def __init__(self, contract: KVContract, num_tokens: int, fill: int | None = None) -> None:
        self._contract = contract
        self._num_tokens = num_tokens
        self._block_bytes = contract.block_size * contract.token_bytes
        self._blocks_per_part = -(-num_tokens // contract.block_size)
        size = 2 * contract.num_layers * self._blocks_per_part * self._block_bytes
        self.storage = (
            bytearray(size) if fill is None else bytearray((i * fill + 7) % 251 for i in range(size))
        )

    def views(self, layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
        block_size, token_bytes = self._contract.block_size, self._contract.token_bytes
        views = []
        token = start_token
        while token < start_token + num_tokens:
            block = token // block_size
            end = min((block + 1) * block_size, start_token + num_tokens)
            # blocks of one part lie backwards, so neighbours are never one run
            place = (2 * layer + kv + 1) * self._blocks_per_part - 1 - block
            base = place * self._block_bytes
            first = base + (token - block * block_size) * token_bytes
            views.append(memoryview(self.storage)[first : base + (end - block * block_size) * token_bytes])
            token = end
        return views

    def content(self) -> bytes:
        """All tokens' bytes in order, without the padding of last blocks."""
        return b"".join(
            bytes(view)
            for layer in range(self._contract.num_layers)
            for kv in (0, 1)
            for view in self.views(layer, kv, 0, self._num_tokens)
        )

    def is_free(self) -> bool:
        """Nobody holds a view of the memory."""
        try:
            self.storage.append(0)
        except BufferError:
            return False
        del self.storage[-1:]
        return True


class FakeLink:
    """The two cores of one connection with bytes carried by hand, ``chunk`` bytes at a time, at time ``now``."""

    def __init__(
        self,
        contract: KVContract | None = None,
        codecs: Sequence[Codec] = (RawCodec(),),
        limits: TransferLimits = LIMITS,
        shape: LinkShape = UNSHAPED,
    ) -> None:
        self.contract = contract or make_contract()
        self.sender = SenderConnection(codecs, limits, shape)
        self.receiver = ReceiverConnection(self.contract, codecs, limits)
        self.now = 100.0
        self.events: list[TransferEvent] = []
        self.asked: list[AskToReserve] = []
        self.completed: list[AskToAdmit] = []
        self.failures: list[ReportFailure] = []
        self.wire_bytes = 0
        self.destination: KVMemory | None = None  # accept every OPEN into it at once
        self.start_token = 0  # and say that tokens before this one are there
        self.is_admitting = True

    def carry(self, chunk: int = 1 << 20, limit: int | None = None) -> None:
        """Moves bytes both ways until nothing moves, or ``limit`` bytes have gone to the receiver."""
        self.answer()
        while True:
            moved = 0
            buffers = self.sender.buffers(self.now)
            if buffers and limit != 0:
                data = b"".join(buffers)[: chunk if limit is None else min(chunk, limit)]
                moved = len(data)
                self.sender.sent(moved, self.now)
                self.deliver(data)
                limit = None if limit is None else limit - moved
            self.answer()
            self.events += self.sender.take_events()
            if not moved:
                return

    def deliver(self, data: bytes) -> None:
        """Raw bytes into the receiver."""
        self.wire_bytes += len(data)
        while data:
            target = self.receiver.buffers()[0]
            num_bytes = min(len(data), target.nbytes)
            target[:num_bytes] = data[:num_bytes]
            self.receiver.received(num_bytes, self.now)
            data = data[num_bytes:]
            self.answer()

    def answer(self) -> None:
        """Carries out what the receiver asks, and its replies to the sender."""
        while instructions := self.receiver.take_instructions():
            for instruction in instructions:
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendReply):
            self.sender.receive_data(instruction.frame, self.now)
        elif isinstance(instruction, AskToReserve):
            self.asked.append(instruction)
            if self.destination is not None:
                self.accept(instruction, self.destination)
        elif isinstance(instruction, AskToAdmit):
            self.completed.append(instruction)
            self.receiver.admitted(instruction.transfer_id, self.is_admitting, self.now)
        else:
            self.failures.append(instruction)

    def accept(self, asked: AskToReserve, memory: KVMemory) -> None:
        self.receiver.accept(asked.transfer_id, asked.header, memory.views, self.now, self.start_token)

    def send_all(self, transfer_id: int, header: KVHeader, memory: KVMemory, commit: bool = True) -> None:
        for layer in range(header.num_layers):
            for kv in (0, 1):
                self.send(transfer_id, memory, layer, kv, 0, header.num_tokens)
        if commit:
            self.sender.commit(transfer_id, PREFILL, self.now)

    def send(
        self, transfer_id: int, memory: KVMemory, layer: int, kv: int, start_token: int, num_tokens: int
    ) -> None:
        part = DataSlice(layer, kv, start_token, num_tokens)
        self.sender.send(transfer_id, part, memory.views(layer, kv, start_token, num_tokens), self.now)


@dataclass
class Ended:
    """How one transfer ended at the receiver."""

    header: KVHeader
    commit: KVCommit | None = None
    stats: ReceiveStats | None = None
    reason: FailReason | None = None
    error: TransportError | None = None


@dataclass
class RecordingHandler:
    """A decode side that reserves memory for everything, unless ``decide`` says otherwise."""

    contract: KVContract
    is_admitting: bool = True
    start_token: int = 0  # tokens before this one are there already
    decide: Callable[[KVHeader, OpenReply], bool] = lambda header, reply: (
        False
    )  # True: it has taken the reply
    memories: dict[tuple[str, int], KVMemory] = field(default_factory=dict)
    ended: "queue.Queue[Ended]" = field(default_factory=queue.Queue)
    opened: "queue.Queue[tuple[KVHeader, OpenReply]]" = field(default_factory=queue.Queue)
    first_data: threading.Event = field(default_factory=threading.Event)

    def on_open(self, header: KVHeader, reply: OpenReply) -> None:
        self.opened.put((header, reply))
        if not self.decide(header, reply):
            self.accept(header, reply)

    def accept(self, header: KVHeader, reply: OpenReply) -> None:
        memory = self.memories[header.request_id, header.attempt] = KVMemory(self.contract, header.num_tokens)

        def destination(layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
            self.first_data.set()
            return memory.views(layer, kv, start_token, num_tokens)

        reply.accept(destination, self.start_token)

    def on_complete(self, header: KVHeader, commit: KVCommit, stats: ReceiveStats) -> bool:
        if self.is_admitting:
            self.ended.put(Ended(header, commit, stats))
        return self.is_admitting

    def on_failed(self, header: KVHeader, reason: FailReason, error: TransportError) -> None:
        self.ended.put(Ended(header, reason=reason, error=error))


class RealLink:
    """A KVSender and a KVReceiver over loopback TCP."""

    def __init__(
        self,
        contract: KVContract | None = None,
        codecs: Sequence[Codec] = (RawCodec(),),
        limits: TransferLimits = LIMITS,
        shape: LinkShape = UNSHAPED,
    ) -> None:
        self.contract = contract or make_contract()
        self.handler = RecordingHandler(self.contract)
        self.refused: queue.Queue[str] = queue.Queue()  # peers that did not prove themselves
        self.receiver = KVReceiver(
            self.handler,
            self.contract,
            SECRET,
            codecs=codecs,
            limits=limits,
            shape=shape,
            on_refused=lambda peer, error: self.refused.put(peer),
        )
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.on_event: Callable[[TransferEvent], None] = lambda event: None
        self.sender = KVSender(
            self.receiver.address, SECRET, self._record, codecs=codecs, limits=limits, shape=shape
        )

    def _record(self, event: TransferEvent) -> None:
        self.on_event(event)
        self.events.put(event)

    def __enter__(self) -> "RealLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()

    def send_all(self, transfer_id: int, header: KVHeader, memory: KVMemory, commit: bool = True) -> None:
        for layer in range(header.num_layers):
            for kv in (0, 1):
                views = memory.views(layer, kv, 0, header.num_tokens)
                self.sender.send(transfer_id, layer, kv, 0, header.num_tokens, views)
        if commit:
            self.sender.commit(transfer_id, PREFILL)

    def transfer(self, header: KVHeader, memory: KVMemory) -> TransferEvent:
        """Sends everything and waits for the transfer's last event."""
        self.send_all(self.sender.open(header), header, memory)
        return self.last_event()

    def last_event(self) -> TransferEvent:
        while isinstance(event := self.events.get(timeout=WAIT_S), TransferAccepted):
            pass
        return event

    def end(self) -> Ended:
        return self.handler.ended.get(timeout=WAIT_S)


def refuse(reason: RejectReason, detail: str) -> Callable[[KVHeader, OpenReply], bool]:
    def decide(header: KVHeader, reply: OpenReply) -> bool:
        reply.reject(reason, detail)
        return True

    return decide
