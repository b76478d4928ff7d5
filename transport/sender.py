"""KVSender: a persistent connection to one receiver, driven by one thread. The thin shell round SenderConnection.

Every method may be called from any thread and returns at once; results come as events, from the sender's own thread.
After a transfer's TransferAcked, TransferRejected or TransferFailed the sender holds no view of it any more.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from transport.client_connection import ClientConnection
from transport.codec import Codec, RawCodec, find_codec
from transport.errors import OutboxFull, PeerClosed, TransferAborted, TransportError
from transport.events import TransferEvent
from transport.faults import LinkFault
from transport.frame import DataSlice
from transport.iovec import total_bytes
from transport.kv_transfer import DEFAULT_LIMITS, TransferLimits
from transport.link import UNSHAPED, LinkShape
from transport.messages import KVHeader, PrefillResult
from transport.send_budget import SendBudget
from transport.sender_connection import SenderConnection
from transport.waker import POLL_IN, POLL_OUT, Waker

MAX_WAITING_FRAMES = 65536
MAX_WRITTEN_BYTES = 2 * 1024 * 1024  # before answers, commands and time-outs get their turn
MAX_REST_S = 0.005  # the engine may have stopped meanwhile


def _never() -> bool:
    return False


class KVSender:
    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        on_event: Callable[[TransferEvent], None],
        *,
        role: str = "prefill",
        codecs: Sequence[Codec] = (RawCodec(),),
        limits: TransferLimits = DEFAULT_LIMITS,
        shape: LinkShape = UNSHAPED,
        max_waiting_frames: int = MAX_WAITING_FRAMES,
        jitter_seed: int = 0,
        is_computing: Callable[[], bool] = _never,
    ) -> None:
        """``is_computing``: an engine needs this thread's core now; see ``SendBudget``."""
        self.address = address
        self.num_connections = 0  # made and authenticated so far
        self.num_rests = 0  # times that it let the engine have the core
        self._secret = secret
        self._on_event = on_event
        self._role = role
        self._codecs = tuple(codecs)
        self._shape = shape
        self._max_waiting_frames = max_waiting_frames
        self._core = SenderConnection(self._codecs, limits, shape, jitter_seed)
        self._connection: ClientConnection | None = None
        self._ids = itertools.count(1)
        self._commands: deque[Callable[[float], None]] = deque()
        self._is_computing = is_computing
        self._budget = SendBudget()
        self._rest_until: float | None = None
        self._waker = Waker()
        self._lock = threading.Lock()  # guards _is_closing together with the posting of commands
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-sender-{address[1]}", daemon=True)
        self._thread.start()

    def open(self, header: KVHeader) -> int:
        """Sends OPEN, connecting first if need be; returns the transfer id.

        Raises UnknownCodec, and PeerClosed after ``close``.
        """
        find_codec(header.codec, self._codecs)
        with (
            self._lock
        ):  # ids must reach the wire in order: the receiver takes a lower one for an old transfer
            transfer_id = next(self._ids)
            if not self._post_locked(lambda now: self._core.open(transfer_id, header, now)):
                raise PeerClosed(f"the sender to {self.address[0]}:{self.address[1]} is closed")
        return transfer_id

    def send(
        self,
        transfer_id: int,
        layer: int,
        kv: int,
        start_token: int,
        num_tokens: int,
        views: Sequence[memoryview],
    ) -> None:
        """Queues the KV of some tokens of one layer (kv 0 keys, 1 values); before ACCEPT it is held here.

        ``views`` hold exactly these tokens, block after block, in the layout that the header names. They must
        stay as they are until the transfer's last event. Tokens that the receiver holds already are left out here,
        so the caller need not wait for its word. Does nothing if the transfer has already ended.
        Raises OutboxFull.
        """
        self.send_parts(transfer_id, [(DataSlice(layer, kv, start_token, num_tokens), views)])

    def send_parts(self, transfer_id: int, parts: Sequence[tuple[DataSlice, Sequence[memoryview]]]) -> None:
        """Queues several parts at once, as ``send`` does each. Raises OutboxFull, and then has queued none."""
        waiting = len(self._commands) + self._core.num_waiting_frames
        if waiting >= self._max_waiting_frames:
            raise OutboxFull(
                f"{waiting} frames wait for {self.address[0]}:{self.address[1]}; that is the most allowed"
            )

        def queue(now: float) -> None:
            for part, views in parts:
                self._core.send(transfer_id, part, views, now)

        self._post(queue)

    def commit(self, transfer_id: int, prefill: PrefillResult) -> None:
        """Ends the data; counts and digest are added here. Does nothing if the transfer has already ended."""
        self._post(lambda now: self._core.commit(transfer_id, prefill, now))

    def abort(self, transfer_id: int, detail: str) -> None:
        """Gives up; TransferFailed(aborted) follows when the views are free. No effect after the last event."""
        self._post(lambda now: self._core.abort(transfer_id, detail, now))

    def set_link(self, shape: LinkShape) -> None:
        """Takes effect at once, also on a connection in use."""

        def apply(now: float) -> None:
            self._shape = shape
            self._core.set_link(shape)
            if self._connection is not None:
                self._connection.set_link(shape)

        self._post(apply)

    def inject(self, fault: LinkFault, until: float = math.inf, *, every_frame: bool = False) -> None:
        """For drills: a fault in the next DATA frame that is written, or in every one until then."""
        self._post(lambda now: self._core.inject(fault, until, every_frame=every_frame))

    def heal(self) -> None:
        """Forgets every fault that was injected; a stall ends at once."""
        self._post(lambda now: self._core.heal())

    @property
    def num_late_frames(self) -> int:
        return self._core.num_late_frames

    def written_raw_bytes(self, transfer_id: int) -> int:
        """How much of a live transfer's KV has gone into frames, as stored; 0 before and after."""
        return self._core.written_raw_bytes(transfer_id)

    def close(self) -> None:
        """Fails what is live (reason closed) and stops the thread. Safe to call twice and from ``on_event``."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[float], None]) -> bool:
        with self._lock:
            return self._post_locked(command)

    def _post_locked(self, command: Callable[[float], None]) -> bool:
        if self._is_closing:
            return False
        self._commands.append(command)
        self._waker.wake()
        return True

    # the sender's thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                has_more = False
                try:
                    has_more = self._move_bytes()
                    self._core.tick(time.monotonic())
                except TransportError as error:
                    self._lose_connection(error)
                    has_more = True  # an OPEN that had not left goes to a new connection
                self._emit()
                if not has_more and not self._commands and not self._is_closing:
                    self._wait()
        finally:
            with self._lock:
                self._is_closing = True
            self._run_commands()
            self._lose_connection(TransferAborted("the sender was closed"))
            self._waker.close()
            self._emit()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(time.monotonic())

    def _move_bytes(self) -> bool:
        """Connects, reads and writes as far as possible without waiting; True if there is more to do at once."""
        now = time.monotonic()
        if self._connection is None:
            if not self._core.needs_connection:
                return False
            self._connection = ClientConnection(self.address, self._secret, self._role, self._shape, now)
        if not self._connection.is_ready:
            self._connection.advance(now)
            if not self._connection.is_ready:
                return False
            self.num_connections += 1
        data = self._connection.read()
        if data:
            self._core.receive_data(data, now)
        elif data is not None:
            self._core.receive_eof()
            raise PeerClosed(f"{self.address[0]}:{self.address[1]} closed the connection")
        return self._write(self._connection)

    def _write(self, connection: ClientConnection) -> bool:
        """Frame after frame while the socket takes them; True if it would take more."""
        written_bytes = 0
        while written_bytes < MAX_WRITTEN_BYTES:
            now = time.monotonic()
            buffers: list[memoryview] = []
            cpu_before_s = time.thread_time()
            if not self._must_rest(now):
                if self._core.is_paused and self._core.needs_connection:
                    self._core.resumes(connection.busy_s())
                buffers = self._core.buffers(now)
            if not buffers:
                if not self._core.is_paused:
                    self._core.idle(connection.unsent_bytes(), now, connection.busy_s())
                return False
            if self._core.is_coded:
                cpu_before_s = time.thread_time()
            num_sent = connection.write(buffers)
            if self._core.is_writing_rest:
                self._budget.spent(time.thread_time() - cpu_before_s)
            if num_sent:
                self._core.sent(num_sent, time.monotonic())
            if self._core.is_cut:
                connection.cut()
                raise PeerClosed("the link was cut")
            if num_sent < total_bytes(buffers):
                return False  # the socket is full
            written_bytes += num_sent
        return True

    def _must_rest(self, now: float) -> bool:
        """The engine needs the core, and the next frame can wait."""
        rest_s = 0.0
        if not self._core.needs_connection:
            self._budget.caught_up()
        elif self._core.can_rest and self._is_computing():
            rest_s = self._budget.rest_s(time.process_time(), now)
        elif self._core.can_rest:
            self._budget.refill(time.process_time())
        self._rest_until = now + min(rest_s, MAX_REST_S) if rest_s else None
        self.num_rests += rest_s > 0
        return rest_s > 0

    def _lose_connection(self, error: TransportError) -> None:
        was_ready = self._connection is not None and self._connection.is_ready
        if self._connection is not None:
            self._waker.watch(None, 0)
            self._connection.close()
            self._connection = None
        self._rest_until = None
        keep_unopened = was_ready and not self._is_closing
        self._core.connection_lost(error, time.monotonic(), keep_unopened=keep_unopened)

    def _emit(self) -> None:
        self._run_commands()  # one that still waits may hold views of a transfer that is about to be reported
        for event in self._core.take_events():
            self._on_event(event)

    def _wait(self) -> None:
        connection = self._connection
        is_ready = connection is not None and connection.is_ready
        wakeups = [self._core.next_wakeup(can_write=is_ready and self._rest_until is None), self._rest_until]
        mask = POLL_IN
        if connection is not None and not is_ready:
            wakeups.append(connection.deadline)
        if connection is not None and (self._core.wants_to_write if is_ready else connection.wants_to_write):
            mask |= POLL_OUT
        wakeup = min((at for at in wakeups if at is not None), default=None)
        timeout_s = None if wakeup is None else max(0.0, wakeup - time.monotonic())
        self._waker.watch(None if connection is None else connection.fileno(), mask)
        self._waker.wait(timeout_s)
