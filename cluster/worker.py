"""One worker process: an engine thread, the wire's threads, and this control loop, which only moves messages.

Every worker can prefill, decode or do both, request by request; its role is only what the router prefers it for.
"""

import asyncio
import os
import socket
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Final

import psutil

from cluster.block_ownership import BlockOwnership
from cluster.control import (
    AbortRequest,
    AnyMessage,
    Events,
    HealLink,
    InjectLinkFault,
    LinkMeasured,
    Ping,
    Pong,
    ProbeLink,
    ReportBlocks,
    SetLink,
    SetRole,
    Shutdown,
    StartDecode,
    StartLocal,
    StartPrefill,
    WorkerAddress,
    WorkerLoad,
    WorkerSpec,
    WorkerUp,
)
from cluster.decode_side import DecodeSide
from cluster.engine_thread import EngineThread
from cluster.events import Event, HeartbeatMissed, WorkerStats
from cluster.json_stream import MAX_LINE_BYTES, JsonStream, StreamError
from cluster.log_lines import log_line
from cluster.prefill_side import PrefillSide
from cluster.refusal_log import RefusalLog
from cluster.step_meter import StepMeter
from cluster.worker_kv import WorkerKV
from cluster.worker_link import REQUEST_CHANNEL
from cluster.worker_outbox import WorkerOutbox
from cluster.worker_sides import WorkerSides
from engine.engine import Engine
from engine.kv_port import KVPorts
from engine.outputs import EngineStats, PrefillProgress, StepOutput
from engine.weights import LoadedModel
from transport.auth import ServerHandshake, authenticate_stream
from transport.errors import AuthError
from transport.messages import KVContract

STATS_INTERVAL_S: Final = 0.5
KV_LAYOUT: Final = "NHD"  # a token's heads side by side, dimension last


class Worker:
    """``listener`` is the request port, bound before the process entered its network namespace."""

    def __init__(
        self,
        spec: WorkerSpec,
        parent: JsonStream,
        listener: socket.socket,
        engine: Engine,
        loaded: LoadedModel,
    ) -> None:
        self._spec = spec
        self._worker_id = spec.worker_id
        self._role = spec.role
        self._secret = bytes.fromhex(spec.secret)
        self._parent = parent
        self._listener = listener
        self._engine = engine
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._outbox = WorkerOutbox(self._loop, self._deliver)
        config = loaded.config
        contract = KVContract(
            model_fingerprint=loaded.fingerprint,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="bfloat16" if loaded.dtype == "bfloat16" else "float32",
            block_size=engine.config.block_size,
            layout=KV_LAYOUT,
        )
        self._thread = EngineThread(engine, self._stepped, self._engine_died, self._layer_written, self._idle)
        self._refusals = RefusalLog(spec.worker_id, self._outbox.emit)
        self._kv = WorkerKV(spec, contract, self._thread, partial(self._refusals.add, "kv"))
        ports = KVPorts(engine.cache)
        prefill = PrefillSide(
            spec.worker_id,
            engine,
            contract,
            self._outbox,
            self._kv.sender_to,
            spec.profile.kv.delivery,
            self._kv.codec_selector,
            ports,
        )
        decode = DecodeSide(spec.worker_id, engine, self._outbox, ports)
        self._sides = WorkerSides(prefill, decode, self._outbox)
        self._ownership = BlockOwnership(spec.worker_id, engine, self._sides, self._outbox.emit)
        self._kv.connect(prefill, decode)
        self._meter = StepMeter()
        self._process = psutil.Process(os.getpid())
        self._process.cpu_percent()  # the first call only begins the measuring
        self._router: JsonStream | None = None
        self._is_stuck = False
        self._background: set[asyncio.Task[None]] = set()
        self._measuring_codecs: asyncio.Task[None]

    # --- parent link ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the parent closes its link or says Shutdown."""
        self._thread.start()
        server = await asyncio.start_server(self._router_connected, sock=self._listener, limit=MAX_LINE_BYTES)
        self._parent.send(self._up())
        self._measuring_codecs = self._in_background(asyncio.to_thread(self._kv.measure_codecs))
        stats = asyncio.create_task(self._report_for_ever())
        try:
            while (message := await self._parent.receive()) is not None and not isinstance(message, Shutdown):
                self._parent_said(message)
        finally:
            stats.cancel()
            server.close()
            if self._router is not None:
                await self._router.close()
            await self._loop.run_in_executor(None, self._thread.close)
            self._sides.abort_all("worker stops")
            await self._loop.run_in_executor(None, self._kv.close)
            self._report(self._engine.stats())  # the last word: what is still held
            await self._parent.drain()

    def _parent_said(self, message: AnyMessage) -> None:
        match message:
            case Ping(seq=seq):
                self._parent.send(Pong(seq=seq))
            case SetLink():
                self._kv.set_link(message)
            case SetRole(role=role):
                self._role = role
            case InjectLinkFault():
                self._kv.inject(message, time.monotonic())
            case HealLink():
                self._kv.heal()
            case ProbeLink():
                self._in_background(self._probe(message))
            case _:
                raise ValueError(f"a worker has no use for {type(message).__name__}")

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _probe(self, message: ProbeLink) -> None:
        """After the codecs were measured, compiled first where they must be: each would slow the other down, and with
        the probe the start waits for them, so that no transfer does."""
        await asyncio.wait({self._measuring_codecs})
        measured: LinkMeasured = await asyncio.to_thread(self._kv.probe, message)
        self._parent.send(measured)

    def _up(self) -> WorkerUp:
        config = self._loaded.config
        host, port = self._listener.getsockname()[:2]
        return WorkerUp(
            pid=os.getpid(),
            address=WorkerAddress(
                worker_id=self._worker_id,
                role=self._spec.role,
                control_host=host,
                control_port=port,
                kv_host=self._kv.address[0],
                kv_port=self._kv.address[1],
                total_blocks=self._engine.stats().total_blocks,
                block_size=self._engine.config.block_size,
                max_num_seqs=self._engine.config.max_num_seqs,
                max_model_len=self._engine.max_model_len,
                kv_bytes_per_token=config.kv_bytes_per_token(self._loaded.dtype),
                fingerprint=self._loaded.fingerprint,
            ),
            model=self._loaded.model_id,
            dtype=self._loaded.dtype,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_bytes_per_token=config.kv_bytes_per_token(self._loaded.dtype),
        )

    # --- request link -----------------------------------------------------------------------------------------

    async def _router_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One router at a time: a new one that proves the secret replaces the old."""
        handshake = ServerHandshake(self._secret, self._spec.role, REQUEST_CHANNEL)
        stream = JsonStream(reader, writer)
        try:
            await authenticate_stream(reader, writer, handshake)
        except AuthError as error:
            host, port = writer.get_extra_info("peername")[:2]
            self._refusals.add("request", f"{host}:{port}", error)
            await stream.close()
            return
        old, self._router = self._router, stream
        if old is not None:
            self._thread.post(lambda: self._sides.abort_all("another router took over"))
            await old.close()
        self._in_background(self._tell_load(stream))
        try:
            while (message := await stream.receive()) is not None:
                self._router_said(message)
        except StreamError as error:
            log_line(f"request port: {error}")
        finally:
            if self._router is stream:  # else its requests were dropped when the next router came
                self._router = None
                self._thread.post(lambda: self._sides.abort_all("router gone"))
            await stream.close()

    async def _tell_load(self, router: JsonStream) -> None:
        """A new router hears at once what was measured before it came."""
        stats = await asyncio.wrap_future(self._thread.ask(self._engine.stats))
        if self._router is router:
            router.send(self._load(stats))

    def _router_said(self, message: AnyMessage) -> None:
        match message:
            case StartPrefill() | StartDecode() | StartLocal():
                self._thread.post(lambda: self._sides.start(message))
            case AbortRequest():
                self._thread.post(lambda: self._sides.abort(message))
            case ReportBlocks(report_id=report_id):
                self._thread.post(lambda: self._outbox.say(self._ownership.report(report_id)))
            case _:
                raise StreamError(f"a worker has no use for {type(message).__name__}")

    def _deliver(self, messages: list[AnyMessage], events: list[Event]) -> None:
        if self._router is not None:
            for message in messages:
                self._router.send(message)
        if events:
            self._parent.send(Events(events=tuple(events)))

    # --- in the engine's thread -------------------------------------------------------------------------------

    def _layer_written(self, prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
        self._sides.prefill.layer_written(prefilled, layer)

    def _stepped(self, output: StepOutput) -> None:
        self._meter.add(output)
        self._sides.stepped(output, time.monotonic(), self._meter.decode_step_s)

    def _idle(self) -> None:
        self._ownership.check()

    def _engine_died(self, error: BaseException) -> None:
        """A worker without its engine must not look alive."""
        log_line(f"engine thread died: {type(error).__name__}: {error}")
        self._loop.call_soon_threadsafe(os._exit, 70)

    # --- reporting --------------------------------------------------------------------------------------------

    async def _report_for_ever(self) -> None:
        asked: Future[EngineStats] | None = None
        asked_at = 0.0
        while True:
            if asked is None:  # at most one question waits behind a long step
                asked, asked_at = self._thread.ask(self._engine_stats), time.monotonic()
            try:
                stats = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked)), STATS_INTERVAL_S)
            except TimeoutError:
                self._check_step(time.monotonic() - asked_at)
                continue
            asked = None
            self._report(stats)
            await asyncio.sleep(STATS_INTERVAL_S)

    def _check_step(self, silent_s: float) -> None:
        """This loop answers pings whatever the engine does: say so when the engine does nothing any more."""
        if silent_s > self._spec.profile.supervisor.step_timeout_s and not self._is_stuck:
            self._is_stuck = True
            missed = HeartbeatMissed(
                at=time.monotonic(),
                source=self._worker_id,
                worker_id=self._worker_id,
                silent_s=silent_s,
                part="engine",
            )
            self._parent.send(Events(events=(missed,)))

    def _engine_stats(self) -> EngineStats:
        now = time.monotonic()
        self._sides.decode.drop_late_opens(now)
        self._sides.prefill.tell_transfers(now)
        self._ownership.check()
        return self._engine.stats()

    def _report(self, stats: EngineStats) -> None:
        meter, process = self._meter, self._process
        event = WorkerStats(
            at=time.monotonic(),
            source=self._worker_id,
            worker_id=self._worker_id,
            role=self._role,
            waiting=stats.waiting,
            running=stats.running,
            reserved=stats.reserved,
            handing_off=stats.handing_off,
            free_blocks=stats.free_blocks,
            held_blocks=stats.held_blocks,
            total_blocks=stats.total_blocks,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            prefill_tokens=meter.prefill_tokens,
            decode_tokens=meter.decode_tokens,
            busy_s=meter.busy_s,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            step_ms=meter.last_step_s * 1e3,
            cpu_percent=process.cpu_percent(),
            rss_bytes=process.memory_info().rss,
            late_frames=self._kv.num_late_frames,
            preemptions=stats.preemptions,
            stranded_blocks=self._ownership.stranded_blocks,
        )
        self._parent.send(Events(events=(event,)))
        if self._router is not None:
            self._router.send(self._load(stats))

    def _load(self, stats: EngineStats) -> WorkerLoad:
        selector, is_v2 = self._kv.codec_selector, self._spec.profile.kv.path == "v2"
        return WorkerLoad(
            worker_id=self._worker_id,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            running=stats.running,
            free_blocks=stats.free_blocks,
            reserved=stats.reserved,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_ms=self._meter.decode_step_s * 1e3,
            links=selector.links(),
            codecs=selector.rates(),
            stream_from_tokens=self._sides.prefill.stream_from_tokens if is_v2 else 0,
        )
