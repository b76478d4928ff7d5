"""Moves control messages over a stream socket: one JSON object a line, bounded. Knows no message's meaning."""

import asyncio
import contextlib
import socket
from typing import Final

import msgspec

from cluster.control import AnyMessage, decode_message, encode_message

MAX_LINE_BYTES: Final = 16 * 2**20
"""A prompt of a million token ids fits; a stream of garbage does not fill the memory."""


class StreamError(Exception):
    """The peer sent a line that is not one known message, or one that is too long."""


def listen_on_loopback() -> socket.socket:
    """Any free port. Connections to it send at once: asyncio sees to that only where a socket names its protocol, which
    an accepted one does not, and a small message would wait up to 40 ms for the last one's acknowledgement."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class JsonStream:
    """One end of a conversation. ``send`` never blocks; ``drain`` waits while the peer reads too slowly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def from_socket(cls, sock: socket.socket) -> "JsonStream":
        """Adopt a connected socket (the inherited parent link)."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES))

    @classmethod
    async def from_fd(cls, fd: int) -> "JsonStream":
        return await cls.from_socket(socket.socket(fileno=fd))

    async def receive(self) -> AnyMessage | None:
        """The next message; None once the peer has closed or died. Raises StreamError."""
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise StreamError(f"a control line is longer than {MAX_LINE_BYTES} bytes") from error
        except (ConnectionError, OSError):
            return None
        if not line.endswith(b"\n"):
            return None  # end of file, or cut off in the middle of a line by the peer's death
        try:
            return decode_message(line)
        except msgspec.DecodeError as error:
            raise StreamError(f"not a control message: {error}") from error

    def send(self, message: AnyMessage) -> None:
        """Queue one message; nothing happens when the peer is gone (``receive`` tells)."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def drain(self) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError, OSError):
            await self._writer.wait_closed()
