"""A prompt's KV in pieces, sent while more of it is computed: arrives bitwise, or the transfer fails."""

import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.wire import (
    PREFILL,
    WAIT_S,
    FakeLink,
    KVMemory,
    RealLink,
    make_contract,
    make_header,
)
from transport.codec import Codec, RawCodec, row_shape
from transport.errors import ProtocolError
from transport.events import TransferAcked, TransferFailed
from transport.faults import Cut
from transport.frame import DataSlice, Frame, FrameDecoder, FrameType, NeedData, encode_frame
from transport.int8_codec import Int8Codec
from transport.messages import FailReason, KVHeader

CODECS: dict[str, Codec] = {"raw": RawCodec(), "int8": Int8Codec()}
PARTS = [(layer, kv) for layer in (0, 1) for kv in (0, 1)]


def floats(memory: KVMemory) -> KVMemory:
    """The same memory with float32 values in it that a codec can take."""
    values = random.Random(5)
    memory.storage[:] = b"".join(
        bytes([0, 0, values.randrange(256), 0x3F if values.randrange(2) else 0xBF])
        for _ in range(len(memory.storage) // 4)
    )
    return memory


def coded(header: KVHeader, source: KVMemory, contract_memory: KVMemory) -> bytes:
    """What arrives if all tokens of each part go through the codec at once."""
    codec, shape = CODECS[header.codec], row_shape(header, header.num_tokens)
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1]))
    for layer, kv in PARTS:
        length = codec.encode(source.views(layer, kv, 0, header.num_tokens), shape, wire)
        codec.decode(wire[:length], shape, contract_memory.views(layer, kv, 0, header.num_tokens))
    return contract_memory.content()


def rest_of(content: bytes, header: KVHeader, start_token: int) -> list[bytes]:
    """Of each part, the bytes of the tokens from ``start_token`` on."""
    size = header.num_tokens * header.token_bytes
    return [
        content[index * size + start_token * header.token_bytes : (index + 1) * size]
        for index in range(len(PARTS))
    ]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_chunks_any_layer_order_and_any_moment_of_the_accept(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 40), "tokens")
    held_blocks = data.draw(st.integers(0, (num_tokens - 1) // 4), "held blocks")
    header = make_header(num_tokens=num_tokens, codec=data.draw(st.sampled_from(sorted(CODECS)), "codec"))
    # every part is cut for itself: pieces of a layer need not be those of another
    pieces = []
    for part in PARTS:
        cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=4)) | {0, num_tokens})
        pieces.append([(*part, begin, end - begin) for begin, end in itertools.pairwise(cuts)])
    order = data.draw(st.permutations([i for i, each in enumerate(pieces) for _ in each]), "order")
    accept_at = data.draw(st.integers(0, len(order)), "pieces before the accept")
    read_bytes = data.draw(st.sampled_from([37, 1000, 1 << 20]), "bytes a read")

    link = FakeLink(codecs=tuple(CODECS.values()))
    link.start_token = 4 * held_blocks
    source, target = floats(KVMemory(link.contract, num_tokens)), KVMemory(link.contract, num_tokens)
    expected = rest_of(coded(header, source, KVMemory(link.contract, num_tokens)), header, link.start_token)
    link.sender.open(1, header, link.now)
    link.carry(read_bytes)
    (asked,) = link.asked
    for index, which in enumerate(order):
        if index == accept_at:
            link.accept(asked, target)
        link.send(1, source, *pieces[which].pop(0))
        link.carry(read_bytes, limit=data.draw(st.sampled_from([0, 90, None])))
    if accept_at == len(order):
        link.accept(asked, target)
    assert link.completed == []
    link.sender.commit(1, PREFILL, link.now)
    link.carry(read_bytes)
    acked = link.events[-1]
    assert isinstance(acked, TransferAcked)
    assert acked.stats.raw_bytes == header.raw_bytes_from(link.start_token)
    assert rest_of(target.content(), header, link.start_token) == expected
    held = rest_of(target.content(), header, 0)
    assert all(not any(part[: link.start_token * header.token_bytes]) for part in held)
    assert link.sender.num_waiting_frames == 0
    assert source.is_free()


def test_busy_time_is_hidden_as_far_as_it_lies_before_prefills_end() -> None:
    link = FakeLink(make_contract(num_layers=1))
    header = make_header(link.contract, num_tokens=8)
    source, link.destination = KVMemory(link.contract, 8, fill=3), KVMemory(link.contract, 8)
    link.sender.open(1, header, link.now)
    link.carry()
    for start in (0, 4):
        for kv in (0, 1):
            link.send(1, source, 0, kv, start, 4)
        link.carry(limit=100)  # 1 s on the wire, then a pause
        link.now += 1.0
        link.carry()
        link.sender.idle(0, link.now)
        link.now += 5.0
    link.sender.commit(1, msgspec.structs.replace(PREFILL, prefill_done_at=link.now - 0.25), link.now)
    link.carry()
    acked = link.events[-1]
    assert isinstance(acked, TransferAcked)
    assert acked.stats.busy_s == pytest.approx(2.0)
    assert acked.stats.hidden_busy_s == pytest.approx(1.75), "what may lie after prefill's end is not hidden"


# --- what a stream may not be --------------------------------------------------------------------------------------


def recorded(header: KVHeader) -> list[Frame]:
    """OPEN, three pieces of each part, COMMIT: as the sender writes them."""
    link = FakeLink(codecs=tuple(CODECS.values()))
    link.destination = KVMemory(link.contract, header.num_tokens)
    decoder = FrameDecoder()
    deliver = link.deliver

    def record(data: bytes) -> None:
        decoder.receive_data(data)
        deliver(data)

    link.deliver = record  # type: ignore[method-assign]
    source = floats(KVMemory(link.contract, header.num_tokens))
    link.sender.open(1, header, link.now)
    for start, count in ((0, 4), (4, 3), (7, 3)):
        for layer, kv in PARTS:
            link.send(1, source, layer, kv, start, count)
    link.sender.commit(1, PREFILL, link.now)
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)
    frames = []
    while not isinstance(frame := decoder.next_frame(), NeedData):
        frames.append(frame)
    assert [frame.type for frame in frames] == [
        FrameType.OPEN,
        *[FrameType.DATA] * 12,
        FrameType.COMMIT,
    ]
    return frames


FRAMES = {codec: recorded(make_header(codec=codec)) for codec in CODECS}


def played(stream: bytes) -> FakeLink:
    """A receiver after these bytes; its answers are not looked at."""
    link = FakeLink(codecs=tuple(CODECS.values()))
    link.destination = KVMemory(link.contract, 10)
    link.sender.receive_data = lambda data, now: None  # type: ignore[method-assign]
    try:
        link.deliver(stream)
    except ProtocolError:
        link.receiver.connection_lost(FailReason.PROTOCOL, ProtocolError("closed"), link.now)
        link.answer()
    return link


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_recorded_stream_itself_completes(codec: str) -> None:
    assert len(played(b"".join(map(encode_frame, FRAMES[codec]))).completed) == 1


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.integers(1, 12), st.integers(1, 13), st.data())
def test_a_piece_lost_doubled_moved_or_changed_never_completes(
    codec: str, index: int, other: int, data: st.DataObject
) -> None:
    frames = list(FRAMES[codec])
    what = data.draw(st.sampled_from(["lost", "doubled", "changed", "other tokens", "moved"]))
    frame = frames[index]
    if what == "lost":
        del frames[index]
    elif what == "doubled":
        frames.insert(max(other, index + 1), frame)
    elif what == "moved":
        # a piece that overtakes or follows another one of its part, or any order that COMMIT's digest does not have
        moved = other if other != index else index % 12 + 1
        frames[index], frames[moved] = frames[moved], frame
    else:  # with a checksum of its own: not damaged on the way, but not what the sender sent
        payload = bytearray(frame.payload)
        position = data.draw(st.integers(16, len(payload) - 1)) if what == "changed" else 11
        payload[position] ^= 1 << data.draw(st.integers(0, 3))
        frames[index] = Frame(frame.type, frame.transfer_id, bytes(payload))
    link = played(b"".join(map(encode_frame, frames)))
    assert link.completed == []
    (failure,) = link.failures
    assert failure.reason in (FailReason.PROTOCOL, FailReason.CHECKSUM)
    assert link.destination is not None
    assert link.destination.is_free()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.data())
def test_a_stream_that_ends_in_any_piece_never_completes(codec: str, data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, FRAMES[codec]))
    link = played(stream[: data.draw(st.integers(1, len(stream) - 1))])
    assert link.completed == []
    link.receiver.connection_lost(FailReason.PEER_CLOSED, ProtocolError("closed"), link.now)
    link.answer()
    assert len(link.failures) == len(link.asked)
    assert link.destination is not None
    assert link.destination.is_free()


# --- two real ends -------------------------------------------------------------------------------------------------


BIG = make_contract(num_kv_heads=4, head_dim=64, block_size=16)


def send_piece(link: RealLink, transfer_id: int, source: KVMemory, start: int, count: int) -> None:
    for layer, kv in PARTS:
        link.sender.send_parts(
            transfer_id, [(DataSlice(layer, kv, start, count), source.views(layer, kv, start, count))]
        )


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_over_tcp_pieces_arrive_before_the_rest_exists(codec: str) -> None:
    header = make_header(BIG, num_tokens=600, codec=codec)
    with RealLink(BIG, tuple(CODECS.values())) as link:
        source = floats(KVMemory(BIG, 600))
        transfer_id = link.sender.open(header)
        send_piece(link, transfer_id, source, 0, 200)
        assert link.handler.first_data.wait(WAIT_S), "nothing came before the end"
        assert link.handler.ended.empty()
        send_piece(link, transfer_id, source, 200, 7)
        send_piece(link, transfer_id, source, 207, 393)
        link.sender.commit(transfer_id, msgspec.structs.replace(PREFILL, prefill_done_at=time.monotonic()))
        event = link.last_event()
        assert isinstance(event, TransferAcked)
        assert event.stats.raw_bytes == header.raw_bytes
        assert 0 <= event.stats.hidden_busy_s <= event.stats.busy_s
        assert link.end().commit is not None
        assert link.handler.memories["r1", 0].content() == coded(header, source, KVMemory(BIG, 600))


@pytest.mark.parametrize("how", ["the link is cut", "the receiver leaves", "the sender gives up"])
def test_over_tcp_an_end_in_mid_stream_frees_both_ends(how: str) -> None:
    header = make_header(BIG, num_tokens=600)
    with RealLink(BIG) as link:
        source = KVMemory(BIG, 600, fill=3)
        transfer_id = link.sender.open(header)
        send_piece(link, transfer_id, source, 0, 200)
        assert link.handler.first_data.wait(WAIT_S)
        if how == "the link is cut":
            link.sender.inject(Cut())
            send_piece(link, transfer_id, source, 200, 200)
        elif how == "the receiver leaves":
            link.receiver.close()
        else:
            link.sender.abort(transfer_id, "no longer wanted")
        event = link.last_event()
        assert isinstance(event, TransferFailed)
        ended = link.end()
        assert ended.commit is None
        assert ended.reason is not None
        send_piece(link, transfer_id, source, 400, 200)  # prefill does not know yet: nothing comes of it
        link.sender.commit(transfer_id, PREFILL)
        again = make_header(BIG, num_tokens=600, attempt=1)
        if how != "the receiver leaves":
            assert isinstance(link.transfer(again, source), TransferAcked)
            assert link.handler.memories["r1", 1].content() == source.content()
    assert source.is_free()
    assert link.handler.memories["r1", 0].is_free()
