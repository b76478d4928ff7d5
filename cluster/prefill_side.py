"""The prefill worker's half of a handoff: compute, send, and free only when the decode worker has it (or never will).

Runs in the engine's thread only. Life of a job:

    StartPrefill -> OPEN sent, prompt queued -> computed, DATA sent meanwhile or then -> COMMIT sent -> ACK: released
                        |                          |
                        +-- rejected, failed, aborted: freed at once; while DATA may still leave, freed when it cannot

``kv_stream`` sends each layer's rows as soon as they are computed, or with ``bulk`` all of them at the end. ACCEPT,
which says how many leading tokens the decode worker holds already, may come before or after that. All KV is handed to
the wire either way: the wire leaves those tokens out and can do so without waiting for an engine step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cluster.attempt import engine_request, key_of
from cluster.attempt_reports import AttemptReports, PrefillClock
from cluster.codec_selector import CodecSelector
from cluster.control import AbortRequest, StartPrefill
from cluster.events import (
    TransferCompleted,
    TransferProgressed,
    TransferStarted,
)
from cluster.kv_stream import KVStream, least_piece_tokens
from cluster.worker_outbox import WorkerOutbox
from engine.engine import Engine
from engine.kv_port import KVPort, KVPorts, StagingFull
from engine.outputs import NewToken, PrefillProgress
from transport import events as wire
from transport.errors import OutboxFull, UnknownCodec
from transport.messages import KVContract, KVHeader, PrefillResult, RejectReason
from transport.sender import KVSender


@dataclass(slots=True)
class PrefillJob:
    message: StartPrefill
    sender: KVSender
    transfer_id: int
    header: KVHeader
    stream: KVStream
    port: KVPort
    codec_reason: str  # why this codec, "" where it was asked for by name
    clock: PrefillClock = field(default_factory=PrefillClock)
    accepted: wire.TransferAccepted | None = None
    is_started: bool = False  # the log knows that DATA leaves
    told_bytes: int = 0  # of KV under way, as the log knows it
    is_aborted: bool = False  # the router no longer wants to hear of it


class PrefillSide:
    """``sender_to(host, port)`` gives the persistent connection to a decode worker.

    ``delivery`` is "stream" or "bulk"; a transfer by path v1 is bulk always. ``stream_from_tokens``: a prompt of that
    length leaves while it is computed, 0 = none does.
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        contract: KVContract,
        outbox: WorkerOutbox,
        sender_to: Callable[[str, int], KVSender],
        delivery: str,
        codec_selector: CodecSelector,
        ports: KVPorts,
    ) -> None:
        self._ports = ports
        self._worker_id = worker_id
        self._engine = engine
        self._contract = contract
        self._outbox = outbox
        self._reports = AttemptReports(worker_id, outbox)
        self._sender_to = sender_to
        self._delivery = delivery
        self._codec_selector = codec_selector
        self.stream_from_tokens = 0 if delivery == "bulk" else least_piece_tokens(contract)
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
            path="v1" if message.path == "v1" else "v2",
        )
        address = (message.decode_kv_host, message.decode_kv_port)
        choice = self._codec_selector.choose(message.codec, address, header.raw_bytes)
        header = msgspec.structs.replace(header, codec=choice.codec)
        sender, engine = self._sender_to(*address), self._engine
        try:
            port = self._ports.open(lambda: engine.kv_blocks(key), 0, header.num_tokens)
        except StagingFull as error:
            self._reports.refused(message, str(error))
            return
        try:
            engine.add(engine_request(message), hold=True)
            transfer_id = sender.open(header)
        except (ValueError, UnknownCodec) as error:
            port.close()
            engine.abort(key)
            self._reports.refused(message, str(error))
            return
        stream = KVStream(
            sender,
            transfer_id,
            header,
            port.outgoing,
            is_bulk=self._delivery == "bulk" or header.path == "v1",
            link_bytes_per_s=self._codec_selector.link_bytes_per_s(address),
        )
        self.jobs[key] = PrefillJob(message, sender, transfer_id, header, stream, port, choice.reason)

    def layer_written(self, prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
        """In the middle of a step: this layer's rows of these ranges are in place."""
        for progress in prefilled:
            job = self.jobs.get(progress.request_id)
            if job is not None:
                job.stream.layer_written(layer, progress.start + progress.num_tokens)

    def progressed(
        self, progress: PrefillProgress, step_started_at: float, now: float, own_s: float | None
    ) -> None:
        """A chunk of a job's prompt was computed."""
        job = self.jobs.get(progress.request_id)
        if job is not None:
            self._reports.prefill_progressed(job.message, job.clock, progress, step_started_at, now, own_s)
            self._tell_started(job)

    def first_token(self, token: NewToken, now: float) -> None:
        """The prompt is computed: hand what is left of it to the wire, and the end."""
        job = self.jobs[token.request_id]
        self._reports.prefill_done(job.message, job.clock, job.header.num_tokens, now)
        result = PrefillResult(
            first_token_id=token.token_id,
            seed=job.message.sampling.seed,
            output_position=token.output_position,
            prefill_started_at=job.clock.started_at,
            prefill_done_at=job.clock.done_at,
        )
        try:
            job.stream.finish(result)
        except OutboxFull as error:
            job.sender.abort(job.transfer_id, str(error))
            return
        self._tell_started(job)

    def _tell_started(self, job: PrefillJob) -> None:
        """Once per job, when the transfer is accepted and has something to send."""
        if job.is_started or job.is_aborted or job.accepted is None or not job.stream.first_sent_at:
            return
        job.is_started = True
        message, header, start_token = job.message, job.header, job.accepted.start_token
        self._outbox.emit(
            TransferStarted(
                at=max(job.stream.first_sent_at, job.accepted.accepted_at),
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                from_worker=self._worker_id,
                to_worker=message.decode_worker,
                codec=header.codec,
                codec_reason=job.codec_reason,
                tokens=header.num_tokens - start_token,
                raw_bytes=header.raw_bytes_from(start_token),
                skipped_tokens=start_token,
                skipped_bytes=header.raw_bytes - header.raw_bytes_from(start_token),
            )
        )

    def tell_transfers(self, now: float) -> None:
        """How far the transfers under way are, for the log; called as often as statistics are taken."""
        for job in self.jobs.values():
            sent_bytes = job.sender.written_raw_bytes(job.transfer_id) if job.is_started else 0
            if sent_bytes > job.told_bytes:
                job.told_bytes = sent_bytes
                self._outbox.emit(
                    TransferProgressed(
                        at=now,
                        source=self._worker_id,
                        request_id=job.message.request_id,
                        attempt=job.message.attempt,
                        sent_bytes=sent_bytes,
                    )
                )

    def transfer_event(self, event: wire.TransferEvent, key: str) -> None:
        """What the wire says of a job's transfer; the last event of each frees the job."""
        job = self.jobs.get(key)
        if job is None:
            return
        if isinstance(event, wire.TransferAccepted):
            job.accepted = event
            job.stream.skip(event.start_token)
            self._tell_started(job)
            return
        self._free(key)
        if isinstance(event, wire.TransferAcked):
            self._completed(job, event.stats)
        elif job.is_aborted:
            if job.is_started and isinstance(event, wire.TransferFailed):
                self._reports.transfer_failed(job.message, str(event.reason), str(event.error))
        else:
            if isinstance(event, wire.TransferRejected):
                reason = "decode_full" if event.reason is RejectReason.FULL else str(event.reason)
                differs = f"{event.field}: {event.ours} here, {event.theirs} there" if event.field else ""
                detail = differs or event.detail
            else:
                reason, detail = str(event.reason), str(event.error)
            self._reports.handoff_failed(job.message, reason, detail)

    def _completed(self, job: PrefillJob, stats: wire.TransferStats) -> None:
        message, header = job.message, job.header
        self._codec_selector.transferred(
            (message.decode_kv_host, message.decode_kv_port),
            header.codec,
            stats.raw_bytes,
            stats.payload_bytes,
            stats.busy_s,
            stats.acked_at - stats.first_frame_at,
        )
        self._outbox.emit(
            TransferCompleted(
                at=stats.acked_at,
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                from_worker=self._worker_id,
                to_worker=message.decode_worker,
                codec=header.codec,
                tokens=header.num_tokens - stats.start_token,
                raw_bytes=stats.raw_bytes,
                wire_bytes=stats.payload_bytes,
                duration_s=stats.acked_at - stats.first_frame_at,
                exposed_s=stats.acked_at - max(job.clock.done_at, stats.first_frame_at),
                busy_s=stats.busy_s,
                hidden_busy_s=stats.hidden_busy_s,
                skipped_tokens=stats.start_token,
                skipped_bytes=header.raw_bytes - header.raw_bytes_from(stats.start_token),
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
        if job.stream.has_sent:
            self._engine.halt(key)  # the wire may still read its blocks: its last word frees them
        else:
            self._free(key)
        return True

    def _free(self, key: str) -> None:
        """Forget a job, whatever its status: the wire reads nothing of it any more."""
        self.jobs.pop(key).port.close()
        self._engine.abort(key)
