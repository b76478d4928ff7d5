"""The receiving end of one connection without its socket: where the next bytes belong, and what they mean.

Owned by one thread. Before each read ``buffers()`` says where the bytes go: for raw v2 DATA these are the destination
views themselves, so the kernel copies straight into the cache blocks and nobody copies again. What must be done
outside comes from ``take_instructions()``.

A transfer that fails in the middle of a DATA frame lets go of its views at once; the rest of the frame goes to waste,
framing stays intact and the connection serves its other transfers.
"""

from collections.abc import Sequence

from transport.codec import Codec, row_shape
from transport.errors import (
    ChecksumError,
    ProtocolError,
    StartTokenError,
    TransferAborted,
    TransferTimeout,
    TransportError,
    TruncatedTransfer,
)
from transport.failures import forget_frames
from transport.frame import Frame, FrameType, encode_frame
from transport.frame_reader import FrameArrived, FrameReader, SliceArrived
from transport.incoming import Body, Incoming, begin_body, judge_open, nowhere
from transport.instructions import (
    AskToAdmit,
    AskToReserve,
    Destination,
    Instruction,
    ReportFailure,
    SendReply,
)
from transport.iovec import Scratch
from transport.kv_transfer import ReceiverState, ReceiverTransfer, TransferLimits
from transport.messages import (
    FailReason,
    KVAccept,
    KVAck,
    KVCommit,
    KVContract,
    KVFailure,
    KVHeader,
    KVReject,
    Pong,
    RejectReason,
    decode,
    encode,
)


class ReceiverConnection:
    def __init__(self, expected: KVContract, codecs: Sequence[Codec], limits: TransferLimits) -> None:
        self.num_late_frames = 0
        self.num_rejected = 0
        self.num_failed = 0
        self.num_completed = 0
        self._expected = expected
        self._codecs = codecs
        self._limits = limits
        self._reader = FrameReader()
        self._incoming: dict[int, Incoming] = {}
        self._last_opened_id = 0
        self._body: Body | None = None
        self._staging = Scratch()
        self._instructions: list[Instruction] = []
        self._progress_at = 0.0

    # bytes in

    def buffers(self) -> list[memoryview]:
        return self._reader.buffers()

    @property
    def body_bytes_due(self) -> int:
        """So many bytes will come before anything must be done but storing them."""
        return self._reader.body_bytes_due

    def received(self, num_bytes: int, now: float) -> None:
        """Raises FramingError or ProtocolError if the connection cannot go on; the owner must close it."""
        self._progress_at = now
        arrived = self._reader.received(num_bytes)
        if isinstance(arrived, SliceArrived):
            self._data_begins(arrived, now)
        elif isinstance(arrived, FrameArrived):
            self._frame_arrived(arrived, now)

    def receive_eof(self) -> None:
        """Raises TruncatedTransfer if a frame or an accepted transfer is incomplete."""
        unfinished = [
            one.transfer.header.request_id for one in self._incoming.values() if one.transfer.is_accepted
        ]
        if self._reader.is_inside_frame or unfinished:
            raise TruncatedTransfer(
                f"the stream ended in the middle of a transfer: {', '.join(unfinished) or 'none open'}"
            )

    def _data_begins(self, arrived: SliceArrived, now: float) -> None:
        incoming = self._incoming.get(arrived.header.transfer_id)
        self._body = None if incoming is None else begin_body(incoming, arrived, self._staging, now)
        if self._body is not None and self._body.doubt is None:
            self._reader.direct(self._body.target)

    def _frame_arrived(self, frame: FrameArrived, now: float) -> None:
        frame_type, transfer_id = frame.header.type, frame.header.transfer_id
        if frame_type is FrameType.PING:
            self._reply(FrameType.PONG, transfer_id, Pong(payload_bytes=frame.header.payload_bytes))
        elif frame_type is FrameType.OPEN:
            self._opened(frame, now)
        elif frame_type not in (FrameType.DATA, FrameType.COMMIT, FrameType.ABORT):
            raise ProtocolError(
                f"a sender sent {frame_type.name}; allowed are OPEN, DATA, COMMIT, ABORT, PING"
            )
        else:
            incoming = self._incoming.get(transfer_id)
            body, self._body = self._body, None
            if incoming is None:
                self.num_late_frames += 1
                return
            try:
                if not frame.is_intact:
                    raise ChecksumError(
                        f"a {frame_type.name} frame arrived damaged: its checksum does not match"
                    )
                if frame_type is FrameType.COMMIT:
                    self._committed(incoming, decode(frame.payload, KVCommit), now)
                elif frame_type is FrameType.ABORT:
                    failure = decode(frame.payload, KVFailure)
                    error = TransferAborted(f"the sender gave up ({failure.reason}): {failure.detail}")
                    self._fail(incoming, FailReason.ABORTED, error, now, tell_peer=False)
                elif body is not None:
                    self._data_arrived(incoming, body, frame.header.checksum, now)
            except ChecksumError as error:
                self._fail(incoming, FailReason.CHECKSUM, error, now)
            except ProtocolError as error:
                self._fail(incoming, FailReason.PROTOCOL, error, now)

    def _opened(self, frame: FrameArrived, now: float) -> None:
        transfer_id = frame.header.transfer_id
        live = self._incoming.get(transfer_id)
        if live is not None:
            error = ProtocolError(f"a second OPEN came for live transfer id {transfer_id}")
            self._fail(live, FailReason.PROTOCOL, error, now)
            return
        if not frame.is_intact:
            self._reject(transfer_id, RejectReason.PROTOCOL, "the OPEN frame arrived damaged")
            return
        if transfer_id <= self._last_opened_id:
            detail = f"transfer id {transfer_id} was used before; due is above {self._last_opened_id}"
            self._reject(transfer_id, RejectReason.PROTOCOL, detail)
            return
        self._last_opened_id = transfer_id
        judged = judge_open(frame.payload, self._expected, self._codecs)
        if isinstance(judged, KVReject):
            self._send_reject(transfer_id, judged)
            return
        header, codec = judged
        if self._find(header.request_id, header.attempt) is not None:
            self._reject(transfer_id, RejectReason.DUPLICATE, "this attempt of the request is already open")
            return
        incoming = Incoming(ReceiverTransfer(transfer_id, header, self._limits), codec)
        incoming.transfer.opened(now)
        self._incoming[transfer_id] = incoming
        self._instructions.append(AskToReserve(transfer_id, header))

    def _data_arrived(self, incoming: Incoming, body: Body, checksum: int, now: float) -> None:
        if body.doubt is not None:
            raise body.doubt
        if body.staging is not None:
            shape = row_shape(incoming.transfer.header, body.part.num_tokens)
            incoming.codec.decode(body.staging, shape, body.views)
        incoming.transfer.data_received(body.part, body.wire_bytes, checksum, now)

    def _committed(self, incoming: Incoming, commit: KVCommit, now: float) -> None:
        transfer = incoming.transfer
        transfer.committed(commit, now)
        incoming.destination = nowhere
        stats = incoming.stats(commit, now)
        self._instructions.append(AskToAdmit(transfer.transfer_id, transfer.header, commit, stats))

    # decisions in

    def accept(
        self, transfer_id: int, header: KVHeader, destination: Destination, now: float, start_token: int = 0
    ) -> None:
        """Blocks are reserved, and the first ``start_token`` tokens are in them: nothing will write these.

        If the transfer is gone meanwhile, or ``start_token`` cannot be, its failure is reported at once.
        """
        incoming = self._incoming.get(transfer_id)
        if incoming is None:
            gone = TransferAborted("the transfer had ended before it was accepted")
            self._instructions.append(ReportFailure(header, FailReason.ABORTED, gone))
            return
        accept = KVAccept(start_token=start_token, block_size=self._expected.block_size)
        try:
            incoming.transfer.reserved(accept, now)
        except StartTokenError as error:
            self.reject(transfer_id, RejectReason.PROTOCOL, str(error), now)
            self._instructions.append(ReportFailure(header, FailReason.PROTOCOL, error))
            return
        incoming.destination = destination
        self._reply(FrameType.ACCEPT, transfer_id, accept)

    def reject(self, transfer_id: int, reason: RejectReason, detail: str, now: float) -> None:
        incoming = self._incoming.get(transfer_id)
        if incoming is not None and incoming.transfer.state is ReceiverState.OPENED:
            incoming.transfer.failed(now)
            del self._incoming[transfer_id]
            self._reject(transfer_id, reason, detail)

    def admitted(self, transfer_id: int, is_admitted: bool, now: float) -> None:
        """The answer to AskToAdmit; False fails the transfer, and the failure is reported as any other."""
        incoming = self._incoming[transfer_id]
        transfer = incoming.transfer
        if not is_admitted:
            self._fail(
                incoming, FailReason.REFUSED, TransferAborted("the receiving side would not admit it"), now
            )
            return
        transfer.completed(now)
        del self._incoming[transfer_id]
        self.num_completed += 1
        self._reply(FrameType.ACK, transfer_id, KVAck(received_at=transfer.last_frame_at, verified_at=now))

    def cancel(self, request_id: str, attempt: int, detail: str, now: float) -> None:
        """Gives up one transfer from this side; no effect if it is not live here."""
        incoming = self._find(request_id, attempt)
        if incoming is None:
            return
        if incoming.transfer.is_accepted:
            self._fail(incoming, FailReason.CANCELLED, TransferAborted(detail), now)
        else:
            self.reject(incoming.transfer.transfer_id, RejectReason.CANCELLED, detail, now)

    # ends

    def tick(self, now: float) -> None:
        """Ends transfers that are overdue. Raises TransferTimeout if the peer stopped in the middle of a frame."""
        for incoming in list(self._incoming.values()):
            try:
                incoming.transfer.check_deadline(now)
            except TransferTimeout as error:
                if incoming.transfer.is_accepted:
                    self._fail(incoming, FailReason.TIMEOUT, error, now)
                else:
                    self.reject(incoming.transfer.transfer_id, RejectReason.TIMEOUT, str(error), now)
        if self._reader.is_inside_frame and now >= self._progress_at + self._limits.stall_timeout_s:
            raise TransferTimeout(
                f"no byte came for {self._limits.stall_timeout_s:g} s in the middle of a frame"
            )

    def next_wakeup(self) -> float | None:
        times = [incoming.transfer.deadline for incoming in self._incoming.values()]
        if self._reader.is_inside_frame:
            times.append(self._progress_at + self._limits.stall_timeout_s)
        return min((at for at in times if at is not None), default=None)

    def connection_lost(self, reason: FailReason, error: TransportError, now: float) -> None:
        for incoming in list(self._incoming.values()):
            self._fail(incoming, reason, error, now, tell_peer=False)

    @property
    def has_instructions(self) -> bool:
        return bool(self._instructions)

    def take_instructions(self) -> list[Instruction]:
        instructions, self._instructions = self._instructions, []
        return instructions

    def _find(self, request_id: str, attempt: int) -> Incoming | None:
        for incoming in self._incoming.values():
            header = incoming.transfer.header
            if header.request_id == request_id and header.attempt == attempt:
                return incoming
        return None

    def _fail(
        self,
        incoming: Incoming,
        reason: FailReason,
        error: TransportError,
        now: float,
        tell_peer: bool = True,
    ) -> None:
        transfer = incoming.transfer
        was_accepted = transfer.is_accepted
        transfer.failed(now)
        forget_frames(error)
        del self._incoming[transfer.transfer_id]
        incoming.destination = nowhere
        self.num_failed += 1
        if self._body is not None and self._body.transfer_id == transfer.transfer_id:
            self._reader.discard_rest()
            self._body = None
        if tell_peer:
            failure = KVFailure(reason=reason, detail=str(error)[:4096])
            self._reply(FrameType.FAIL, transfer.transfer_id, failure)
        if was_accepted:
            self._instructions.append(ReportFailure(transfer.header, reason, error))

    def _reject(self, transfer_id: int, reason: RejectReason, detail: str) -> None:
        self._send_reject(transfer_id, KVReject(reason=reason, detail=detail[:4096]))

    def _send_reject(self, transfer_id: int, reject: KVReject) -> None:
        self.num_rejected += 1
        self._reply(FrameType.REJECT, transfer_id, reject)

    def _reply(
        self, frame_type: FrameType, transfer_id: int, message: KVAccept | KVReject | KVAck | KVFailure | Pong
    ) -> None:
        self._instructions.append(SendReply(encode_frame(Frame(frame_type, transfer_id, encode(message)))))
