"""Transfers to a receiver that holds the beginning already: only the rest moves, and nothing touches what is held."""

import itertools
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.wire import (
    PREFILL,
    FakeLink,
    KVMemory,
    RealLink,
    make_contract,
    make_header,
)
from transport.codec import Codec, RawCodec
from transport.errors import StartTokenError
from transport.events import TransferAccepted, TransferAcked, TransferFailed, TransferRejected
from transport.frame import HEADER_BYTES, SLICE_BYTES, DataSlice, Frame, FrameType, encode_frame, encode_slice
from transport.int8_codec import Int8Codec
from transport.messages import FailReason, KVAccept, KVCommit, KVHeader, RejectReason, encode

CODECS: tuple[Codec, ...] = (RawCodec(), Int8Codec())


def parts(memory: KVMemory, header: KVHeader, start_token: int, end_token: int) -> list[bytes]:
    """The bytes of these tokens, one string for each layer's keys and values."""
    return [
        b"".join(bytes(view) for view in memory.views(layer, kv, start_token, end_token - start_token))
        for layer in range(header.num_layers)
        for kv in (0, 1)
    ]


class HeldLink(FakeLink):
    """A link whose receiver holds the first ``start_token`` tokens of the transfer that ``header`` opens."""

    def __init__(self, header: KVHeader, start_token: int, *, receiver_block_size: int | None = None) -> None:
        contract = make_contract(block_size=receiver_block_size or header.block_size)
        super().__init__(contract, CODECS)
        self.header = header
        self.start_token = start_token
        self.source = KVMemory(make_contract(block_size=header.block_size), header.num_tokens, fill=3)
        self.destination = self.target = KVMemory(contract, header.num_tokens, fill=11)
        self.before = parts(self.target, header, 0, start_token)
        self.sender.open(1, header, self.now)

    def held_is_untouched(self) -> bool:
        return parts(self.target, self.header, 0, self.start_token) == self.before

    def rest_arrived(self) -> bool:
        rest = self.start_token, self.header.num_tokens
        return parts(self.target, self.header, *rest) == parts(self.source, self.header, *rest)


@pytest.mark.parametrize("is_early", [True, False], ids=["before accept", "after accept"])
@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("start_token", [0, 4, 8])
def test_only_the_rest_moves_and_it_arrives_bitwise(start_token: int, path: str, is_early: bool) -> None:
    header = make_header(path=path)
    link = HeldLink(header, start_token)
    if not is_early:
        link.carry()
    link.send_all(1, header, link.source)
    link.carry()
    accepted, acked = link.events
    assert accepted == TransferAccepted(1, "r1", 0, start_token, link.now)
    assert isinstance(acked, TransferAcked)
    formula = 2 * 2 * (10 - start_token) * 3 * 8 * 4
    assert acked.stats.payload_bytes == acked.stats.raw_bytes == formula == header.raw_bytes_from(start_token)
    assert acked.stats.start_token == start_token
    (done,) = link.completed
    assert (done.stats.payload_bytes, done.stats.start_token) == (formula, start_token)
    assert done.commit.num_frames == 4
    control = sum(HEADER_BYTES + len(encode(message)) for message in (header, done.commit))
    assert link.wire_bytes == control + 4 * (HEADER_BYTES + SLICE_BYTES) + formula
    assert link.held_is_untouched()
    assert link.rest_arrived()


def test_a_codec_codes_only_the_rest() -> None:
    header = make_header(codec="int8")
    link = HeldLink(header, 4)
    link.send_all(1, header, link.source)
    link.carry()
    acked = link.events[-1]
    assert isinstance(acked, TransferAcked)
    assert acked.stats.raw_bytes == header.raw_bytes_from(4)
    assert acked.stats.payload_bytes == 2 * 2 * 6 * 3 * (8 + 2)
    assert link.held_is_untouched()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_block_sizes_chunks_and_moment_of_the_accept(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 40), "tokens")
    sender_blocks, receiver_blocks = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), "block sizes")
    start_token = receiver_blocks * data.draw(
        st.integers(0, (num_tokens - 1) // receiver_blocks), "held blocks"
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=5), "cuts") | {0, num_tokens})
    accept_after = data.draw(st.integers(0, len(cuts)), "chunks before the accept")
    header = make_header(make_contract(block_size=sender_blocks), num_tokens=num_tokens)
    link = HeldLink(header, start_token, receiver_block_size=receiver_blocks)
    for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if index == accept_after:
            link.carry()
        for layer, kv in ((0, 0), (0, 1), (1, 0), (1, 1)):
            link.send(1, link.source, layer, kv, begin, end - begin)
    link.sender.commit(1, PREFILL, link.now)
    link.carry(data.draw(st.sampled_from([50, 1000, 1 << 20]), "bytes a read"))
    acked = link.events[-1]
    assert isinstance(acked, TransferAcked)
    assert acked.stats.raw_bytes == header.raw_bytes_from(start_token)
    assert link.held_is_untouched()
    assert link.rest_arrived()


@pytest.mark.parametrize(
    "accept",
    [
        KVAccept(start_token=12, block_size=4),
        KVAccept(start_token=10, block_size=5),
        KVAccept(start_token=7, block_size=4),
        KVAccept(start_token=-4, block_size=4),
        KVAccept(start_token=2**64 - 1, block_size=1),
    ],
    ids=str,
)
def test_a_start_that_cannot_be_fails_its_transfer_and_not_the_connection(accept: KVAccept) -> None:
    link = FakeLink()
    source = KVMemory(link.contract, 10, fill=3)
    link.sender.open(1, make_header(), link.now)
    link.send_all(1, make_header(), source)
    link.carry()
    before = link.wire_bytes
    link.sender.receive_data(encode_frame(Frame(FrameType.ACCEPT, 1, encode(accept))), link.now)
    (failed,) = link.sender.take_events()
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, StartTokenError)
    assert failed.reason is FailReason.PROTOCOL
    assert source.is_free()
    link.carry()
    assert link.receiver.num_failed == 1  # it was told
    assert link.wire_bytes - before < 200  # and that is all that left
    again = make_header(attempt=1)
    link.destination = KVMemory(link.contract, 10)
    link.sender.open(2, again, link.now)
    link.send_all(2, again, source)
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)


def test_an_own_start_that_cannot_be_is_refused_and_given_back() -> None:
    header = make_header()
    link = HeldLink(header, 3)
    link.send_all(1, header, link.source)
    link.carry()
    (event,) = link.events
    assert isinstance(event, TransferRejected)
    assert event.reason is RejectReason.PROTOCOL
    assert "start_token is 3; allowed is 0 to 8 in whole blocks of 4 tokens" in event.detail
    assert [type(failure.error) for failure in link.failures] == [StartTokenError]
    assert link.held_is_untouched()


def hostile_data(header: KVHeader, part: DataSlice) -> bytes:
    payload = encode_slice(part) + b"\xff" * (part.num_tokens * header.token_bytes)
    return encode_frame(Frame(FrameType.DATA, 1, payload))


def hostile_commit(header: KVHeader, start_token: int) -> bytes:
    commit = KVCommit(
        first_token_id=1,
        seed=0,
        output_position=0,
        prefill_started_at=0.0,
        prefill_done_at=0.0,
        start_token=start_token,
        num_frames=4,
        payload_bytes=header.raw_bytes_from(8),
        raw_bytes=header.raw_bytes_from(8),
        digest=0,
    )
    return encode_frame(Frame(FrameType.COMMIT, 1, encode(commit)))


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (lambda header: hostile_data(header, DataSlice(0, 0, 0, 10)), "holds those before 8"),
        (lambda header: hostile_data(header, DataSlice(1, 1, 7, 3)), "holds those before 8"),
        (lambda header: hostile_data(header, DataSlice(0, 0, 9, 1)), "out of order DATA"),
        (lambda header: hostile_commit(header, 8), "COMMIT before all data: 0 of 8"),
        (
            lambda header: (
                b"".join(
                    hostile_data(header, DataSlice(layer, kv, 8, 2)) for layer in (0, 1) for kv in (0, 1)
                )
                + hostile_commit(header, 0)
            ),
            "COMMIT says start_token is 0; here it is 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sender_cannot_write_what_is_held(stream: Callable[[KVHeader], bytes], complaint: str) -> None:
    header = make_header()
    link = HeldLink(header, 8)
    asked_for: list[int] = []
    views = link.target.views

    def record(layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
        asked_for.append(start_token)
        return views(layer, kv, start_token, num_tokens)

    link.target.views = record  # type: ignore[method-assign]
    link.carry()
    link.sender.receive_data = lambda data, now: None  # type: ignore[method-assign]
    link.deliver(stream(header))
    link.target.views = views  # type: ignore[method-assign]
    (failure,) = link.failures
    assert failure.reason is FailReason.PROTOCOL
    assert complaint in str(failure.error)
    assert all(start_token >= 8 for start_token in asked_for)
    assert link.held_is_untouched()
    assert link.completed == []


@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_over_tcp_only_the_rest_moves(path: str, codec: str) -> None:
    contract = make_contract(num_kv_heads=4, head_dim=64, block_size=16)
    with RealLink(contract, CODECS) as link:
        link.handler.start_token = 480
        header = make_header(contract, num_tokens=500, path=path, codec=codec)
        source = KVMemory(contract, 500)
        source.storage[:] = struct.pack("<f", 127.0) * (len(source.storage) // 4)  # int8 is exact, too
        event = link.transfer(header, source)
        assert isinstance(event, TransferAcked)
        assert event.stats.start_token == 480
        assert event.stats.raw_bytes == header.raw_bytes_from(480) == 2 * 2 * 20 * 4 * 64 * 4
        assert event.stats.payload_bytes == (
            event.stats.raw_bytes if codec == "raw" else 2 * 2 * 20 * 4 * (64 + 2)
        )
        ended = link.end()
        assert ended.stats is not None
        assert ended.stats.start_token == 480
        arrived = link.handler.memories["r1", 0]
        assert parts(arrived, header, 480, 500) == parts(source, header, 480, 500)
        assert not any(any(part) for part in parts(arrived, header, 0, 480))
