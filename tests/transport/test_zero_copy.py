"""How often payload is copied in memory that Python sees: never for raw KV on path v2, and the count notices a copy.

Counted by where bytes lie: what the kernel takes from the sending cache itself, or puts into the receiving cache
itself, was not copied; everything else that went through the socket beyond headers and control frames was.
"""

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.transport.wire import KVMemory, RealLink, make_contract, make_header
from transport import outgoing, receiver_connection, sender_connection
from transport.client_connection import ClientConnection
from transport.events import TransferAcked
from transport.incoming import Body, Incoming
from transport.messages import KVHeader
from transport.receiver_connection import ReceiverConnection
from transport.receiver_peer import OpenReply

CONTRACT = make_contract(num_layers=4, num_kv_heads=4, head_dim=64, block_size=512)
TOKENS = 4096  # 32 MiB
MOST_EXTRA_BYTES = 1 << 20


def address(view: Any) -> int:
    start: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return start


@dataclass
class Counter:
    """Bytes that passed the socket straight from or into ``memory``."""

    memory: KVMemory
    in_place_bytes: int = 0

    def passed(self, buffers: Sequence[memoryview], num_bytes: int) -> None:
        first = address(self.memory.storage)
        last = first + len(self.memory.storage)
        for buffer in buffers:
            here = min(buffer.nbytes, num_bytes)
            num_bytes -= here
            if here and first <= address(buffer) < last:
                self.in_place_bytes += here

    def copies(self, header: KVHeader) -> float:
        """Of the payload: 0 = none of it was copied, 1 = all of it."""
        return 1 - self.in_place_bytes / header.raw_bytes


@contextmanager
def counting(source: KVMemory, target: KVMemory) -> Iterator[tuple[Counter, Counter]]:
    """Watches every buffer that either end of the wire hands to the kernel."""
    sent, received = Counter(source), Counter(target)
    write, take = ClientConnection.write, ReceiverConnection.received
    offered = ReceiverConnection.buffers
    last: dict[ReceiverConnection, list[memoryview]] = {}

    def watched_write(connection: ClientConnection, buffers: Sequence[memoryview]) -> int:
        num_bytes = write(connection, buffers)
        sent.passed(buffers, num_bytes)
        return num_bytes

    def watched_buffers(core: ReceiverConnection) -> list[memoryview]:
        last[core] = offered(core)
        return last[core]

    def watched_received(core: ReceiverConnection, num_bytes: int, now: float) -> None:
        received.passed(last.pop(core), num_bytes)
        take(core, num_bytes, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientConnection, "write", watched_write)
        patch.setattr(ReceiverConnection, "buffers", watched_buffers)
        patch.setattr(ReceiverConnection, "received", watched_received)
        yield sent, received


def transfer(path: str) -> tuple[float, float, int]:
    """One real transfer over TCP: payload copies on the way out, on the way in, and the peak of extra memory."""
    header = make_header(CONTRACT, num_tokens=TOKENS, path=path)
    source, target = KVMemory(CONTRACT, TOKENS), KVMemory(CONTRACT, TOKENS)
    source.storage[:] = np.random.default_rng(5).bytes(len(source.storage))

    def decide(header: KVHeader, reply: OpenReply) -> bool:
        reply.accept(target.views)
        return True

    with RealLink(CONTRACT) as link:
        warm_up = make_header(CONTRACT, request_id="warm-up", num_tokens=1)
        assert isinstance(link.transfer(warm_up, source), TransferAcked)
        link.end()
        link.handler.decide = decide
        with counting(source, target) as (sent, received):
            tracemalloc.start()
            try:
                assert isinstance(link.transfer(header, source), TransferAcked)
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert link.end().commit is not None
    assert target.content() == source.content()
    return sent.copies(header), received.copies(header), peak_bytes


def test_raw_kv_on_v2_is_never_copied() -> None:
    on_send, on_receive, peak_bytes = transfer("v2")
    assert (on_send, on_receive) == (0, 0)
    assert peak_bytes < MOST_EXTRA_BYTES


def test_v1_copies_all_of_it_at_both_ends() -> None:
    on_send, on_receive, peak_bytes = transfer("v1")
    assert (on_send, on_receive) == (1, 1)
    assert peak_bytes > MOST_EXTRA_BYTES


def test_a_copy_on_the_way_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(item: Any, *arguments: Any) -> Any:
        views = [memoryview(bytes(view)) for view in item.views]
        return outgoing.build_data_frame(outgoing.QueuedData(item.outgoing, item.part, views), *arguments)

    monkeypatch.setattr(sender_connection, "build_data_frame", copying)
    assert transfer("v2")[:2] == (1, 0)


def test_a_copy_on_the_way_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = receiver_connection.begin_body

    def copying(incoming: Incoming, *arguments: Any) -> Body:
        body = begin(incoming, *arguments)
        body.staging = memoryview(bytearray(body.wire_bytes))
        return body

    monkeypatch.setattr(receiver_connection, "begin_body", copying)
    assert transfer("v2")[:2] == (0, 1)
