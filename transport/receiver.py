"""KVReceiver: listens for senders, one thread per connection. The thin shell round ReceiverConnection.

The owner supplies a ``KVHandler``. Its methods are called from connection threads and must not wait: ``on_open`` gets
an ``OpenReply`` that may be answered later from any thread, so a slow decision holds up nobody else.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transport.auth import AUTH_DEADLINE_S, ServerHandshake, authenticate_socket
from transport.client_connection import KV_CHANNEL
from transport.codec import Codec, RawCodec
from transport.errors import (
    AuthError,
    TransportError,
)
from transport.kv_transfer import DEFAULT_LIMITS, TransferLimits
from transport.link import UNSHAPED, LinkShape, shape_socket
from transport.messages import KVContract
from transport.receiver_connection import ReceiverConnection
from transport.receiver_peer import KVHandler, ReceiverPeer

MAX_UNPROVEN_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class ReceiverCounts:
    """Since start, over all connections."""

    connections: int = 0  # authenticated
    auth_failures: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    late_frames: int = 0  # of unknown or ended transfers, dropped


class KVReceiver:
    """Listens from construction on; ``address`` tells the port that was got for port 0. Raises TransportError."""

    def __init__(
        self,
        handler: KVHandler,
        expected: KVContract,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        role: str = "decode",
        codecs: Sequence[Codec] = (RawCodec(),),
        limits: TransferLimits = DEFAULT_LIMITS,
        shape: LinkShape = UNSHAPED,
        auth_deadline_s: float = AUTH_DEADLINE_S,
        on_refused: Callable[[str, AuthError], None] = lambda peer, error: None,
    ) -> None:
        self._handler = handler
        self._expected = expected
        self._secret = secret
        self._role = role
        self._codecs = tuple(codecs)
        self._limits = limits
        self._shape = shape
        self._auth_deadline_s = auth_deadline_s
        self._on_refused = on_refused  # from the connection's thread, for each peer that did not prove itself
        self._lock = threading.Lock()  # guards all below
        self._connections: dict[threading.Thread, ReceiverPeer] = {}
        self._unproven: dict[threading.Thread, socket.socket] = {}
        self._ended = ReceiverCounts()
        self._is_closing = False
        ServerHandshake(
            secret, role, KV_CHANNEL
        )  # refuses a secret that is too short now, not at the first peer
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (str(bound[0]), int(bound[1]))
        self._thread = threading.Thread(
            target=self._accept, name=f"kv-receiver-{self.address[1]}", daemon=True
        )
        self._thread.start()

    def cancel(self, request_id: str, attempt: int, detail: str) -> None:
        """Gives up a transfer from this side: the sender gets FAIL (or REJECT), late frames are dropped and counted.

        ``on_failed`` follows from the connection's thread. No effect if there is no such live transfer.
        """
        for connection in self._open_connections():
            connection.post(lambda core, now: core.cancel(request_id, attempt, detail, now))

    def set_link(self, shape: LinkShape) -> None:
        """Shapes the replies: on present connections and on those to come."""
        with self._lock:
            self._shape = shape
        for connection in self._open_connections():
            connection.set_link(shape)

    def counts(self) -> ReceiverCounts:
        with self._lock:
            total = self._ended
            for connection in self._connections.values():
                total = _add(total, connection.core)
            return total

    def close(self) -> None:
        """Stops listening, fails what is live (reason closed) and joins all threads. Safe to call twice."""
        with self._lock:
            self._is_closing = True
            threads = [*self._connections, *self._unproven]
            connections = list(self._connections.values())
            for sock in self._unproven.values():
                _shut(sock)
        _shut(self._listener)
        for connection in connections:
            connection.close()
        for thread in (self._thread, *threads):
            if thread is not threading.current_thread():
                thread.join()
        self._listener.close()

    def _open_connections(self) -> list[ReceiverPeer]:
        with self._lock:
            return list(self._connections.values())

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:  # shut down by close()
                return
            name = f"{peer[0]}:{peer[1]}"
            thread = threading.Thread(
                target=self._serve, args=(sock, name), name=f"kv-from-{name}", daemon=True
            )
            with self._lock:
                if self._is_closing or len(self._unproven) >= MAX_UNPROVEN_CONNECTIONS:
                    sock.close()
                    continue
                self._unproven[thread] = sock
                thread.start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        thread = threading.current_thread()
        connection: ReceiverPeer | None = None
        try:
            authenticate_socket(
                sock, ServerHandshake(self._secret, self._role, KV_CHANNEL), self._auth_deadline_s
            )
            core = ReceiverConnection(self._expected, self._codecs, self._limits)
            with self._lock:
                del self._unproven[thread]
                if not self._is_closing:
                    shape_socket(sock, self._shape)
                    connection = self._connections[thread] = ReceiverPeer(
                        sock, self._handler, core, self._shape, peer
                    )
            if connection is not None:
                connection.run()
        except AuthError as error:
            with self._lock:
                self._ended = _add_auth_failure(self._ended)
            self._on_refused(peer, error)
        finally:
            sock.close()
            with self._lock:
                self._unproven.pop(thread, None)
                if connection is not None:
                    del self._connections[thread]
                    self._ended = _add(self._ended, connection.core)


def _shut(sock: socket.socket) -> None:
    """Wakes a thread that waits for this socket."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer was faster
        return


def _add(total: ReceiverCounts, core: ReceiverConnection) -> ReceiverCounts:
    return ReceiverCounts(
        connections=total.connections + 1,
        auth_failures=total.auth_failures,
        completed=total.completed + core.num_completed,
        failed=total.failed + core.num_failed,
        rejected=total.rejected + core.num_rejected,
        late_frames=total.late_frames + core.num_late_frames,
    )


def _add_auth_failure(total: ReceiverCounts) -> ReceiverCounts:
    return replace(total, auth_failures=total.auth_failures + 1)
