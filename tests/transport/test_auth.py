import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.wire import SECRET, WAIT_S
from transport.auth import (
    MAX_AUTH_PAYLOAD_BYTES,
    ClientHandshake,
    ServerHandshake,
    authenticate_socket,
    authenticate_stream,
)
from transport.errors import AuthError
from transport.frame import Frame, FrameType, encode_frame


class Exchange:
    """Both ends of one handshake, carried by hand. ``tamper`` may change any message on its way."""

    def __init__(self, client: ClientHandshake, server: ServerHandshake) -> None:
        self.client, self.server = client, server
        self.messages: list[bytes] = []

    def run(self, tamper: Callable[[int, bytes], bytes] = lambda index, message: message) -> None:
        message = self.client.start()
        ends: list[ClientHandshake | ServerHandshake] = [self.server, self.client]
        while message:
            end = ends[len(self.messages) % 2]
            self.messages.append(message)
            message = tamper(len(self.messages) - 1, message)
            reply = b""
            while message:
                num_bytes = end.bytes_needed
                reply = end.receive(message[:num_bytes])
                message = message[num_bytes:]
            message = reply


def make_exchange(
    client_secret: bytes = SECRET, client_channel: str = "kv", server_channel: str = "kv"
) -> Exchange:
    return Exchange(
        ClientHandshake(client_secret, "prefill", client_channel),
        ServerHandshake(SECRET, "decode", server_channel),
    )


def test_both_ends_learn_each_others_role() -> None:
    exchange = make_exchange()
    exchange.run()
    assert exchange.client.is_done
    assert exchange.server.is_done
    assert (exchange.client.peer_role, exchange.server.peer_role) == ("decode", "prefill")
    assert len(exchange.messages) == 4


def test_a_wrong_secret_is_told_to_its_holder() -> None:
    exchange = make_exchange(client_secret=b"some other secret, also 32 bytes")
    with pytest.raises(AuthError, match="different secrets"):
        exchange.run()
    assert not exchange.server.is_done


def test_another_channel_is_refused() -> None:
    with pytest.raises(AuthError, match="asked for channel 'control'; this port serves 'kv'"):
        make_exchange(client_channel="control").run()


@given(st.integers(0, 2), st.data())
def test_any_changed_bit_of_the_three_messages_that_matter_is_refused(
    index: int, data: st.DataObject
) -> None:
    def flip(at: int, message: bytes) -> bytes:
        if at != index:
            return message
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    exchange = make_exchange()
    with pytest.raises(AuthError):
        exchange.run(flip)
    assert not exchange.server.is_done


def test_a_recorded_client_does_not_get_in_again() -> None:
    recorded = make_exchange()
    recorded.run()
    server = ServerHandshake(SECRET, "decode", "kv")
    hello, _, response, _ = recorded.messages
    for piece in (hello[:32], hello[32:], response[:32]):
        server.receive(piece)
    with pytest.raises(AuthError, match="did not prove"):
        server.receive(response[32:])
    assert not server.is_done


def test_a_clients_proof_cannot_be_the_servers_own_reflected() -> None:
    server = ServerHandshake(SECRET, "decode", "kv")
    hello = ClientHandshake(SECRET, "prefill", "kv").start()
    server.receive(hello[:32])
    challenge = server.receive(hello[32:])
    mac = challenge[-32:]
    response = encode_frame(Frame(FrameType.AUTH_RESPONSE, 0, b"\x81\xa3mac\xc4\x20" + mac))
    server.receive(response[:32])
    with pytest.raises(AuthError, match="did not prove"):
        server.receive(response[32:])


@given(st.binary(min_size=32, max_size=32))
def test_garbage_ends_after_one_header(garbage: bytes) -> None:
    server = ServerHandshake(SECRET, "decode", "kv")
    with pytest.raises(AuthError, match="does not speak this protocol"):
        server.receive(garbage)


@pytest.mark.parametrize(
    "frame",
    [Frame(FrameType.OPEN, 1, b"x"), Frame(FrameType.AUTH_HELLO, 0, bytes(MAX_AUTH_PAYLOAD_BYTES + 1))],
    ids=["another type", "too large"],
)
def test_other_frames_and_large_ones_are_refused_by_their_header(frame: Frame) -> None:
    server = ServerHandshake(SECRET, "decode", "kv")
    with pytest.raises(AuthError, match=r"due is AUTH_HELLO of at most 512"):
        server.receive(encode_frame(frame)[:32])


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="the secret has 5 bytes; allowed is 16 or more"):
        ServerHandshake(b"short", "decode", "kv")


def test_sockets_authenticate_and_read_nothing_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = ServerHandshake(SECRET, "decode", "kv")
        thread = threading.Thread(target=authenticate_socket, args=(theirs, server))
        thread.start()
        authenticate_socket(ours, ClientHandshake(SECRET, "prefill", "kv"))
        ours.sendall(b"what follows")
        thread.join(WAIT_S)
        assert server.is_done
        assert theirs.recv(100) == b"what follows"


def test_a_silent_peer_is_given_up_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(AuthError, match=r"did not authenticate within 0\.05 s"):
        authenticate_socket(ours, ServerHandshake(SECRET, "decode", "kv"), deadline_s=0.05)


def test_a_peer_that_leaves_is_an_auth_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"PDKV")
        theirs.close()
        with pytest.raises(AuthError, match="closed the connection during authentication"):
            authenticate_socket(ours, ServerHandshake(SECRET, "decode", "kv"))


async def test_streams_authenticate_and_refuse_in_the_same_way() -> None:
    outcomes: asyncio.Queue[str] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ServerHandshake(SECRET, "router", "control")
        try:
            await authenticate_stream(reader, writer, handshake)
            outcomes.put_nowait(f"{handshake.peer_role}: {(await reader.readexactly(4)).decode()}")
        except AuthError as error:
            outcomes.put_nowait(str(error))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        await authenticate_stream(reader, writer, ClientHandshake(SECRET, "decode", "control"))
        writer.write(b"next")
        assert await outcomes.get() == "decode: next"
        writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        with pytest.raises(AuthError, match="different secrets"):
            await authenticate_stream(reader, writer, ClientHandshake(b"x" * 32, "decode", "control"))
        writer.close()
        assert "closed the connection" in await outcomes.get()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"garbage bytes on the port, more than one header of them")
        assert "does not speak this protocol" in await outcomes.get()
        writer.close()


async def test_a_silent_stream_is_given_up_at_the_deadline() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        with pytest.raises(AuthError, match=r"within 0\.05 s"):
            await authenticate_stream(
                reader, writer, ClientHandshake(SECRET, "a", "control"), deadline_s=0.05
            )
        writer.close()
        await writer.wait_closed()
