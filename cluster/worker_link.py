"""The router's connection to one worker: connect, authenticate, then JSON lines both ways. Decides nothing."""

import asyncio
import contextlib
from collections.abc import Callable

from cluster.control import AnyMessage, WorkerAddress
from cluster.json_stream import MAX_LINE_BYTES, JsonStream, StreamError
from transport.auth import ClientHandshake, authenticate_stream
from transport.errors import AuthError

REQUEST_CHANNEL = "request"
"""The channel name bound into the handshake: a proof for this channel opens no other."""

_RETRY_S = 0.1


class WorkerLink:
    """Keeps one connection to ``address`` until closed, and reports what happens on it.

    ``on_up()`` after each authentication, ``on_down(detail)`` after each loss of a connection that was up,
    ``on_message(message)`` in between; it may raise StreamError for a message that has no place here. ``on_end`` gets
    the link's task when that has ended, with any other error it raised.
    """

    def __init__(
        self,
        address: WorkerAddress,
        secret: bytes,
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
        on_message: Callable[[AnyMessage], None],
        on_end: Callable[["asyncio.Task[None]"], None] = lambda task: None,
    ) -> None:
        self.address = address
        self._secret = secret
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._stream: JsonStream | None = None
        self._task = asyncio.create_task(self._run(), name=f"link to {address.worker_id}")
        self._task.add_done_callback(on_end)

    def send(self, message: AnyMessage) -> None:
        """Queue a message; dropped when the connection is down (its requests are being rerouted then)."""
        if self._stream is not None:
            self._stream.send(message)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            try:
                stream = await self._connect()
            except (OSError, AuthError):
                await asyncio.sleep(_RETRY_S)
                continue
            self._stream = stream
            self._on_up()
            detail = "connection closed"
            try:
                while (message := await stream.receive()) is not None:
                    self._on_message(message)
            except StreamError as error:
                detail = str(error)
            finally:
                self._stream = None
                await stream.close()
            self._on_down(detail)

    async def _connect(self) -> JsonStream:
        reader, writer = await asyncio.open_connection(
            self.address.control_host, self.address.control_port, limit=MAX_LINE_BYTES
        )
        try:
            await authenticate_stream(
                reader, writer, ClientHandshake(self._secret, "router", REQUEST_CHANNEL)
            )
        except BaseException:
            writer.close()
            raise
        return JsonStream(reader, writer)
