"""The emulated link as seen by one end: rate in the kernel, delay in a queue, faults on request.

Rate: ``SO_MAX_PACING_RATE`` makes TCP itself space the packets of one socket. It limits the sending direction only,
so each end shapes its own socket. It can change while the socket is connected.

Delay: every frame waits ``delay_s`` (plus or minus up to ``jitter_s``, never overtaking) at the sending end before it
may enter the socket. Frames wait side by side, so delay costs no bandwidth.
"""

import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

SO_MAX_PACING_RATE = 47  # linux/asm-generic; the socket module does not name it
_UNLIMITED = 2**64 - 1

SEND_BUFFER_S = 0.02  # how much of a slow link's time may sit in the kernel: an abort waits behind it
MIN_SEND_BUFFER_BYTES = 64 * 1024
MAX_SEND_BUFFER_BYTES = 4 * 1024 * 1024  # bridges some milliseconds in which the sender has no core

CONGESTION_CONTROL = "cubic"
"""Of the KV sockets, where the kernel has it. BBR, some hosts' choice for the internet, paces by its own estimate of
the path: inside one host, where the rate changes with every other process, that halves what one stream gets."""

FRAME_S = 0.05  # a frame should pass a slow link within this, for the same reason
MIN_FRAME_BYTES = 64 * 1024
MAX_FRAME_BYTES = 2 * 1024 * 1024

MAX_PACED_WRITE_BYTES = 256 * 1024
"""A paced socket sends nothing while a call copies into it, and only part of the lost time is made up for."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link. ``bandwidth_bytes_per_s`` None means as fast as the host can."""

    bandwidth_bytes_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s >= 1:
            raise ValueError(
                f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; allowed is 1 or more, or None"
            )
        if not 0 <= self.delay_s <= 60:
            raise ValueError(f"delay_s is {self.delay_s}; allowed is 0 to 60")
        if not 0 <= self.jitter_s <= 60:
            raise ValueError(f"jitter_s is {self.jitter_s}; allowed is 0 to 60")


UNSHAPED = LinkShape()


def send_buffer_bytes(shape: LinkShape) -> int:
    if shape.bandwidth_bytes_per_s is None:
        return MAX_SEND_BUFFER_BYTES
    return _clamp(shape.bandwidth_bytes_per_s * SEND_BUFFER_S, MIN_SEND_BUFFER_BYTES, MAX_SEND_BUFFER_BYTES)


def frame_bytes(shape: LinkShape) -> int:
    """How large a DATA frame should be on this link."""
    if shape.bandwidth_bytes_per_s is None:
        return MAX_FRAME_BYTES
    return _clamp(shape.bandwidth_bytes_per_s * FRAME_S, MIN_FRAME_BYTES, MAX_FRAME_BYTES)


def write_bytes(shape: LinkShape) -> int | None:
    """The most to hand to the kernel in one call on this link; None = whatever there is."""
    return None if shape.bandwidth_bytes_per_s is None else MAX_PACED_WRITE_BYTES


def _clamp(value: float, low: int, high: int) -> int:
    return int(min(max(value, low), high))


def shape_socket(sock: socket.socket, shape: LinkShape) -> None:
    """Sets a TCP socket's rate, buffer, congestion control and no-delay; may be called again while connected."""
    rate = _UNLIMITED if shape.bandwidth_bytes_per_s is None else int(shape.bandwidth_bytes_per_s)
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("@Q", rate))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes(shape))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # a kernel without it keeps its own
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
    # a host that vanishes without closing is noticed in about 20 s even when nothing is being sent
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def congestion_control() -> str:
    """What a shaped socket uses on this host."""
    with socket.socket() as sock:
        shape_socket(sock, UNSHAPED)
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


Item = TypeVar("Item")


class DelayLine(Generic[Item]):
    """A queue whose items become eligible some time after they enter, in the order in which they entered."""

    def __init__(self, shape: LinkShape, seed: int = 0) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._items: deque[tuple[float, Item]] = deque()
        self._last_eligible_at = float("-inf")

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, now: float) -> None:
        wait_s = self.shape.delay_s
        if self.shape.jitter_s:
            wait_s += self._random.uniform(-self.shape.jitter_s, self.shape.jitter_s)
        self._last_eligible_at = max(self._last_eligible_at, now + max(0.0, wait_s))
        self._items.append((self._last_eligible_at, item))

    def next_at(self) -> float | None:
        return self._items[0][0] if self._items else None

    def first(self) -> Item | None:
        """The next one, whether it is eligible or not."""
        return self._items[0][1] if self._items else None

    def pop(self, now: float) -> Item | None:
        """The first item if it is eligible."""
        if self._items and self._items[0][0] <= now:
            return self._items.popleft()[1]
        return None

    def discard(self, is_unwanted: Callable[[Item], bool]) -> None:
        self._items = deque(entry for entry in self._items if not is_unwanted(entry[1]))
