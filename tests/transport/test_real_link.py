"""KVSender and KVReceiver over loopback TCP: threads, reconnecting, guarantees about views."""

import gc
import socket
import struct
import threading

import pytest

from tests.transport.wire import (
    ACCEPT,
    LIMITS,
    SECRET,
    WAIT_S,
    KVMemory,
    RealLink,
    RecordingHandler,
    make_contract,
    make_header,
    refuse,
)
from transport.auth import ClientHandshake, ServerHandshake, authenticate_socket
from transport.codec import Codec, RawCodec
from transport.errors import AuthError, OutboxFull, PeerClosed, TransferTimeout, TransportError, UnknownCodec
from transport.events import TransferAcked, TransferEvent, TransferFailed, TransferRejected
from transport.faults import CorruptNextFrame, Cut, Stall
from transport.frame import DataSlice, Frame, FrameType, encode_frame, encode_slice
from transport.int8_codec import Int8Codec
from transport.kv_transfer import TransferLimits
from transport.link import LinkShape
from transport.lossless_codec import LosslessCodec
from transport.messages import FailReason, KVHeader, RejectReason, encode
from transport.probe import probe
from transport.receiver import KVReceiver
from transport.receiver_peer import OpenReply
from transport.sender import KVSender

CODECS: tuple[Codec, ...] = (RawCodec(), Int8Codec(), LosslessCodec())
MB = make_contract(num_layers=2, num_kv_heads=4, head_dim=64, block_size=16)  # 4 KiB per token
BIG = 512  # tokens: 2 MiB, two frames per part at the most


def connect(link: RealLink, role: str = "prefill") -> socket.socket:
    """A raw authenticated connection to the receiver, for a sender that misbehaves."""
    sock = socket.create_connection(link.receiver.address, timeout=WAIT_S)
    authenticate_socket(sock, ClientHandshake(SECRET, role, "kv"))
    sock.settimeout(WAIT_S)
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


# --- what should be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("codec", ["raw", "int8", "lossless"])
def test_transfers_follow_each_other_on_one_connection(path: str, codec: str) -> None:
    with RealLink(MB, CODECS) as link:
        arrived = []
        for attempt in range(3):
            header = make_header(MB, path=path, codec=codec, attempt=attempt, num_tokens=BIG + attempt)
            source = KVMemory(MB, header.num_tokens)
            source.storage[:] = struct.pack("<f", 127.0 * 2**attempt) * (len(source.storage) // 4)
            event = link.transfer(header, source)
            assert isinstance(event, TransferAcked)
            assert event.stats.raw_bytes == header.raw_bytes
            assert event.stats.first_frame_at <= event.stats.commit_sent_at <= event.stats.acked_at
            assert 0 < event.stats.busy_s <= event.stats.acked_at - event.stats.first_frame_at
            assert link.end().header == header
            arrived.append(link.handler.memories["r1", attempt].content() == source.content())
        assert arrived == [True] * 3  # scales are powers of two: int8 is exact too
        assert link.sender.num_connections == 1


def test_many_transfers_at_once_from_many_threads() -> None:
    with RealLink(MB) as link:
        sources = {}

        def send(index: int) -> None:
            header = make_header(MB, request_id=f"r{index}", num_tokens=40 + index)
            sources[index] = KVMemory(MB, header.num_tokens, fill=index + 1)
            link.send_all(link.sender.open(header), header, sources[index])

        threads = [threading.Thread(target=send, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert all(isinstance(link.last_event(), TransferAcked) for _ in threads)
        for index, source in sources.items():
            assert link.handler.memories[f"r{index}", 0].content() == source.content()
        assert link.sender.num_connections == 1
        assert link.receiver.counts().completed == 8


def test_a_slow_decision_holds_up_nobody_else() -> None:
    with RealLink(MB) as link:
        waiting: list[OpenReply] = []

        def decide(header: KVHeader, reply: OpenReply) -> bool:
            if header.request_id == "slow":
                waiting.append(reply)
                return True
            return False

        link.handler.decide = decide
        slow, quick = make_header(MB, request_id="slow"), make_header(MB, request_id="quick")
        source = KVMemory(MB, 10, fill=5)
        link.send_all(link.sender.open(slow), slow, source)
        assert link.transfer(quick, source) is not None
        assert link.end().header == quick
        assert link.handler.ended.empty()
        link.handler.accept(slow, waiting[0])
        assert isinstance(link.last_event(), TransferAcked)
        assert link.end().header == slow


# --- refusals ------------------------------------------------------------------------------------------------------


def test_full_and_mismatch_reach_the_sender_with_their_values() -> None:
    with RealLink() as link:
        link.handler.decide = refuse(RejectReason.FULL, "5 blocks needed, 3 free")
        event = link.transfer(make_header(), KVMemory(link.contract, 10))
        assert isinstance(event, TransferRejected)
        assert (event.reason, event.detail) == (RejectReason.FULL, "5 blocks needed, 3 free")
        other = make_contract(model_fingerprint="another model")
        event = link.transfer(make_header(other, attempt=1), KVMemory(other, 10))
        assert isinstance(event, TransferRejected)
        assert (event.field, event.ours, event.theirs) == ("model_fingerprint", "another model", "abc")
        assert link.handler.ended.empty()


def test_refusing_admission_fails_the_transfer_at_both_ends() -> None:
    with RealLink() as link:
        link.handler.is_admitting = False
        event = link.transfer(make_header(), KVMemory(link.contract, 10))
        assert isinstance(event, TransferFailed)
        assert event.reason is FailReason.REFUSED
        assert link.end().reason is FailReason.REFUSED


def test_a_wrong_secret_is_an_auth_failure_and_disturbs_nobody() -> None:
    with RealLink() as link:
        source = KVMemory(link.contract, 10, fill=3)
        events: list[TransferEvent] = []
        came = threading.Event()

        def record(event: TransferEvent) -> None:
            events.append(event)
            came.set()

        stranger = KVSender(link.receiver.address, b"a secret of another cluster", record)
        stranger.open(make_header())
        assert came.wait(WAIT_S)
        stranger.close()
        (event,) = events
        assert isinstance(event, TransferFailed)
        assert event.reason is FailReason.AUTH
        assert "different secrets" in str(event.error)
        assert link.handler.opened.empty()
        assert isinstance(link.transfer(make_header(), source), TransferAcked)
        link.refused.get(timeout=WAIT_S)
        assert link.receiver.counts().auth_failures == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100, bytes(1000)])
def test_garbage_on_the_port_is_closed_and_disturbs_nobody(garbage: bytes) -> None:
    with RealLink() as link, socket.create_connection(link.receiver.address, timeout=WAIT_S) as sock:
        sock.sendall(garbage)
        assert is_closed_by_peer(sock)
        assert isinstance(link.transfer(make_header(), KVMemory(link.contract, 10)), TransferAcked)


def test_silent_strangers_cannot_fill_the_receiver() -> None:
    with RealLink() as link:
        strangers = [socket.create_connection(link.receiver.address, timeout=WAIT_S) for _ in range(60)]
        # those beyond the bound are closed at once
        assert is_closed_by_peer(strangers[-1])
        for stranger in strangers:
            stranger.close()
        assert link.receiver.counts().connections == 0


def test_frames_before_authentication_are_not_read() -> None:
    with RealLink() as link, socket.create_connection(link.receiver.address, timeout=WAIT_S) as sock:
        sock.sendall(encode_frame(Frame(FrameType.OPEN, 1, encode(make_header()))))
        assert is_closed_by_peer(sock)
        assert link.handler.opened.empty()


def test_a_short_secret_and_a_port_in_use_are_refused_at_once() -> None:
    handler = RecordingHandler(make_contract())
    with pytest.raises(ValueError, match="the secret has 3 bytes"):
        KVReceiver(handler, make_contract(), b"abc")
    with RealLink() as link:
        port = link.receiver.address[1]
        with pytest.raises(
            TransportError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
        ):
            KVReceiver(handler, make_contract(), SECRET, port=port)


def test_an_unknown_codec_is_refused_before_anything_is_sent() -> None:
    with RealLink() as link, pytest.raises(UnknownCodec, match="codec is 'int8'; allowed here: raw"):
        link.sender.open(make_header(codec="int8"))


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_corrupt_frame_costs_one_transfer_and_not_the_connection() -> None:
    with RealLink(MB) as link:
        source = KVMemory(MB, BIG, fill=3)
        link.sender.inject(CorruptNextFrame())
        event = link.transfer(make_header(MB, num_tokens=BIG), source)
        assert isinstance(event, TransferFailed)
        assert event.reason is FailReason.CHECKSUM
        assert link.end().reason is FailReason.CHECKSUM
        assert isinstance(link.transfer(make_header(MB, num_tokens=BIG, attempt=1), source), TransferAcked)
        assert link.sender.num_connections == 1


def test_a_cut_fails_both_ends_and_the_next_transfer_reconnects() -> None:
    with RealLink(MB) as link:
        source = KVMemory(MB, BIG, fill=3)
        link.sender.inject(Cut())
        event = link.transfer(make_header(MB, num_tokens=BIG), source)
        assert isinstance(event, TransferFailed)
        assert isinstance(event.error, PeerClosed)
        assert link.end().reason in (FailReason.PEER_CLOSED, FailReason.TRUNCATED)
        assert isinstance(link.transfer(make_header(MB, num_tokens=BIG, attempt=1), source), TransferAcked)
        assert link.sender.num_connections == 2


def test_a_stall_longer_than_the_limit_is_a_timeout() -> None:
    limits = TransferLimits(accept_timeout_s=10, stall_timeout_s=0.2, ack_timeout_s=10)
    with RealLink(MB, limits=limits) as link:
        link.sender.inject(Stall(60.0))
        event = link.transfer(make_header(MB, num_tokens=BIG), KVMemory(MB, BIG, fill=3))
        assert isinstance(event, TransferFailed)
        # whoever notices first closes; the other then sees that
        reasons = {event.reason, link.end().reason}
        assert FailReason.TIMEOUT in reasons
        assert reasons <= {FailReason.TIMEOUT, FailReason.PEER_CLOSED, FailReason.TRUNCATED}


def test_a_receiver_that_dies_in_mid_transfer_fails_the_sender() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        ended: list[TransferEvent] = []
        done = threading.Event()

        def record(event: TransferEvent) -> None:
            ended.append(event)
            if isinstance(event, TransferFailed):
                done.set()

        sender = KVSender(address, SECRET, record, limits=LIMITS)
        header = make_header(MB, num_tokens=BIG)
        source = KVMemory(MB, BIG, fill=3)
        transfer_id = sender.open(header)
        sender.send(transfer_id, 0, 0, 0, BIG, source.views(0, 0, 0, BIG))
        sock, _ = listener.accept()
        with sock:
            authenticate_socket(sock, ServerHandshake(SECRET, "decode", "kv"))
            sock.sendall(encode_frame(Frame(FrameType.ACCEPT, transfer_id, encode(ACCEPT))))
            assert sock.recv(1 << 16)
        assert done.wait(WAIT_S)
        sender.close()
    assert isinstance(ended[-1], TransferFailed)
    assert ended[-1].reason is FailReason.PEER_CLOSED
    assert source.is_free()


@pytest.mark.parametrize("num_frames", [0, 1])
def test_a_sender_that_dies_in_mid_transfer_frees_the_reservation(num_frames: int) -> None:
    with RealLink() as link:
        with connect(link) as sock:
            sock.sendall(encode_frame(Frame(FrameType.OPEN, 1, encode(make_header()))))
            assert sock.recv(1 << 16)  # ACCEPT
            payload = encode_slice(DataSlice(0, 0, 0, 10)) + bytes(960)
            sock.sendall(encode_frame(Frame(FrameType.DATA, 1, payload))[: 500 * num_frames])
            if num_frames:
                assert link.handler.first_data.wait(WAIT_S)
        assert link.end().reason is FailReason.TRUNCATED
        gc.collect()
        assert link.handler.memories["r1", 0].is_free()


def test_nobody_listening_is_peer_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    events: list[TransferEvent] = []
    came = threading.Event()

    def record(event: TransferEvent) -> None:
        events.append(event)
        came.set()

    sender = KVSender(address, SECRET, record)
    sender.open(make_header())
    assert came.wait(WAIT_S)
    sender.close()
    (event,) = events
    assert isinstance(event, TransferFailed)
    assert event.reason is FailReason.PEER_CLOSED
    assert "Connection refused" in str(event.error)


def test_a_restarted_receiver_is_found_again() -> None:
    with RealLink() as link:
        source = KVMemory(link.contract, 10, fill=3)
        assert isinstance(link.transfer(make_header(), source), TransferAcked)
        host, port = link.receiver.address
        link.receiver.close()
        link.receiver = KVReceiver(link.handler, link.contract, SECRET, host=host, port=port)
        ends = [link.transfer(make_header(attempt=attempt), source) for attempt in (1, 2)]
        # the first may have gone into the connection that was just dying; never the second
        assert isinstance(ends[1], TransferAcked)


# --- giving up -----------------------------------------------------------------------------------------------------


def test_abort_in_mid_transfer_ends_both_ends() -> None:
    with RealLink(MB, shape=LinkShape(bandwidth_bytes_per_s=4e6)) as link:
        header = make_header(MB, num_tokens=BIG)
        source = KVMemory(MB, BIG, fill=3)
        transfer_id = link.sender.open(header)
        link.send_all(transfer_id, header, source)
        assert link.handler.first_data.wait(WAIT_S)
        link.sender.abort(transfer_id, "the client left")
        event = link.last_event()
        assert isinstance(event, TransferFailed)
        assert event.reason is FailReason.ABORTED
        ended = link.end()
        assert ended.reason is FailReason.ABORTED
        assert "the client left" in str(ended.error)


def test_cancel_in_mid_transfer_ends_both_ends_and_late_frames_are_dropped() -> None:
    with RealLink(MB, shape=LinkShape(bandwidth_bytes_per_s=4e6)) as link:
        header = make_header(MB, num_tokens=BIG)
        transfer_id = link.sender.open(header)
        link.send_all(transfer_id, header, KVMemory(MB, BIG, fill=3))
        assert link.handler.first_data.wait(WAIT_S)
        link.receiver.cancel("r1", 0, "the client left")
        ended = link.end()
        assert ended.reason is FailReason.CANCELLED
        event = link.last_event()
        assert isinstance(event, TransferFailed)
        assert event.reason is FailReason.CANCELLED
        again = make_header(MB, attempt=1, num_tokens=1)
        assert isinstance(link.transfer(again, KVMemory(MB, 1)), TransferAcked)
        assert link.receiver.counts().late_frames >= 1


@pytest.mark.parametrize("fate", ["acked", "rejected", "corrupt", "cut", "aborted", "closed"])
def test_no_view_is_held_after_the_last_event(fate: str) -> None:
    """At the moment of the event, not some time after it: that is when the engine reuses the blocks."""
    with RealLink(MB) as link:
        header = make_header(MB, num_tokens=BIG)
        source = KVMemory(MB, BIG, fill=3)
        free_at_event: list[bool] = []
        link.on_event = lambda event: (
            free_at_event.append(source.is_free()) if type(event).__name__ != "TransferAccepted" else None
        )
        link.handler.decide = lambda header, reply: True  # answered below, when all is handed over
        if fate in ("corrupt", "cut"):
            link.sender.inject(CorruptNextFrame() if fate == "corrupt" else Cut())
        if fate in ("aborted", "closed"):
            link.sender.set_link(LinkShape(bandwidth_bytes_per_s=4e6))
        transfer_id = link.sender.open(header)
        link.send_all(transfer_id, header, source)
        _, reply = link.handler.opened.get(timeout=WAIT_S)
        if fate == "rejected":
            reply.reject(RejectReason.FULL, "")
        else:
            link.handler.accept(header, reply)
        if fate in ("aborted", "closed"):
            assert link.handler.first_data.wait(WAIT_S)
        if fate == "aborted":
            link.sender.abort(transfer_id, "")
        if fate == "closed":
            link.sender.close()
        link.last_event()
        assert free_at_event == [True]


def test_closing_the_receiver_fails_what_is_accepted_and_frees_its_views() -> None:
    with RealLink() as link:
        link.sender.open(make_header())
        assert link.events.get(timeout=WAIT_S) is not None  # accepted
        link.receiver.close()
        assert link.end().reason is FailReason.CLOSED
        gc.collect()
        assert link.handler.memories["r1", 0].is_free()
        assert isinstance(link.last_event(), TransferFailed)


def test_an_answer_after_the_sender_has_gone_gives_the_reservation_back() -> None:
    with RealLink() as link:
        replies: list[OpenReply] = []
        link.handler.decide = lambda header, reply: replies.append(reply) is None
        link.sender.open(make_header())
        header, _ = link.handler.opened.get(timeout=WAIT_S)
        link.sender.close()
        link.receiver.close()
        link.handler.accept(header, replies[0])
        assert link.end().reason is FailReason.PEER_CLOSED


def test_a_closed_sender_refuses_new_transfers() -> None:
    with RealLink() as link:
        link.sender.close()
        link.sender.close()
        with pytest.raises(PeerClosed, match="is closed"):
            link.sender.open(make_header())
        link.sender.abort(1, "no effect")


def test_the_outbox_is_bounded() -> None:
    with RealLink() as link:
        link.handler.decide = lambda header, reply: True
        sender = KVSender(link.receiver.address, SECRET, lambda event: None, max_waiting_frames=3)
        header = make_header()
        source = KVMemory(link.contract, 10)
        transfer_id = sender.open(header)
        link.handler.opened.get(timeout=WAIT_S)
        for layer, kv in ((0, 0), (0, 1), (1, 0)):
            sender.send(transfer_id, layer, kv, 0, 10, source.views(layer, kv, 0, 10))
        with pytest.raises(OutboxFull, match="3 frames wait"):
            sender.send(transfer_id, 1, 1, 0, 10, source.views(1, 1, 0, 10))
        sender.close()


# --- the link ------------------------------------------------------------------------------------------------------


def test_delay_is_paid_both_ways_and_can_change_while_connected() -> None:
    shape = LinkShape(delay_s=0.03)
    with RealLink(shape=shape) as link:
        source = KVMemory(link.contract, 10, fill=3)
        slow = link.transfer(make_header(), source)
        assert isinstance(slow, TransferAcked)
        # OPEN there, ACCEPT back; then DATA there, ACK back: a lower bound, whatever else the machine does
        assert slow.stats.accepted_at - slow.stats.opened_at >= 0.03
        assert slow.stats.acked_at - slow.stats.first_frame_at >= 0.03
        link.sender.set_link(LinkShape())
        link.receiver.set_link(LinkShape())
        assert isinstance(link.transfer(make_header(attempt=1), source), TransferAcked)


def test_a_probe_measures_without_disturbing() -> None:
    with RealLink(shape=LinkShape(delay_s=0.005)) as link:
        result = probe(link.receiver.address, SECRET, LinkShape(8e6, delay_s=0.005), 400_000)
        assert result.rtt_s >= 0.01
        assert 0 < result.achieved_bytes_per_s < 40e6
        assert link.handler.opened.empty()
        assert isinstance(link.transfer(make_header(), KVMemory(link.contract, 10)), TransferAcked)


def test_probe_errors_say_what_is_wrong() -> None:
    with RealLink() as link:
        with pytest.raises(AuthError):
            probe(link.receiver.address, b"x" * 32, LinkShape(), 1000)
        with pytest.raises(ValueError, match="num_bytes is 0"):
            probe(link.receiver.address, SECRET, LinkShape(), 0)
        with pytest.raises(TransferTimeout, match=r"took longer than 0\.2 s"):
            probe(link.receiver.address, SECRET, LinkShape(1e5), 1_000_000, timeout_s=0.2)
        address = link.receiver.address
    with pytest.raises(PeerClosed, match="failed"):
        probe(address, SECRET, LinkShape(), 1000)
