"""The prefill worker's half of a handoff: compute, send, and free only when the decode worker has it (or never will).

Runs in the engine's thread only. Life of a job:

    StartPrefill -> OPEN sent, prompt queued -> computed: DATA and COMMIT sent -> ACK: released
                        |                             |
                        +-- rejected, failed, aborted: freed at once; while DATA may still leave, freed when it cannot
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.attempt import engine_request, key_of
from cluster.attempt_reports import AttemptReports, PrefillClock
from cluster.control import AbortRequest, StartPrefill
from cluster.events import (
    TransferCompleted,
    TransferStarted,
)
from cluster.worker_outbox import WorkerOutbox
from engine.engine import Engine
from engine.outputs import NewToken, PrefillProgress
from transport import events as wire
from transport.errors import OutboxFull, UnknownCodec
from transport.messages import KVContract, KVHeader, PrefillResult, RejectReason
from transport.sender import KVSender

PROGRESS_INTERVAL_S: Final = 0.2


@dataclass(slots=True)
class PrefillJob:
    message: StartPrefill
    sender: KVSender
    transfer_id: int
    clock: PrefillClock = field(default_factory=PrefillClock)
    is_sent: bool = False  # the wire may read its blocks
    is_aborted: bool = False  # the router no longer wants to hear of it


class PrefillSide:
    """``sender_to(host, port)`` gives the persistent connection to a decode worker."""

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        contract: KVContract,
        outbox: WorkerOutbox,
        sender_to: Callable[[str, int], KVSender],
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._contract = contract
        self._outbox = outbox
        self._reports = AttemptReports(worker_id, outbox)
        self._sender_to = sender_to
        self.jobs: dict[str, PrefillJob] = {}  # by attempt key

    def start(self, message: StartPrefill) -> None:
        key = key_of(message)
        contract = self._contract
        header = KVHeader(
            model_fingerprint=contract.model_fingerprint,
            num_layers=contract.num_layers,
            num_kv_heads=contract.num_kv_heads,
            head_dim=contract.head_dim,
            dtype=contract.dtype,
            block_size=contract.block_size,
            layout=contract.layout,
            request_id=message.request_id,
            attempt=message.attempt,
            num_tokens=len(message.prompt_token_ids),
            codec=message.codec,
            path="v1" if message.path == "v1" else "v2",
        )
        sender = self._sender_to(message.decode_kv_host, message.decode_kv_port)
        try:
            self._engine.add(engine_request(message), hold=True)
            transfer_id = sender.open(header)
        except (ValueError, UnknownCodec) as error:
            self._engine.abort(key)
            self._reports.refused(message, str(error))
            return
        self.jobs[key] = PrefillJob(message, sender, transfer_id)

    def progressed(self, progress: PrefillProgress, step_started_at: float, now: float) -> None:
        """A chunk of a job's prompt was computed."""
        job = self.jobs.get(progress.request_id)
        if job is not None:
            self._reports.prefill_progressed(job.message, job.clock, progress, step_started_at, now)

    def first_token(self, token: NewToken, now: float) -> None:
        """The prompt is computed: hand everything to the wire."""
        job = self.jobs[token.request_id]
        message = job.message
        self._reports.prefill_done(message, job.clock, len(message.prompt_token_ids), now)
        self._outbox.emit(
            TransferStarted(
                at=time.monotonic(),
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                from_worker=self._worker_id,
                to_worker=message.decode_worker,
                codec=message.codec,
                tokens=len(message.prompt_token_ids),
                raw_bytes=self._raw_bytes(message),
            )
        )
        self._send(job, token)

    def _send(self, job: PrefillJob, token: NewToken) -> None:
        num_tokens = len(job.message.prompt_token_ids)
        block_table = self._engine.kv_blocks(token.request_id)
        job.is_sent = True
        try:
            for layer in range(self._contract.num_layers):
                for kv in (0, 1):
                    views = self._engine.cache.block_bytes(layer, kv, block_table, 0, num_tokens)
                    job.sender.send(job.transfer_id, layer, kv, 0, num_tokens, views)
        except OutboxFull as error:
            job.sender.abort(job.transfer_id, str(error))
            return
        job.sender.commit(
            job.transfer_id,
            PrefillResult(
                first_token_id=token.token_id,
                seed=job.message.sampling.seed,
                output_position=token.output_position,
                prefill_started_at=job.clock.started_at,
                prefill_done_at=job.clock.done_at,
            ),
        )

    def transfer_event(self, event: wire.TransferEvent, key: str) -> None:
        """What the wire says of a job's transfer; the last event of each frees the job."""
        job = self.jobs.get(key)
        if job is None or isinstance(event, wire.TransferAccepted):
            return
        del self.jobs[key]
        self._engine.abort(key)  # whatever its status: the wire no longer reads its blocks
        if isinstance(event, wire.TransferAcked):
            self._completed(job, event.stats)
        elif not job.is_aborted:
            if isinstance(event, wire.TransferRejected):
                reason = "decode_full" if event.reason is RejectReason.FULL else str(event.reason)
                differs = f"{event.field}: {event.ours} here, {event.theirs} there" if event.field else ""
                detail = differs or event.detail
            else:
                reason, detail = str(event.reason), str(event.error)
            self._reports.handoff_failed(job.message, reason, detail)

    def _completed(self, job: PrefillJob, stats: wire.TransferStats) -> None:
        message = job.message
        self._outbox.emit(
            TransferCompleted(
                at=stats.acked_at,
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                from_worker=self._worker_id,
                to_worker=message.decode_worker,
                codec=message.codec,
                tokens=len(message.prompt_token_ids),
                raw_bytes=stats.raw_bytes,
                wire_bytes=stats.payload_bytes,
                duration_s=stats.acked_at - stats.first_frame_at,
                exposed_s=stats.acked_at - max(job.clock.done_at, stats.first_frame_at),
                busy_s=stats.busy_s,
            )
        )

    def abort(self, message: AbortRequest) -> bool:
        """Drop a job. False if there is none."""
        key = key_of(message)
        job = self.jobs.get(key)
        if job is None:
            return False
        job.is_aborted = True
        job.sender.abort(job.transfer_id, message.reason)
        if not job.is_sent:
            del self.jobs[key]
            self._engine.abort(key)
        return True

    def _raw_bytes(self, message: StartPrefill) -> int:
        return 2 * self._contract.num_layers * len(message.prompt_token_ids) * self._contract.token_bytes
