"""The life of one transfer at each end, as plain state: no sockets, no threads, no clock (``now`` is passed in).

Sender                                           Receiver
    IDLE       --open_sent-->    OPENED              AWAIT_OPEN --opened-->     OPENED
    OPENED     --accepted-->     ACCEPTED            OPENED     --reserved-->   RESERVED
    ACCEPTED   --data_sent-->    SENDING             RESERVED   --data_received--> RECEIVING
    SENDING    --data_sent-->    SENDING             RECEIVING  --data_received--> RECEIVING
    SENDING    --commit_sent-->  COMMITTED           RECEIVING  --committed-->  VERIFYING
    COMMITTED  --acked-->        DONE                VERIFYING  --completed-->  COMPLETE
    any but DONE --failed-->     FAILED              any but COMPLETE --failed--> FAILED

Rule 1: an event that is not in the table raises InvalidTransition, which carries the story so far.
Rule 2: a receiver reaches VERIFYING only with a COMMIT whose counts and digest are those of the frames it has seen,
and only when they cover every token that is due of every layer. Nothing else leads to COMPLETE.
Rule 3: within one (layer, kv) tokens come in order, each exactly once; layers and chunks may interleave freely.
Rule 4: due are the tokens from ``start_token`` on, which the receiver names in its ACCEPT and both ends check.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from transport.coverage import Coverage
from transport.errors import InvalidTransition, TransferTimeout
from transport.frame import DataSlice
from transport.messages import KVAccept, KVCommit, KVHeader, PrefillResult, check_start_token

MAX_STORY_LINES = 24


class SenderState(StrEnum):
    IDLE = "IDLE"
    OPENED = "OPENED"
    ACCEPTED = "ACCEPTED"
    SENDING = "SENDING"
    COMMITTED = "COMMITTED"
    DONE = "DONE"
    FAILED = "FAILED"


class ReceiverState(StrEnum):
    AWAIT_OPEN = "AWAIT_OPEN"
    OPENED = "OPENED"
    RESERVED = "RESERVED"
    RECEIVING = "RECEIVING"
    VERIFYING = "VERIFYING"
    COMPLETE = "COMPLETE"
    FAILED = "FAILED"


SENDER_TRANSITIONS: dict[tuple[str, str], str] = {
    (SenderState.IDLE, "open_sent"): SenderState.OPENED,
    (SenderState.OPENED, "accepted"): SenderState.ACCEPTED,
    (SenderState.ACCEPTED, "data_sent"): SenderState.SENDING,
    (SenderState.SENDING, "data_sent"): SenderState.SENDING,
    (SenderState.SENDING, "commit_sent"): SenderState.COMMITTED,
    (SenderState.COMMITTED, "acked"): SenderState.DONE,
    **{(s, "failed"): SenderState.FAILED for s in list(SenderState)[:5]},
}

RECEIVER_TRANSITIONS: dict[tuple[str, str], str] = {
    (ReceiverState.AWAIT_OPEN, "opened"): ReceiverState.OPENED,
    (ReceiverState.OPENED, "reserved"): ReceiverState.RESERVED,
    (ReceiverState.RESERVED, "data_received"): ReceiverState.RECEIVING,
    (ReceiverState.RECEIVING, "data_received"): ReceiverState.RECEIVING,
    (ReceiverState.RECEIVING, "committed"): ReceiverState.VERIFYING,
    (ReceiverState.VERIFYING, "completed"): ReceiverState.COMPLETE,
    **{(s, "failed"): ReceiverState.FAILED for s in list(ReceiverState)[:5]},
}


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long each wait may last. A stalled stream is one with bytes due and none moving."""

    accept_timeout_s: float = 10.0  # OPEN sent -> ACCEPT or REJECT
    stall_timeout_s: float = 5.0  # no byte moves although a frame is on its way
    ack_timeout_s: float = 10.0  # COMMIT sent -> ACK or FAIL
    idle_timeout_s: float = 300.0  # receiver: reserved, and no frame begins

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = dataclasses.asdict(self)[name]
            if not value > 0:
                raise ValueError(f"{name} is {value}; allowed is above 0")


DEFAULT_LIMITS = TransferLimits()


class _Progress:
    """State, story and counts that both ends keep alike."""

    def __init__(self, name: str, state: str, transitions: dict[tuple[str, str], str]) -> None:
        self.name = name
        self.state = state
        self.story: list[str] = [state]
        self._transitions = transitions

    def step(self, event: str, now: float) -> None:
        next_state = self._transitions.get((self.state, event))
        if next_state is None:
            raise InvalidTransition(self.name, self.state, event, self.story)
        if next_state != self.state:
            self.story.append(f"{event} at {now:.6f} -> {next_state}")
            del self.story[1:-MAX_STORY_LINES]
        self.state = next_state


class SenderTransfer:
    """The sending end of one transfer. Methods are events that have happened; each raises InvalidTransition."""

    def __init__(self, transfer_id: int, header: KVHeader, limits: TransferLimits) -> None:
        self.transfer_id = transfer_id
        self.header = header
        self.deadline: float | None = None
        self.coverage = Coverage(header)
        self.first_frame_at: float | None = None
        self._limits = limits
        name = f"{header.request_id}/{header.attempt}"
        self._progress = _Progress(name, SenderState.IDLE, SENDER_TRANSITIONS)

    @property
    def state(self) -> SenderState:
        return SenderState(self._progress.state)

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(self._progress.story)

    @property
    def is_live(self) -> bool:
        return self.state not in (SenderState.DONE, SenderState.FAILED)

    def open_sent(self, now: float) -> None:
        self._progress.step("open_sent", now)
        self.deadline = now + self._limits.accept_timeout_s

    def accepted(self, accept: KVAccept, now: float) -> None:
        """Raises StartTokenError for a receiver that cannot hold what it says; the transfer must then fail."""
        check_start_token(accept.start_token, accept.block_size, self.header.num_tokens)
        self._progress.step("accepted", now)
        self.coverage = Coverage(self.header, accept.start_token)
        self.deadline = None

    def data_sent(self, part: DataSlice, wire_bytes: int, checksum: int, now: float) -> None:
        """A DATA frame is handed to the socket. Raises ProtocolError if it is not the part that is due."""
        self.coverage.check(part)
        self._progress.step("data_sent", now)
        self.coverage.add(part, wire_bytes, checksum)
        if self.first_frame_at is None:
            self.first_frame_at = now

    def commit_sent(self, prefill: PrefillResult, now: float) -> KVCommit:
        """The message to send. Raises ProtocolError if data is missing."""
        self.coverage.require_complete()
        self._progress.step("commit_sent", now)
        self.deadline = now + self._limits.ack_timeout_s
        return self.coverage.commit(prefill)

    def acked(self, now: float) -> None:
        self._progress.step("acked", now)
        self.deadline = None

    def failed(self, now: float) -> None:
        self._progress.step("failed", now)
        self.deadline = None

    def check_deadline(self, now: float) -> None:
        """Raises TransferTimeout if an answer is overdue."""
        if self.deadline is not None and now >= self.deadline:
            limits = self._limits
            what, limit_s = (
                ("ACCEPT", limits.accept_timeout_s)
                if self.state is SenderState.OPENED
                else ("ACK", limits.ack_timeout_s)
            )
            raise TransferTimeout(f"no {what} for transfer {self._progress.name} within {limit_s:g} s")


class ReceiverTransfer:
    """The receiving end of one transfer. Methods are events that have happened; each raises InvalidTransition."""

    def __init__(self, transfer_id: int, header: KVHeader, limits: TransferLimits) -> None:
        self.transfer_id = transfer_id
        self.header = header
        self.deadline: float | None = None
        self.coverage = Coverage(header)
        self.opened_at = 0.0
        self.accepted_at = 0.0
        self.first_frame_at = 0.0
        self.last_frame_at = 0.0
        self._was_accepted = False
        self._limits = limits
        name = f"{header.request_id}/{header.attempt}"
        self._progress = _Progress(name, ReceiverState.AWAIT_OPEN, RECEIVER_TRANSITIONS)

    @property
    def state(self) -> ReceiverState:
        return ReceiverState(self._progress.state)

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(self._progress.story)

    @property
    def is_live(self) -> bool:
        return self.state not in (ReceiverState.COMPLETE, ReceiverState.FAILED)

    @property
    def is_accepted(self) -> bool:
        """Blocks are reserved for it and it has not ended."""
        return self.is_live and self._was_accepted

    def opened(self, now: float) -> None:
        self._progress.step("opened", now)
        self.opened_at = now
        self.deadline = now + self._limits.accept_timeout_s

    def reserved(self, accept: KVAccept, now: float) -> None:
        """Raises StartTokenError if what is said to be held cannot be."""
        check_start_token(accept.start_token, accept.block_size, self.header.num_tokens)
        self._progress.step("reserved", now)
        self.coverage = Coverage(self.header, accept.start_token)
        self.accepted_at = now
        self._was_accepted = True
        self.deadline = now + self._limits.idle_timeout_s

    def data_begins(self, part: DataSlice, now: float) -> None:
        """A DATA frame's slice has arrived, its bytes not yet. Raises ProtocolError if it may not come now."""
        if (self.state, "data_received") not in RECEIVER_TRANSITIONS:
            raise InvalidTransition(self._progress.name, self.state, "data_received", self.story)
        self.coverage.check(part)
        if self.coverage.num_frames == 0:
            self.first_frame_at = now

    def data_received(self, part: DataSlice, wire_bytes: int, checksum: int, now: float) -> None:
        """A DATA frame is whole and its checksum was right."""
        self.coverage.check(part)
        self._progress.step("data_received", now)
        self.coverage.add(part, wire_bytes, checksum)
        self.last_frame_at = now
        self.deadline = now + self._limits.idle_timeout_s

    def committed(self, commit: KVCommit, now: float) -> None:
        """Raises ProtocolError (data missing, counts) or ChecksumError (digest)."""
        self.coverage.verify(commit)
        self._progress.step("committed", now)
        self.deadline = None

    def completed(self, now: float) -> None:
        self._progress.step("completed", now)

    def failed(self, now: float) -> None:
        self._progress.step("failed", now)
        self.deadline = None

    def check_deadline(self, now: float) -> None:
        """Raises TransferTimeout if nobody decided about the OPEN, or an accepted transfer fell silent."""
        if self.deadline is not None and now >= self.deadline:
            limits = self._limits
            what, limit_s = (
                ("decision about OPEN", limits.accept_timeout_s)
                if self.state is ReceiverState.OPENED
                else ("frame", limits.idle_timeout_s)
            )
            raise TransferTimeout(f"no {what} for transfer {self._progress.name} within {limit_s:g} s")
