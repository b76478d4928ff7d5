"""One connected sender as a thread: reads into the core, carries out what it asks, lets replies wait out the delay."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from transport.errors import PeerClosed, TransportError
from transport.events import ReceiveStats
from transport.failures import reason_of
from transport.instructions import AskToAdmit, AskToReserve, Destination, SendReply
from transport.link import DelayLine, LinkShape, shape_socket
from transport.messages import FailReason, KVCommit, KVHeader, RejectReason
from transport.receiver_connection import ReceiverConnection
from transport.waker import POLL_IN, POLL_OUT, Waker

LOW_WATER_BYTES = 128 * 1024  # inside a frame the thread sleeps until so much is there
MAX_READS = 32  # before time-outs and replies get their turn


class KVHandler(Protocol):
    def on_open(self, header: KVHeader, reply: "OpenReply") -> None:
        """A sender asks for room. Reserve all that the request may need, then ``reply.accept`` or ``reply.reject``.

        Leading tokens that are here already need no transfer: ``reply.accept`` says how many.
        """

    def on_complete(self, header: KVHeader, commit: KVCommit, stats: ReceiveStats) -> bool:
        """Every byte is in place and verified. True takes the blocks over; False refuses, and ``on_failed`` follows."""

    def on_failed(self, header: KVHeader, reason: FailReason, error: TransportError) -> None:
        """Exactly once for every accepted transfer that does not complete: its views are no longer touched."""


class OpenReply:
    """The answer to one OPEN; exactly one of the two methods is to be called, from any thread."""

    def __init__(self, header: KVHeader, connection: "ReceiverPeer", transfer_id: int) -> None:
        self._header = header
        self._connection = connection
        self._transfer_id = transfer_id

    def accept(self, destination: Destination, start_token: int = 0) -> None:
        """From now on exactly one of ``on_complete`` (returning True) and ``on_failed`` ends the reservation.

        ``start_token``: how many leading tokens are held, in whole blocks and fewer than all. ``destination`` is
        asked for later ones only.
        If the sender is already gone, ``on_failed`` may be called from within this call.
        """
        header, transfer_id = self._header, self._transfer_id
        if not self._connection.post(
            lambda core, now: core.accept(transfer_id, header, destination, now, start_token)
        ):
            self._connection.handler.on_failed(
                header, FailReason.PEER_CLOSED, PeerClosed("the sender left before its transfer was accepted")
            )

    def reject(self, reason: RejectReason, detail: str) -> None:
        transfer_id = self._transfer_id
        self._connection.post(lambda core, now: core.reject(transfer_id, reason, detail, now))


class ReceiverPeer:
    """One authenticated peer: its socket, its core, its thread."""

    def __init__(
        self, sock: socket.socket, handler: KVHandler, core: ReceiverConnection, shape: LinkShape, peer: str
    ) -> None:
        self.handler = handler
        self.core = core
        self.peer = peer
        self._socket = sock
        self._replies: DelayLine[bytes] = DelayLine(shape)
        self._unsent = b""
        self._low_water_bytes = 1
        self._commands: deque[Callable[[ReceiverConnection, float], None]] = deque()
        self._waker = Waker()
        self._lock = threading.Lock()
        self._is_closed = False  # no more commands are taken
        self._is_closing = False

    def post(self, command: Callable[[ReceiverConnection, float], None]) -> bool:
        """False if the connection is gone and the command will never run."""
        with self._lock:
            if self._is_closed:
                return False
            self._commands.append(command)
            self._waker.wake()
            return True

    def set_link(self, shape: LinkShape) -> None:
        def apply(core: ReceiverConnection, now: float) -> None:
            self._replies.shape = shape
            shape_socket(self._socket, shape)

        self.post(apply)

    def close(self) -> None:
        def apply(core: ReceiverConnection, now: float) -> None:
            self._is_closing = True

        self.post(apply)

    def run(self) -> None:
        reason, error = FailReason.CLOSED, TransportError("the receiver was closed")
        self._socket.setblocking(False)
        try:
            while not self._is_closing:
                has_read = self._read()
                self._carry_out()  # first: what is verified must be admitted before anything can end it
                self._run_commands()
                self.core.tick(time.monotonic())
                self._carry_out()
                self._write()
                if not has_read and not self._commands and not self._is_closing:
                    self._wait()
        except TransportError as caught:
            reason, error = reason_of(caught), caught
        finally:
            with self._lock:
                self._is_closed = True
            self._run_commands()
            self.core.connection_lost(reason, error, time.monotonic())
            self._socket.close()
            self._waker.close()
            self._carry_out()

    def _read(self) -> bool:
        """Reads until there is nothing more, or something is to be done first."""
        for count in range(MAX_READS):
            try:
                num_bytes = self._socket.recvmsg_into(self.core.buffers())[0]
            except BlockingIOError:
                return count > 0
            except OSError as error:
                raise PeerClosed(f"{self.peer} is gone: {error}") from error
            if not num_bytes:
                self.core.receive_eof()
                raise PeerClosed(f"{self.peer} closed the connection")
            self.core.received(num_bytes, time.monotonic())
            if self.core.has_instructions or self._commands:
                break
        return True

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self.core, time.monotonic())

    def _carry_out(self) -> None:
        while instructions := self.core.take_instructions():
            for instruction in instructions:
                if isinstance(instruction, SendReply):
                    self._replies.put(instruction.frame, time.monotonic())
                elif isinstance(instruction, AskToReserve):
                    self.handler.on_open(
                        instruction.header, OpenReply(instruction.header, self, instruction.transfer_id)
                    )
                elif isinstance(instruction, AskToAdmit):
                    is_admitted = self.handler.on_complete(
                        instruction.header, instruction.commit, instruction.stats
                    )
                    self.core.admitted(instruction.transfer_id, is_admitted, time.monotonic())
                else:
                    self.handler.on_failed(instruction.header, instruction.reason, instruction.error)

    def _write(self) -> None:
        now = time.monotonic()
        while (frame := self._replies.pop(now)) is not None:
            self._unsent += frame
        if self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerClosed(f"{self.peer} is gone: {error}") from error

    def _wait(self) -> None:
        times = [at for at in (self.core.next_wakeup(), self._replies.next_at()) if at is not None]
        timeout_s = max(0.0, min(times) - time.monotonic()) if times else None
        low_water_bytes = max(1, min(self.core.body_bytes_due, LOW_WATER_BYTES))
        if low_water_bytes != self._low_water_bytes:
            self._low_water_bytes = low_water_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
        self._waker.watch(self._socket.fileno(), POLL_IN | POLL_OUT if self._unsent else POLL_IN)
        self._waker.wait(timeout_s)
