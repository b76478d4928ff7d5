"""The sending end of one connection without its socket: which bytes go next, and what answers mean.

Owned by one thread. Calls come in with ``now``; bytes go out by ``buffers()`` and ``sent()``; facts about transfers by
``take_events()``. Payload is never copied on the v2 path: ``buffers()`` hands out the caller's own views.

A transfer's terminal event is emitted only when no view of it can be touched again: if a frame of a failed transfer
is half written, framing demands the other half, so the event waits for the frame's end (or the connection's).
"""

import math
from collections.abc import Sequence

from transport.answers import Answer, AnswerDecoder
from transport.busy_meter import BusyMeter
from transport.codec import Codec, find_codec
from transport.errors import ProtocolError, StartTokenError, TransferAborted, TransferTimeout, TransportError
from transport.events import TransferAccepted, TransferAcked, TransferEvent, TransferFailed
from transport.failures import error_of, forget_frames, reason_of
from transport.faults import Cut, FaultQueue, LinkFault, Stall
from transport.frame import DataSlice, FrameType
from transport.iovec import IoVec, Scratch
from transport.kv_transfer import SenderState, SenderTransfer, TransferLimits
from transport.link import LinkShape, frame_bytes, write_bytes
from transport.messages import FailReason, KVAccept, KVAck, KVFailure, KVHeader, KVReject, PrefillResult
from transport.outbox import Outbox
from transport.outgoing import (
    HeldFrame,
    Outgoing,
    QueuedAbort,
    QueuedCommit,
    QueuedData,
    QueuedFrame,
    QueuedOpen,
    build_data_frame,
    control_frame,
    split_data,
)

RESTS_FROM_BYTES = 4 * 1024 * 1024
"""A transfer with less left when its prompt is computed never rests: it delays a step by a millisecond or two, and an
engine computes far longer on as much KV. So short prompts, and the tails of streamed ones, wait for nobody."""


class SenderConnection:
    def __init__(
        self, codecs: Sequence[Codec], limits: TransferLimits, shape: LinkShape, seed: int = 0
    ) -> None:
        self.num_late_frames = 0  # answers about transfers that had already ended here
        self.is_cut = False  # a Cut is due now: the owner must close the socket
        self._codecs = codecs
        self._limits = limits
        self._transfers: dict[int, Outgoing] = {}
        self._outbox = Outbox(shape, seed)
        self._answers = AnswerDecoder()
        self._events: list[TransferEvent] = []
        self._vector: IoVec | None = None  # the frame being written
        self._writing: Outgoing | None = None  # the transfer whose DATA it is
        self._progress_at = 0.0
        self._scratch = Scratch()
        self._meter = BusyMeter()
        self._faults = FaultQueue()
        self._stalled_until: float | None = None

    # what the owner wants

    def open(self, transfer_id: int, header: KVHeader, now: float) -> None:
        outgoing = Outgoing(
            SenderTransfer(transfer_id, header, self._limits), find_codec(header.codec, self._codecs)
        )
        self._transfers[transfer_id] = outgoing
        self._outbox.put(QueuedOpen(outgoing), now)

    def send(self, transfer_id: int, part: DataSlice, views: Sequence[memoryview], now: float) -> None:
        """Queues DATA; before ACCEPT it is held. Nothing happens if the transfer has ended.

        Tokens that the receiver holds already are left out, whether they come before its ACCEPT or after.
        """
        outgoing = self._live(transfer_id)
        if outgoing is None:
            return
        try:
            pieces = split_data(outgoing.transfer.header, part, views, frame_bytes(self._outbox.shape))
        except ProtocolError as error:
            self._give_up(outgoing, FailReason.PROTOCOL, error, now)
            return
        for piece, piece_views in pieces:
            self._queue(outgoing, QueuedData(outgoing, piece, piece_views), now)

    def commit(self, transfer_id: int, prefill: PrefillResult, now: float) -> None:
        outgoing = self._live(transfer_id)
        if outgoing is not None:
            since_prefill_s = now - prefill.prefill_done_at
            outgoing.hidden_busy_s = max(0.0, self._meter.spent_s(outgoing.busy, now) - since_prefill_s)
            header, coverage = outgoing.transfer.header, outgoing.transfer.coverage
            left_bytes = header.raw_bytes_from(coverage.start_token) - coverage.raw_bytes
            outgoing.can_rest = left_bytes >= RESTS_FROM_BYTES
            self._queue(outgoing, QueuedCommit(outgoing, prefill), now)

    def abort(self, transfer_id: int, detail: str, now: float) -> None:
        outgoing = self._live(transfer_id)
        if outgoing is not None:
            self._give_up(outgoing, FailReason.ABORTED, TransferAborted(detail), now)

    def inject(self, fault: LinkFault, until: float = math.inf, *, every_frame: bool = False) -> None:
        """See ``FaultQueue.add``."""
        self._faults.add(fault, until, every_frame=every_frame)

    def heal(self) -> None:
        """Forgets every fault that was injected; a stall ends at once."""
        self._faults.clear()
        self._stalled_until = None

    def set_link(self, shape: LinkShape) -> None:
        self._outbox.set_link(shape)

    # bytes out

    def buffers(self, now: float) -> list[memoryview]:
        """What to write next; empty if nothing may be written now."""
        self._faults.expire(now)
        if self._stalled_until is not None:
            if now < self._stalled_until:
                return []
            self._stalled_until = None
        while self._vector is None:
            item = self._outbox.pop(now)
            if item is None:
                return []
            self._begin(item, now)
        return self._vector.head(self._bytes_before_fault() or write_bytes(self._outbox.shape))

    def sent(self, num_bytes: int, now: float) -> None:
        if self._vector is None:
            raise ValueError(f"{num_bytes} bytes sent although nothing was to be sent")
        self._vector.skip(num_bytes)
        self._progress_at = now
        if self._bytes_before_fault() == 0:
            fault = self._faults.take()
            if isinstance(fault, Cut):
                self.is_cut = True
            elif isinstance(fault, Stall):
                self._stalled_until = now + fault.seconds
        if not self._vector.remaining_bytes:
            outgoing, self._vector, self._writing = self._writing, None, None
            if outgoing is not None and outgoing.failure is not None:
                self._end(outgoing, outgoing.failure)

    def _bytes_before_fault(self) -> int | None:
        if self._vector is None or self._writing is None:
            return None
        total_bytes = self._vector.num_bytes
        return self._faults.bytes_before(total_bytes - self._vector.remaining_bytes, total_bytes)

    @property
    def is_paused(self) -> bool:
        """``idle`` was said, and no DATA has begun since."""
        return self._meter.is_paused

    def resumes(self, kernel_busy_s: float) -> None:
        """Call before ``buffers`` while paused; see ``BusyMeter``."""
        self._meter.resumes(kernel_busy_s)

    def idle(self, unsent_bytes: int, now: float, kernel_busy_s: float = 0.0) -> None:
        """Nothing to write for now, ``unsent_bytes`` still in the kernel."""
        if self._vector is not None:  # stalled, not idle
            return
        rate = self._outbox.shape.bandwidth_bytes_per_s
        self._meter.idle(now, now + unsent_bytes / rate if rate else now, kernel_busy_s)

    def _begin(self, item: QueuedFrame, now: float) -> None:
        """Makes the item the frame being written, if it is still wanted."""
        self._progress_at = now
        if isinstance(item, QueuedAbort):
            self._vector = item.frame
            return
        outgoing = item.outgoing
        transfer = outgoing.transfer
        try:
            if isinstance(item, QueuedOpen):
                transfer.open_sent(now)
                outgoing.opened_at = now
                self._vector = control_frame(FrameType.OPEN, transfer, transfer.header)
            elif isinstance(item, QueuedCommit):
                commit = transfer.commit_sent(item.prefill, now)
                outgoing.commit_sent_at = now
                self._vector = control_frame(FrameType.COMMIT, transfer, commit)
            else:
                data = build_data_frame(item, self._scratch, self._faults.take_corruption())
                transfer.data_sent(item.part, data.wire_bytes, data.checksum, now)
                self._vector, self._writing = data.vector, outgoing
                self._meter.writing(outgoing.busy, now)
        except ProtocolError as error:
            self._give_up(outgoing, FailReason.PROTOCOL, error, now)

    def written_raw_bytes(self, transfer_id: int) -> int:
        """KV of this transfer in frames begun so far, as stored; 0 once it has ended. May be read from any thread."""
        outgoing = self._transfers.get(transfer_id)
        return outgoing.transfer.coverage.raw_bytes if outgoing is not None else 0

    def _live(self, transfer_id: int) -> Outgoing | None:
        outgoing = self._transfers.get(transfer_id)
        return None if outgoing is None or outgoing.failure is not None else outgoing

    def _queue(self, outgoing: Outgoing, item: HeldFrame, now: float) -> None:
        if outgoing.transfer.state in (SenderState.IDLE, SenderState.OPENED):
            self._outbox.hold(outgoing, item)
            return
        due = item.due() if isinstance(item, QueuedData) else item
        if due is not None:
            self._outbox.put(due, now)

    # bytes in

    def receive_data(self, data: bytes | memoryview, now: float) -> None:
        """Raises FramingError or ProtocolError if the connection cannot go on; the owner must close it."""
        self._answers.receive_data(data)
        while (answer := self._answers.next_answer()) is not None:
            outgoing = self._live(answer[0])
            if outgoing is None:
                self.num_late_frames += 1
            else:
                self._answered(outgoing, answer[1], now)

    def receive_eof(self) -> None:
        self._answers.receive_eof()

    def _answered(self, outgoing: Outgoing, answer: Answer, now: float) -> None:
        transfer = outgoing.transfer
        if isinstance(answer, KVAccept):
            self._accepted(outgoing, answer, now)
        elif isinstance(answer, KVReject):
            if transfer.state is not SenderState.OPENED:
                raise ProtocolError(f"REJECT for transfer {transfer.transfer_id} in state {transfer.state}")
            transfer.failed(now)
            self._end(outgoing, outgoing.rejected(answer))
        elif isinstance(answer, KVAck):
            transfer.acked(now)
            self._meter.drained(outgoing.busy, answer.received_at, now)
            self._end(outgoing, TransferAcked(*outgoing.ids, outgoing.stats(now)))
        else:
            self._fail(outgoing, answer.reason, error_of(answer), now)

    def _accepted(self, outgoing: Outgoing, accept: KVAccept, now: float) -> None:
        try:
            outgoing.transfer.accepted(accept, now)
        except StartTokenError as error:
            self._give_up(outgoing, FailReason.PROTOCOL, error, now)
            return
        outgoing.accepted_at = now
        self._events.append(TransferAccepted(*outgoing.ids, accept.start_token, now))
        for item in self._outbox.take_held(outgoing):
            self._queue(outgoing, item, now)

    # ends

    def tick(self, now: float) -> None:
        """Fails transfers whose answers are overdue. Raises TransferTimeout if the whole connection is stuck."""
        for outgoing in list(self._transfers.values()):
            if outgoing.failure is None:
                try:
                    outgoing.transfer.check_deadline(now)
                except TransferTimeout as error:
                    self._give_up(outgoing, FailReason.TIMEOUT, error, now)
        limit_s = self._limits.stall_timeout_s
        if self._vector is not None and now >= self._progress_at + limit_s:
            raise TransferTimeout(f"the connection took no byte for {limit_s:g} s in the middle of a frame")

    def next_wakeup(self, can_write: bool) -> float | None:
        """When ``tick`` or ``buffers`` may have something to do although nothing else happened."""
        times = [o.transfer.deadline for o in self._transfers.values() if o.failure is None]
        if can_write:
            times.append(self._stalled_until)
            times.append(
                self._progress_at + self._limits.stall_timeout_s if self._vector else self._outbox.next_at()
            )
        return min((at for at in times if at is not None), default=None)

    @property
    def can_rest(self) -> bool:
        """No frame is half written, and the next one is KV of a transfer that can rest."""
        return self._vector is None and self._outbox.can_wait

    @property
    def is_writing_rest(self) -> bool:
        """The frame being written is KV of a transfer that can rest."""
        return self._writing is not None and self._writing.can_rest

    @property
    def is_coded(self) -> bool:
        """The frame being written came out of a codec that is more than a copy."""
        return self._writing is not None and not self._writing.codec.is_identity

    @property
    def wants_to_write(self) -> bool:
        """A frame is half written and waits only for room in the socket."""
        return self._vector is not None and self._stalled_until is None

    @property
    def needs_connection(self) -> bool:
        return self._vector is not None or self._outbox.has_sendable

    @property
    def num_waiting_frames(self) -> int:
        """May be read from any thread."""
        return self._outbox.num_frames

    def connection_lost(self, error: TransportError, now: float, keep_unopened: bool) -> None:
        """Ends every transfer; ``keep_unopened``: those whose OPEN was not sent wait for the next connection."""
        self._vector = self._writing = self._stalled_until = None
        self.is_cut = False
        self._meter.stopped(now)
        self._answers = AnswerDecoder()
        for outgoing in list(self._transfers.values()):
            if outgoing.failure is not None:
                self._end(outgoing, outgoing.failure)
            elif not (keep_unopened and outgoing.transfer.state is SenderState.IDLE):
                self._fail(outgoing, reason_of(error), error, now)
        self._outbox.drop_aborts()

    def take_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def _give_up(self, outgoing: Outgoing, reason: FailReason, error: TransportError, now: float) -> None:
        """Fails a transfer from this side and tells the peer, if it knows of the transfer."""
        was_opened = outgoing.transfer.state is not SenderState.IDLE
        self._fail(outgoing, reason, error, now)
        if was_opened:
            failure = KVFailure(reason=reason, detail=str(error)[:4096])
            self._outbox.put(QueuedAbort(control_frame(FrameType.ABORT, outgoing.transfer, failure)), now)

    def _fail(self, outgoing: Outgoing, reason: FailReason, error: TransportError, now: float) -> None:
        outgoing.transfer.failed(now)
        forget_frames(error)
        event = TransferFailed(*outgoing.ids, reason, error)
        if self._writing is outgoing and self._vector is not None:
            if self._vector.remaining_bytes < self._vector.num_bytes:
                outgoing.failure = event
                self._outbox.drop(outgoing)
                return
            self._vector = self._writing = None
        self._end(outgoing, event)

    def _end(self, outgoing: Outgoing, event: TransferEvent) -> None:
        self._outbox.drop(outgoing)
        del self._transfers[outgoing.transfer.transfer_id]
        self._events.append(event)
