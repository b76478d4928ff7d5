"""A non-blocking TCP connection that authenticates itself as the connecting end, then carries bytes."""

import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Sequence

from transport.auth import AUTH_DEADLINE_S, ClientHandshake
from transport.errors import AuthError, PeerClosed
from transport.link import LinkShape, shape_socket

KV_CHANNEL = "kv"
READ_BYTES = 64 * 1024
_TCP_INFO_BYTES = 176
_BUSY_TIME_AT = 168  # tcpi_busy_time, microseconds
_SIOCOUTQNSD = 0x894B  # bytes that TCP has accepted but not yet put on the wire


class ClientConnection:
    """Call ``advance`` whenever the socket is ready until ``is_ready``; then ``read`` and ``write``."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        role: str,
        shape: LinkShape,
        now: float,
        deadline_s: float = AUTH_DEADLINE_S,
    ) -> None:
        self.is_ready = False
        self.address = address
        self.deadline = now + deadline_s
        self._deadline_s = deadline_s
        self._handshake = ClientHandshake(secret, role, KV_CHANNEL)
        self._to_send = self._handshake.start()
        self._received = b""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            shape_socket(self._socket, shape)
            code = self._socket.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            self.close()
            raise PeerClosed(f"cannot connect to {address[0]}:{address[1]}: {error.strerror}") from error
        self._is_connecting = code == errno.EINPROGRESS

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return self._is_connecting or bool(self._to_send)

    def advance(self, now: float) -> None:
        """Carries connecting and authenticating forward as far as it goes without waiting.

        Raises PeerClosed if the peer cannot be reached, AuthError if the two do not come to trust each other in time.
        """
        where = f"{self.address[0]}:{self.address[1]}"
        if now >= self.deadline:
            raise AuthError(f"{where} did not authenticate within {self._deadline_s:g} s")
        if self._is_connecting:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(0):
                return
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise PeerClosed(f"cannot connect to {where}: {os.strerror(code)}")
            self._is_connecting = False
        while not self.is_ready:
            if self._to_send:
                num_sent = self.write([memoryview(self._to_send)])
                self._to_send = self._to_send[num_sent:]
                if self._to_send:
                    return
            data = self.read(self._handshake.bytes_needed - len(self._received))
            if data is None:
                return
            if not data:
                raise AuthError(f"{where} closed the connection during authentication")
            self._received += data
            if len(self._received) == self._handshake.bytes_needed:
                self._to_send = self._handshake.receive(self._received)
                self._received = b""
                self.is_ready = self._handshake.is_done

    def read(self, num_bytes: int = READ_BYTES) -> bytes | None:
        """What has arrived, None if nothing has, b"" at the end of the stream. Raises PeerClosed."""
        try:
            return self._socket.recv(num_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerClosed(f"{self.address[0]}:{self.address[1]} is gone: {error}") from error

    def write(self, buffers: Sequence[memoryview]) -> int:
        """Bytes taken, 0 if the socket is full. Raises PeerClosed."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerClosed(f"{self.address[0]}:{self.address[1]} is gone: {error}") from error

    def unsent_bytes(self) -> int:
        """Bytes in the kernel that have not left yet."""
        answer = fcntl.ioctl(self._socket, _SIOCOUTQNSD, struct.pack("@i", 0))
        return int(struct.unpack("@i", answer)[0])

    def busy_s(self) -> float:
        """How long TCP has had bytes to send or to be acknowledged on this connection.

        It also counts what waits in a queue behind the socket; in steps of the kernel's clock, some milliseconds.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("@Q", info, _BUSY_TIME_AT)[0]) / 1e6

    def set_link(self, shape: LinkShape) -> None:
        shape_socket(self._socket, shape)

    def cut(self) -> None:
        """Breaks the connection at once: the peer sees a reset, and what the kernel still held is lost."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._socket.close()
