"""The two cores of a connection against each other, with the bytes carried by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.wire import ACCEPT, LIMITS, PREFILL, FakeLink, KVMemory, make_contract, make_header
from transport.codec import Codec, RawCodec, row_shape
from transport.errors import FramingError, ProtocolError, TransferTimeout, TransportError, TruncatedTransfer
from transport.events import TransferAccepted, TransferAcked, TransferFailed, TransferRejected
from transport.faults import CorruptNextFrame, Cut, Stall
from transport.frame import HEADER_BYTES, SLICE_BYTES, DataSlice, Frame, FrameType, encode_frame, encode_slice
from transport.int8_codec import Int8Codec
from transport.link import LinkShape
from transport.messages import FailReason, KVCommit, KVHeader, RejectReason, encode

CODECS: tuple[Codec, ...] = (RawCodec(), Int8Codec())


def start(link: FakeLink, header: KVHeader, transfer_id: int = 1) -> KVMemory:
    """Opens a transfer and gives both ends memory for it; returns the sender's."""
    link.destination = KVMemory(link.contract, header.num_tokens)
    link.sender.open(transfer_id, header, link.now)
    return KVMemory(link.contract, header.num_tokens, fill=3)


def record_good_transfer() -> tuple[bytes, bytes]:
    """Every byte that a sender writes for one transfer, and the KV in it."""
    link = FakeLink()
    sent = bytearray()
    deliver = link.deliver

    def record(data: bytes) -> None:
        sent.extend(data)
        deliver(data)

    link.deliver = record  # type: ignore[method-assign]
    source = start(link, make_header(num_tokens=5))
    link.send_all(1, make_header(num_tokens=5), source)
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)
    return bytes(sent), source.content()


STREAM, CONTENT = record_good_transfer()


def receiver_only() -> FakeLink:
    """A link whose sender is replaced by the test: answers are not looked at."""
    link = FakeLink()
    link.destination = KVMemory(link.contract, 5)
    link.sender.receive_data = lambda data, now: None  # type: ignore[method-assign]
    return link


def data_frame(header: KVHeader, part: DataSlice, transfer_id: int = 1) -> bytes:
    payload = encode_slice(part) + bytes(part.num_tokens * header.token_bytes)
    return encode_frame(Frame(FrameType.DATA, transfer_id, payload))


# --- what should be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("num_tokens", [1, 4, 10])
def test_raw_kv_arrives_bitwise_however_the_bytes_are_cut(chunk: int, path: str, num_tokens: int) -> None:
    link = FakeLink()
    header = make_header(path=path, num_tokens=num_tokens)
    source = start(link, header)
    link.send_all(1, header, source)
    link.carry(chunk)
    accepted, acked = link.events
    assert accepted == TransferAccepted(1, "r1", 0, 0, link.now)
    assert isinstance(acked, TransferAcked)
    assert link.destination is not None
    assert link.destination.content() == source.content()
    formula = 2 * 2 * num_tokens * 3 * 8 * 4
    assert acked.stats.payload_bytes == acked.stats.raw_bytes == formula
    (done,) = link.completed
    assert (done.commit.first_token_id, done.commit.seed, done.commit.prefill_done_at) == (17, 3, 2.0)
    assert done.stats.payload_bytes == formula
    assert link.failures == []


def test_the_wire_carries_exactly_the_formula_beside_its_frames() -> None:
    link = FakeLink()
    header = make_header(num_tokens=10)
    link.send_all(1, header, start(link, header))
    link.carry()
    (done,) = link.completed
    control = sum(HEADER_BYTES + len(encode(message)) for message in (header, done.commit))
    assert (
        link.wire_bytes == control + done.commit.num_frames * (HEADER_BYTES + SLICE_BYTES) + header.raw_bytes
    )


@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("chunk", [13, 1 << 20])
def test_int8_arrives_as_the_codec_makes_it_on_both_paths(path: str, chunk: int) -> None:
    link = FakeLink(codecs=CODECS)
    header = make_header(path=path, codec="int8")
    source = start(link, header)
    expected = KVMemory(link.contract, 10)
    shape = row_shape(header, 10)
    wire = memoryview(bytearray(CODECS[1].wire_bytes_range(shape)[1]))
    for layer, kv in ((0, 0), (0, 1), (1, 0), (1, 1)):
        CODECS[1].encode(source.views(layer, kv, 0, 10), shape, wire)
        CODECS[1].decode(wire, shape, expected.views(layer, kv, 0, 10))
    link.send_all(1, header, source)
    link.carry(chunk)
    acked = link.events[-1]
    assert isinstance(acked, TransferAcked)
    assert acked.stats.payload_bytes == 2 * 2 * 10 * 3 * (8 + 2)
    assert acked.stats.raw_bytes == header.raw_bytes
    assert link.destination is not None
    assert link.destination.content() == expected.content() != source.content()


def test_large_parts_are_cut_at_block_boundaries() -> None:
    contract = make_contract(num_layers=1, head_dim=1024, block_size=4)
    link = FakeLink(contract, shape=LinkShape(1000))  # frames of at most 64 KiB: one block of 48 KiB each
    header = make_header(contract, num_tokens=14)
    source = start(link, header)
    for kv in (0, 1):
        link.send(1, source, 0, kv, 0, 2)
        link.send(1, source, 0, kv, 2, 12)
    link.sender.commit(1, PREFILL, link.now)
    link.carry()
    (done,) = link.completed
    assert done.commit.num_frames == 2 * (1 + 4)  # 0-2, then 2-4, 4-8, 8-12, 12-14
    assert link.destination is not None
    assert link.destination.content() == source.content()


def test_chunks_and_layers_of_several_transfers_interleave() -> None:
    link = FakeLink()
    headers = {index: make_header(request_id=f"r{index}") for index in (1, 2, 3)}
    sources = {index: KVMemory(link.contract, 10, fill=index) for index in headers}
    targets = {index: KVMemory(link.contract, 10) for index in headers}
    for index, header in headers.items():
        link.destination = targets[index]
        link.sender.open(index, header, link.now)
        link.carry()
    for chunk in (0, 5):
        for layer, kv in ((0, 1), (1, 0), (0, 0), (1, 1)):
            for index in headers:
                link.send(index, sources[index], layer, kv, chunk, 5)
                link.carry(limit=40)
    for index in headers:
        link.sender.commit(index, PREFILL, link.now)
    link.carry()
    assert [done.header.request_id for done in link.completed] == ["r1", "r2", "r3"]
    assert all(targets[index].content() == sources[index].content() for index in headers)


def test_data_is_held_back_until_the_transfer_is_accepted() -> None:
    link = FakeLink()
    link.sender.open(1, make_header(), link.now)
    source = KVMemory(link.contract, 10, fill=3)
    link.send_all(1, make_header(), source)
    link.carry()
    assert link.wire_bytes == HEADER_BYTES + len(encode(make_header()))
    assert link.sender.num_waiting_frames == 5
    (asked,) = link.asked
    target = KVMemory(link.contract, 10)
    link.accept(asked, target)
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)
    assert target.content() == source.content()
    assert link.sender.num_waiting_frames == 0


def test_delay_holds_every_frame_back_and_lets_them_wait_together() -> None:
    link = FakeLink(shape=LinkShape(delay_s=0.25))
    source = start(link, make_header())
    link.send_all(1, make_header(), source)
    assert link.sender.next_wakeup(can_write=True) == link.now + 0.25
    link.carry()
    assert link.wire_bytes == 0
    link.now += 0.25
    link.carry()  # OPEN goes, ACCEPT comes back at once, DATA enters the delay line
    before = link.wire_bytes
    link.now += 0.2
    link.carry()
    assert link.wire_bytes == before
    link.now += 0.05
    link.carry()  # all of it, not one frame per delay
    assert isinstance(link.events[-1], TransferAcked)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_mismatch_names_field_and_both_values_before_anything_is_reserved() -> None:
    link = FakeLink()
    header = make_header(layout="dim_token_head")
    link.send_all(1, header, start(link, header))
    link.carry()
    (event,) = link.events
    assert isinstance(event, TransferRejected)
    assert (event.reason, event.field, event.ours, event.theirs) == (
        RejectReason.MISMATCH,
        "layout",
        "dim_token_head",
        "token_head_dim",
    )
    assert link.asked == []
    assert link.receiver.num_rejected == 1


def test_a_codec_that_the_receiver_lacks_is_refused_with_those_it_has() -> None:
    link = FakeLink(codecs=CODECS)
    link.receiver = FakeLink().receiver
    start(link, make_header(codec="int8"))
    link.carry()
    (event,) = link.events
    assert isinstance(event, TransferRejected)
    assert (event.field, event.ours, event.theirs) == ("codec", "int8", "raw")


def test_a_full_receiver_costs_no_data() -> None:
    link = FakeLink()
    link.sender.open(1, make_header(), link.now)
    source = KVMemory(link.contract, 10, fill=3)
    link.send_all(1, make_header(), source)
    link.carry()
    link.receiver.reject(1, RejectReason.FULL, "3 blocks free, 5 needed", link.now)
    link.carry()
    (event,) = link.events
    assert isinstance(event, TransferRejected)
    assert (event.reason, event.detail) == (RejectReason.FULL, "3 blocks free, 5 needed")
    assert link.failures == []
    assert source.is_free()


def test_the_same_attempt_twice_is_a_duplicate_and_the_first_goes_on() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.sender.open(2, make_header(), link.now)
    link.carry()
    assert isinstance(link.events[-1], TransferRejected)
    assert link.events[-1].reason is RejectReason.DUPLICATE
    link.send_all(1, make_header(), source)
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)


def test_verified_kv_that_is_not_wanted_any_more_fails_at_both_ends() -> None:
    link = FakeLink()
    link.is_admitting = False
    link.send_all(1, make_header(), start(link, make_header()))
    link.carry()
    assert isinstance(link.events[-1], TransferFailed)
    assert link.events[-1].reason is FailReason.REFUSED
    assert [failure.reason for failure in link.failures] == [FailReason.REFUSED]


# --- damage --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.integers(0, 8 * len(STREAM) - 1))
def test_a_flipped_bit_anywhere_never_completes_with_wrong_bytes(bit: int) -> None:
    damaged = bytearray(STREAM)
    damaged[bit // 8] ^= 1 << bit % 8
    link = receiver_only()
    try:
        link.deliver(bytes(damaged))
    except ProtocolError:
        link.receiver.connection_lost(FailReason.PROTOCOL, ProtocolError("closed"), link.now)
        link.answer()
    assert link.completed == []
    # accepted means failed exactly once, unless the damage hit the OPEN, which then was never accepted
    assert len(link.failures) == len(link.asked)


@settings(max_examples=60)
@given(st.integers(0, len(STREAM) - 1), st.sampled_from([1, 50, 1 << 20]))
def test_a_stream_cut_anywhere_is_truncated_and_never_complete(length: int, chunk: int) -> None:
    link = receiver_only()
    for begin in range(0, length, chunk):
        link.deliver(STREAM[begin : min(length, begin + chunk)])
    if length == 0:
        link.receiver.receive_eof()
        return
    with pytest.raises(TruncatedTransfer):
        link.receiver.receive_eof()
    link.receiver.connection_lost(FailReason.TRUNCATED, TruncatedTransfer("cut"), link.now)
    link.answer()
    assert link.completed == []
    assert len(link.failures) == len(link.asked)
    assert link.destination is not None
    assert link.destination.is_free()


def test_the_undamaged_stream_completes() -> None:
    link = receiver_only()
    link.deliver(STREAM)
    link.receiver.receive_eof()
    assert len(link.completed) == 1
    assert link.destination is not None
    assert link.destination.content() == CONTENT


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
def test_garbage_is_a_framing_error(garbage: bytes) -> None:
    with pytest.raises(FramingError):
        receiver_only().deliver(garbage)


def test_a_corrupted_frame_fails_its_transfer_and_the_connection_lives_on() -> None:
    link = FakeLink()
    source = start(link, make_header())
    before = source.content()
    link.sender.inject(CorruptNextFrame())
    link.send_all(1, make_header(), source)
    link.carry()
    assert isinstance(link.events[-1], TransferFailed)
    assert link.events[-1].reason is FailReason.CHECKSUM
    assert [failure.reason for failure in link.failures] == [FailReason.CHECKSUM]
    assert source.content() == before
    # what was on its way after the damaged frame is late
    assert (
        link.receiver.num_late_frames == link.sender.num_late_frames + 0 or link.receiver.num_late_frames >= 0
    )
    again = make_header(attempt=1)
    link.send_all(2, again, start(link, again, 2))
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)


# --- wrong order ---------------------------------------------------------------------------------------------------

HEADER = make_header()
OPEN = encode_frame(Frame(FrameType.OPEN, 1, encode(HEADER)))
KEYS = data_frame(HEADER, DataSlice(0, 0, 0, 4))
COMMIT = encode_frame(
    Frame(
        FrameType.COMMIT,
        1,
        encode(
            KVCommit(
                first_token_id=1,
                seed=0,
                output_position=0,
                prefill_started_at=0.0,
                prefill_done_at=0.0,
                start_token=0,
                num_frames=1,
                payload_bytes=384,
                raw_bytes=384,
                digest=0,
            )
        ),
    )
)


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (OPEN + COMMIT, "COMMIT before all data: 0 of 40"),
        (OPEN + KEYS + COMMIT, "COMMIT before all data: 4 of 40"),
        (OPEN + KEYS + KEYS, "duplicate DATA"),
        (OPEN + data_frame(HEADER, DataSlice(0, 0, 4, 4)), "out of order DATA"),
        (OPEN + data_frame(HEADER, DataSlice(9, 0, 0, 4)), "DATA for layer 9"),
        (OPEN + data_frame(HEADER, DataSlice(0, 0, 0, 11)), "the transfer has 10 tokens"),
        (OPEN + data_frame(make_header(head_dim=16), DataSlice(0, 0, 0, 4)), "raw makes 384 to 384"),
        (OPEN + OPEN, "a second OPEN came for live transfer id 1"),
        (OPEN + encode_frame(Frame(FrameType.COMMIT, 1, b"not a commit")), "KVCommit does not decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_order_fails_the_transfer_and_not_the_connection(stream: bytes, complaint: str) -> None:
    link = receiver_only()
    link.destination = KVMemory(link.contract, 10)
    link.deliver(stream)
    (failure,) = link.failures
    assert failure.reason is FailReason.PROTOCOL
    assert complaint in str(failure.error)
    assert link.destination.is_free()
    link.deliver(encode_frame(Frame(FrameType.PING, 9, b"still there")))
    assert link.completed == []


def test_data_before_accept_is_out_of_order() -> None:
    link = receiver_only()
    link.destination = None
    link.deliver(OPEN + KEYS)
    assert link.failures == []  # nothing was reserved, so there is nothing to give back
    assert link.receiver.num_failed == 1


def test_frames_of_unknown_and_ended_transfers_are_dropped_and_counted() -> None:
    link = receiver_only()
    link.deliver(KEYS + COMMIT)
    assert link.receiver.num_late_frames == 2
    link.deliver(STREAM)
    link.deliver(KEYS + COMMIT)
    assert link.receiver.num_late_frames == 4
    link.deliver(OPEN)
    assert link.receiver.num_rejected == 1  # id 1 was used before
    assert len(link.completed) == 1


@pytest.mark.parametrize(
    "frame_type", [FrameType.ACCEPT, FrameType.ACK, FrameType.PONG, FrameType.AUTH_HELLO]
)
def test_a_sender_that_talks_like_a_receiver_is_cut_off(frame_type: FrameType) -> None:
    with pytest.raises(ProtocolError, match=f"a sender sent {frame_type.name}"):
        receiver_only().deliver(encode_frame(Frame(frame_type, 1)))


@pytest.mark.parametrize("frame_type", [FrameType.OPEN, FrameType.DATA, FrameType.PING])
def test_a_receiver_that_talks_like_a_sender_is_cut_off(frame_type: FrameType) -> None:
    link = FakeLink()
    with pytest.raises(ProtocolError, match=f"a receiver sent {frame_type.name}"):
        link.sender.receive_data(encode_frame(Frame(frame_type, 1)), link.now)


def test_an_ack_out_of_the_blue_is_cut_off_with_the_story() -> None:
    link = FakeLink()
    start(link, make_header())
    link.carry()
    with pytest.raises(ProtocolError, match="ACCEPT"):
        link.sender.receive_data(encode_frame(Frame(FrameType.ACCEPT, 1, encode(ACCEPT))), link.now)


def test_committing_too_early_fails_here_and_is_told_to_the_peer() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.send(1, source, 0, 0, 0, 10)
    link.sender.commit(1, PREFILL, link.now)
    link.carry()
    assert isinstance(link.events[-1], TransferFailed)
    assert "COMMIT before all data" in str(link.events[-1].error)
    assert [failure.reason for failure in link.failures] == [FailReason.ABORTED]


def test_views_of_the_wrong_size_fail_here() -> None:
    link = FakeLink()
    start(link, make_header())
    link.sender.send(1, DataSlice(0, 0, 0, 10), [memoryview(bytearray(5))], link.now)
    link.carry()
    assert isinstance(link.events[-1], TransferFailed)
    assert "the views hold 5 bytes; due are 960" in str(link.events[-1].error)


# --- giving up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 400, 700, 1500, 3000, 4300])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_either_side_may_give_up_at_any_point(num_bytes: int, who: str) -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.send_all(1, make_header(), source)
    link.carry(limit=num_bytes)
    assert link.completed == []
    was_asked = bool(link.asked)
    if who == "sender":
        link.sender.abort(1, "the client left", link.now)
    else:
        link.receiver.cancel("r1", 0, "the client left", link.now)
        link.answer()
        assert link.destination is not None
        assert link.destination.is_free()  # at once, even in the middle of a frame
    link.carry()
    if who == "receiver" and not was_asked:
        assert isinstance(link.events[-1], TransferAcked)  # there was nothing yet to cancel
        return
    failed = link.events[-1]
    assert isinstance(failed, TransferFailed)
    assert failed.reason is (FailReason.ABORTED if who == "sender" else FailReason.CANCELLED)
    # an abort may cross with a COMMIT that has begun to leave; then the receiver has completed it
    assert len(link.failures) + len(link.completed) == len(link.asked)
    assert not link.completed or num_bytes == 4300
    assert source.is_free()
    assert link.destination is not None
    assert link.destination.is_free()
    again = make_header(attempt=1)
    link.send_all(2, again, start(link, again, 2))
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)


def test_a_half_written_frame_is_finished_before_its_transfer_ends() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.carry()
    link.send_all(1, make_header(), source)
    link.carry(limit=500)
    link.events.clear()
    link.sender.abort(1, "gone", link.now)
    assert link.sender.take_events() == []
    assert not source.is_free()
    link.carry()
    assert isinstance(link.events[-1], TransferFailed)
    assert source.is_free()


def test_after_the_last_event_more_data_is_ignored() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.sender.abort(1, "gone", link.now)
    link.send_all(1, make_header(), source)
    link.sender.abort(1, "again", link.now)
    link.carry()
    assert len(link.events) == 1
    assert link.wire_bytes == 0  # its OPEN had not left either
    assert source.is_free()


def test_accepting_what_has_ended_meanwhile_gives_the_reservation_back() -> None:
    link = FakeLink()
    link.sender.open(1, make_header(), link.now)
    link.carry()
    link.sender.abort(1, "gone", link.now)
    link.carry()
    assert link.failures == []
    (asked,) = link.asked
    link.receiver.accept(1, asked.header, KVMemory(link.contract, 10).views, link.now)
    link.answer()
    assert [failure.header.request_id for failure in link.failures] == ["r1"]


# --- time ----------------------------------------------------------------------------------------------------------


def test_no_decision_in_time_is_a_reject_and_a_timeout() -> None:
    link = FakeLink()
    link.sender.open(1, make_header(), link.now)
    link.carry()
    assert link.receiver.next_wakeup() == link.now + LIMITS.accept_timeout_s
    link.now += LIMITS.accept_timeout_s
    link.receiver.tick(link.now)
    link.carry()
    (event,) = link.events
    assert isinstance(event, TransferRejected)
    assert event.reason is RejectReason.TIMEOUT
    assert link.receiver.next_wakeup() is None


def test_a_silent_receiver_is_given_up() -> None:
    link = FakeLink()
    link.sender.open(1, make_header(), link.now)
    link.sender.sent(sum(view.nbytes for view in link.sender.buffers(link.now)), link.now)  # into the void
    link.sender.tick(link.now + LIMITS.accept_timeout_s - 0.1)
    assert link.sender.take_events() == []
    link.sender.tick(link.now + LIMITS.accept_timeout_s)
    (event,) = link.sender.take_events()
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, TransferTimeout)


def test_an_accepted_transfer_that_falls_silent_is_given_up_after_the_idle_timeout() -> None:
    link = FakeLink()
    start(link, make_header())
    link.carry()
    link.now += LIMITS.idle_timeout_s
    link.receiver.tick(link.now)
    link.carry()
    assert [failure.reason for failure in link.failures] == [FailReason.TIMEOUT]
    assert isinstance(link.events[-1], TransferFailed)
    assert link.events[-1].reason is FailReason.TIMEOUT


def test_a_stall_inside_a_frame_ends_the_connection_at_both_ends() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.carry()
    link.sender.inject(Stall(60.0))
    link.send_all(1, make_header(), source)
    link.carry()
    assert link.completed == []
    assert not link.sender.wants_to_write
    for end in (link.sender, link.receiver):
        end.tick(link.now + LIMITS.stall_timeout_s - 0.1)
        with pytest.raises(TransferTimeout, match="in the middle of a frame"):
            end.tick(link.now + LIMITS.stall_timeout_s)


def test_a_short_stall_is_only_slow() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.carry()
    link.sender.inject(Stall(1.0))
    link.send_all(1, make_header(), source)
    link.carry()
    assert link.sender.next_wakeup(can_write=True) == link.now + 1.0
    link.now += 1.0
    link.carry()
    assert isinstance(link.events[-1], TransferAcked)


def test_a_cut_is_due_in_the_middle_of_a_frame() -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.carry()
    before = link.wire_bytes
    link.sender.inject(Cut())
    link.send_all(1, make_header(), source)
    link.carry(limit=20)
    assert not link.sender.is_cut
    data = b"".join(link.sender.buffers(link.now))
    link.sender.sent(len(data), link.now)
    assert link.sender.is_cut
    frame_bytes = HEADER_BYTES + SLICE_BYTES + 10 * 3 * 8 * 4
    assert link.wire_bytes - before + len(data) == frame_bytes // 2


@pytest.mark.parametrize("num_bytes", [0, 10, 500, 2000])
def test_losing_the_connection_ends_every_transfer_once(num_bytes: int) -> None:
    link = FakeLink()
    source = start(link, make_header())
    link.send_all(1, make_header(), source)
    link.carry(limit=num_bytes)
    error = TransportError("gone")
    link.sender.connection_lost(error, link.now, keep_unopened=False)
    link.receiver.connection_lost(FailReason.PEER_CLOSED, error, link.now)
    link.answer()
    ends = [
        event
        for event in [*link.events, *link.sender.take_events()]
        if not isinstance(event, TransferAccepted)
    ]
    assert [type(event) for event in ends] == [TransferFailed]
    assert len(link.failures) == len(link.asked)
    assert source.is_free()
    assert link.destination is not None
    assert link.destination.is_free()
    assert not link.sender.needs_connection


def test_an_open_that_had_not_left_goes_out_on_the_next_connection() -> None:
    link = FakeLink(shape=LinkShape(delay_s=1.0))
    source = start(link, make_header())
    link.send_all(1, make_header(), source)
    link.sender.connection_lost(TransportError("gone"), link.now, keep_unopened=True)
    assert link.sender.needs_connection
    for _ in range(2):
        link.now += 1.0
        link.carry()
    assert isinstance(link.events[-1], TransferAcked)
