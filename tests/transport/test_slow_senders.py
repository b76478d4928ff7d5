"""Senders that trickle or stop in the middle of a frame, beside one that does not."""

import socket

from tests.transport.fuzz import CONTRACT, TOKENS, recording, split_frames
from tests.transport.wire import LIMITS, SECRET, WAIT_S, KVMemory, RealLink, make_header
from transport.auth import ClientHandshake, authenticate_socket
from transport.events import TransferAcked
from transport.frame import Frame, FrameDecoder, FrameType, decode_header, encode_frame
from transport.messages import FailReason, encode

NUM_SLOW = 5


class SlowSender:
    """A real connection of its own on which one recorded transfer is told bit by bit."""

    def __init__(self, link: RealLink, name: str) -> None:
        self.socket = socket.create_connection(link.receiver.address, timeout=WAIT_S)
        authenticate_socket(self.socket, ClientHandshake(SECRET, "prefill", "kv"))
        self.socket.settimeout(WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = [frame for frame in recording("raw").frames if decode_header(frame[:32]).transfer_id == 1]
        opening = encode(make_header(CONTRACT, request_id=name, num_tokens=TOKENS))
        frames[0] = encode_frame(Frame(FrameType.OPEN, 1, opening))
        self.rest = b"".join(frames)
        self._answers = FrameDecoder()

    def say(self, num_bytes: int) -> None:
        self.socket.sendall(self.rest[:num_bytes])
        self.rest = self.rest[num_bytes:]

    def say_open(self) -> None:
        self.say(len(split_frames(self.rest)[0]))
        assert self.hear() is FrameType.ACCEPT

    def hear(self) -> FrameType:
        while not isinstance(frame := self._answers.next_frame(), Frame):
            self._answers.receive_data(self.socket.recv(4096))
        return frame.type


def test_senders_that_stop_inside_a_frame_hold_up_nobody_else() -> None:
    with RealLink(CONTRACT) as link:
        slow = [SlowSender(link, f"slow-{index}") for index in range(NUM_SLOW)]
        for sender in slow:
            sender.say_open()
            sender.say(40)  # a header and part of what it announces
        source = KVMemory(CONTRACT, TOKENS, fill=7)
        for attempt in range(3):
            header = make_header(CONTRACT, request_id="quick", attempt=attempt, num_tokens=TOKENS)
            assert isinstance(link.transfer(header, source), TransferAcked)
            assert link.end().header == header
        assert link.handler.ended.empty()
        for sender in slow:
            while sender.rest:
                sender.say(11)
            assert sender.hear() is FrameType.ACK
            sender.socket.close()
        for _ in slow:
            assert link.end().commit is not None
        contents = recording("raw").contents
        assert all(
            link.handler.memories[f"slow-{index}", 0].content() == contents["r1"] for index in range(NUM_SLOW)
        )


def test_a_sender_that_stays_silent_loses_its_own_transfer_only() -> None:
    limits = type(LIMITS)(accept_timeout_s=10, stall_timeout_s=0.5, ack_timeout_s=10, idle_timeout_s=30)
    with RealLink(CONTRACT, limits=limits) as link:
        silent = SlowSender(link, "silent")
        silent.say_open()
        silent.say(40)
        header = make_header(CONTRACT, request_id="quick", num_tokens=TOKENS)
        source = KVMemory(CONTRACT, TOKENS, fill=7)
        event = link.transfer(header, source)
        assert isinstance(event, TransferAcked)
        ends = {end.header.request_id: end for end in (link.end(), link.end())}
        assert ends["quick"].commit is not None
        assert ends["silent"].reason is FailReason.TIMEOUT
        silent.socket.close()
        assert link.handler.memories["silent", 0].is_free()
