"""Measures a link by sending real bytes through a real authenticated connection. Blocking; a few calls deep.

The receiver of the far end discards PING payloads and answers each with a PONG, so nothing else is disturbed, except
that the bytes do share the link.
"""

import socket
import time
from dataclasses import dataclass

from transport.auth import AUTH_DEADLINE_S, ClientHandshake, authenticate_socket
from transport.client_connection import KV_CHANNEL, READ_BYTES
from transport.errors import PeerClosed, ProtocolError, TransferTimeout
from transport.frame import Frame, FrameDecoder, FrameType, NeedData, encode_frame
from transport.link import LinkShape, frame_bytes, shape_socket

NUM_ROUND_TRIPS = 5
PROBE_ROLE = "probe"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    achieved_bytes_per_s: float
    rtt_s: float  # the shortest of a few round trips with nothing else in flight


def probe(
    address: tuple[str, int], secret: bytes, shape: LinkShape, num_bytes: int, timeout_s: float = 30.0
) -> ProbeResult:
    """Sends ``num_bytes`` shaped as given and times their way to the far end.

    Start-up of a fresh connection is in the result, so use some 20 ms worth of bytes or more. Raises PeerClosed,
    AuthError, TransferTimeout, ProtocolError, and ValueError for num_bytes < 1.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes is {num_bytes}; allowed is 1 or more")
    where = f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection(address, timeout=min(timeout_s, AUTH_DEADLINE_S)) as sock:
            shape_socket(sock, shape)
            authenticate_socket(sock, ClientHandshake(secret, PROBE_ROLE, KV_CHANNEL))
            decoder = FrameDecoder()
            rtts_s = []
            for _ in range(NUM_ROUND_TRIPS):
                started_at = time.monotonic()
                _ping(sock, decoder, [1], shape, deadline)
                rtts_s.append(time.monotonic() - started_at)
            rtt_s = min(rtts_s)
            step = frame_bytes(shape)
            sizes = [min(step, num_bytes - start) for start in range(0, num_bytes, step)]
            started_at = time.monotonic()
            _ping(sock, decoder, sizes, shape, deadline)
            took_s = time.monotonic() - started_at
    except TimeoutError:
        raise TransferTimeout(f"the probe of {where} took longer than {timeout_s:g} s") from None
    except OSError as error:
        raise PeerClosed(f"the probe of {where} failed: {error}") from error
    # the last PONG also travels: one empty round trip is not the bytes' doing
    return ProbeResult(num_bytes / max(took_s - rtt_s, 1e-9), rtt_s)


def _ping(
    sock: socket.socket, decoder: FrameDecoder, sizes: list[int], shape: LinkShape, deadline: float
) -> None:
    """Sends one PING of each size and waits for all the answers."""
    frames = {size: encode_frame(Frame(FrameType.PING, 0, bytes(size))) for size in set(sizes)}
    time.sleep(shape.delay_s)
    for size in sizes:
        _wait_until(sock, deadline)
        sock.sendall(frames[size])
    num_answers = 0
    while num_answers < len(sizes):
        frame = decoder.next_frame()
        if isinstance(frame, NeedData):
            _wait_until(sock, deadline)
            data = sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("the far end closed the connection")
            decoder.receive_data(data)
        elif frame.type is FrameType.PONG:
            num_answers += 1
        else:
            raise ProtocolError(f"{frame.type.name} came in answer to PING; due is PONG")


def _wait_until(sock: socket.socket, deadline: float) -> None:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    sock.settimeout(remaining_s)
