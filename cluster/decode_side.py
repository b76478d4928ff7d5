"""The decode worker's half of a handoff, and everything it decodes: reserve, take the KV in, adopt, stream tokens.

Runs in the engine's thread only (the wire's threads post). Life of a job:

    StartDecode and OPEN, in either order -> blocks reserved, ACCEPT -> KV arrives in the blocks -> COMMIT verified
        -> adopted, ACK, tokens -> finished: freed
    StartLocal -> prefilled here -> tokens -> finished: freed

KV of the prompt's beginning that the prefix cache holds is shared and not asked for again, whatever the codec: what is
cached is exact. The wire is given only the blocks behind it.

A job's blocks are freed at once when it is aborted, unless the wire may still write them: then when it cannot.
"""

import time
from dataclasses import dataclass, field
from typing import Final

from cluster.attempt import attempt_key, engine_request, key_of
from cluster.attempt_reports import AttemptReports, PrefillClock
from cluster.control import (
    AbortRequest,
    DecodeAdopted,
    StartDecode,
    StartLocal,
    TokenProduced,
)
from cluster.events import DecodeAdmitted
from cluster.worker_outbox import WorkerOutbox
from engine.engine import Engine
from engine.kv_port import KVPort, KVPorts, StagingFull
from engine.outputs import NewToken, PrefillProgress
from engine.scheduler import NoCapacity
from transport.codec import LOSSY_CODECS
from transport.messages import KVCommit, KVHeader, RejectReason
from transport.receiver import KVReceiver
from transport.receiver_peer import OpenReply

OPEN_TIMEOUT_S: Final = 5.0
"""How long an OPEN waits for the router's word on its request before it is refused."""


@dataclass(slots=True)
class DecodeJob:
    message: StartDecode | StartLocal
    clock: PrefillClock = field(default_factory=PrefillClock)  # of a local prefill
    is_prefilled: bool = False
    port: KVPort | None = None  # the wire may write its blocks
    is_aborted: bool = False  # the router no longer wants to hear of it

    @property
    def is_receiving(self) -> bool:
        return self.port is not None

    def receives_no_more(self) -> None:
        if self.port is not None:
            self.port.close()
            self.port = None


@dataclass(frozen=True, slots=True)
class EarlyOpen:
    """An OPEN that came before its StartDecode."""

    header: KVHeader
    reply: OpenReply
    opened_at: float


class DecodeSide:
    """``receiver`` is set by the worker once it listens."""

    def __init__(self, worker_id: str, engine: Engine, outbox: WorkerOutbox, ports: KVPorts) -> None:
        self._ports = ports
        self._worker_id = worker_id
        self._engine = engine
        self._outbox = outbox
        self._reports = AttemptReports(worker_id, outbox)
        self.receiver: KVReceiver | None = None
        self.jobs: dict[str, DecodeJob] = {}  # by attempt key
        self._early: dict[str, EarlyOpen] = {}

    # --- starting ---------------------------------------------------------------------------------------------

    def start_local(self, message: StartLocal) -> None:
        key = key_of(message)
        try:
            self._engine.add(engine_request(message))
        except ValueError as error:
            self._reports.refused(message, str(error))
            return
        self.jobs[key] = DecodeJob(message)

    def start_decode(self, message: StartDecode) -> None:
        key = key_of(message)
        self.jobs[key] = DecodeJob(message)
        early = self._early.pop(key, None)
        if early is not None:
            self._reserve(key, early.header, early.reply)

    def opened(self, header: KVHeader, reply: OpenReply) -> None:
        """A prefill worker asks to send this KV; its header was found to match this engine."""
        key = attempt_key(header.request_id, header.attempt)
        if key in self.jobs:
            self._reserve(key, header, reply)
        else:
            self._early[key] = EarlyOpen(header, reply, time.monotonic())

    def drop_late_opens(self, now: float) -> None:
        """Refuse OPENs whose request the router never named."""
        for key, early in list(self._early.items()):
            if now - early.opened_at > OPEN_TIMEOUT_S:
                del self._early[key]
                early.reply.reject(
                    RejectReason.UNKNOWN_REQUEST, f"no such request within {OPEN_TIMEOUT_S:g} s"
                )

    def _reserve(self, key: str, header: KVHeader, reply: OpenReply) -> None:
        job = self.jobs[key]
        message = job.message
        num_tokens = len(message.prompt_token_ids)
        if not isinstance(message, StartDecode) or job.is_receiving:
            reply.reject(RejectReason.DUPLICATE, f"{key} is already here")
        elif header.num_tokens != num_tokens:
            reply.reject(
                RejectReason.MISMATCH, f"num_tokens is {header.num_tokens}; the prompt has {num_tokens}"
            )
        else:
            try:
                num_held = self._engine.reserve(engine_request(message))
                own_blocks = self._engine.kv_blocks(key)[num_held // self._engine.cache.block_size :]
                port = self._ports.open(lambda: own_blocks, num_held, num_tokens - num_held)
            except (NoCapacity, StagingFull) as error:
                del self.jobs[key]
                self._engine.abort(key)
                reply.reject(RejectReason.FULL, str(error))
                self._reports.handoff_failed(message, "decode_full", str(error))
                return
            except ValueError as error:
                del self.jobs[key]
                reply.reject(RejectReason.PROTOCOL, str(error))
                self._reports.refused(message, str(error))
                return
            job.port = port
            reply.accept(port.incoming, num_held)

    # --- the transfer's end -----------------------------------------------------------------------------------

    def completed(self, header: KVHeader, commit: KVCommit, verified_at: float) -> bool:
        """All KV is in place and verified. False: it is not wanted any more."""
        key = attempt_key(header.request_id, header.attempt)
        job = self.jobs.get(key)
        if job is None or job.port is None or job.is_aborted:
            return False
        message = job.message
        if (commit.seed, commit.output_position) != (message.sampling.seed, 0):
            return False
        job.port.land()
        job.receives_no_more()
        reason = self._engine.adopt(key, commit.first_token_id, exact=header.codec not in LOSSY_CODECS)
        now = time.monotonic()
        self._outbox.say(
            DecodeAdopted(
                request_id=header.request_id,
                attempt=header.attempt,
                verified_at=verified_at,
                admitted_at=now,
                prefill_started_at=commit.prefill_started_at,
                prefill_done_at=commit.prefill_done_at,
            )
        )
        self._outbox.emit(
            DecodeAdmitted(
                at=now,
                source=self._worker_id,
                request_id=header.request_id,
                attempt=header.attempt,
                worker_id=self._worker_id,
                verified_at=verified_at,
            )
        )
        first = NewToken(key, commit.first_token_id, commit.output_position)
        self._outbox.say_tokens([self.token(first, now, str(reason or ""))])
        return True

    def failed(self, header: KVHeader, reason: str, detail: str) -> None:
        """The transfer is over without success and the wire no longer writes the blocks."""
        key = attempt_key(header.request_id, header.attempt)
        job = self.jobs.get(key)
        if job is None or not job.is_receiving:
            return
        del self.jobs[key]
        job.receives_no_more()
        self._engine.abort(key)
        if not job.is_aborted:
            self._reports.handoff_failed(job.message, reason, detail)

    # --- computing --------------------------------------------------------------------------------------------

    def progressed(
        self, progress: PrefillProgress, step_started_at: float, now: float, own_s: float | None
    ) -> None:
        """A chunk of a local prompt was computed. A recompute after preemption is not reported again."""
        job = self.jobs.get(progress.request_id)
        if job is None or not isinstance(job.message, StartLocal) or job.is_prefilled:
            return
        message = job.message
        self._reports.prefill_progressed(message, job.clock, progress, step_started_at, now, own_s)
        if progress.done:
            job.is_prefilled = True
            num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
            self._reports.prefill_done(message, job.clock, num_tokens, now)

    def token(self, token: NewToken, now: float, finish_reason: str) -> TokenProduced:
        """One sampled token as the router wants it; the job is forgotten with its last."""
        message = self.jobs[token.request_id].message
        if finish_reason:
            del self.jobs[token.request_id]
        return TokenProduced(
            request_id=message.request_id,
            attempt=message.attempt,
            position=token.output_position,
            token_id=token.token_id,
            at=now,
            finish_reason=finish_reason,
        )

    # --- giving up --------------------------------------------------------------------------------------------

    def abort(self, message: AbortRequest) -> bool:
        """Drop a job in whatever phase it is. False if there is none."""
        key = key_of(message)
        early = self._early.pop(key, None)
        if early is not None:
            early.reply.reject(RejectReason.CANCELLED, message.reason)
        job = self.jobs.get(key)
        if job is None:
            return early is not None
        job.is_aborted = True
        if job.is_receiving and self.receiver is not None:
            self.receiver.cancel(message.request_id, message.attempt, message.reason)  # ``failed`` follows
        else:
            del self.jobs[key]
            self._engine.abort(key)
        return True
