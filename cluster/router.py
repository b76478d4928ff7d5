"""Carries out what ``RouterState`` decides: connections to workers, streams to clients, events to the supervisor.

Everything runs on one event loop and nothing here decides anything; see ``router_state`` for the rules and
``router_http`` for the HTTP side.
"""

import asyncio
import contextlib
import os
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Final

import psutil

from cluster.control import (
    AnyMessage,
    BlocksReported,
    CommandDone,
    CommandSent,
    DecodeAdopted,
    Events,
    HandoffFailed,
    MeasurePrefill,
    Ping,
    Pong,
    PrefillDone,
    PrefillMeasured,
    ReportBlocks,
    RequestError,
    RouterPairReady,
    RouterSpec,
    SetCodec,
    SetHandoff,
    SetLink,
    SetMode,
    SetWorkers,
    Shutdown,
    Tokens,
    WorkerLoad,
)
from cluster.dispatch import RouterLimits
from cluster.events import Event, RequestRejected, RouterStats, TextDelivered
from cluster.handoff_forecast import HandoffForecast
from cluster.json_stream import JsonStream, StreamError
from cluster.open_requests import SOURCE
from cluster.readiness import Pair, Readiness, ports_of
from cluster.router_messages import (
    ClientLeft,
    CodecSet,
    Deliver,
    Emit,
    Fail,
    HandoffSet,
    LinkSet,
    ModeSet,
    RequestSubmitted,
    Send,
    Stimulus,
    Ticked,
    TokensWritten,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
    WorkerSaid,
    WorkersListed,
)
from cluster.router_state import RouterState
from cluster.worker_link import WorkerLink
from cluster.worker_roles import PREFILL_ROLES
from engine.request import SamplingParams

TICK_S: Final = 0.05
EVENT_FLUSH_S: Final = 0.02
STATS_INTERVAL_S: Final = 0.5
PROBE_TOKENS: Final = 2
PROBE_RETRY_S: Final = 0.3
EXIT_BROKEN: Final = 70
COMMAND_TIMEOUT_S: Final = 15.0
BLOCKS_TIMEOUT_S: Final = 3.0  # a worker answers between two engine steps


def _exit_broken() -> None:
    os._exit(EXIT_BROKEN)


class Router:
    """One router process. ``parent`` is the supervisor's end of the world; ``on_broken`` ends the process."""

    def __init__(
        self,
        spec: RouterSpec,
        parent: JsonStream,
        on_broken: Callable[[], object] = _exit_broken,
    ) -> None:
        profile = spec.profile
        self.spec = spec
        self._parent = parent
        self._on_broken = on_broken
        self._secret = bytes.fromhex(spec.secret)
        self.state = RouterState(
            RouterLimits(
                max_queue=profile.router.max_queue,
                queue_timeout_s=profile.router.queue_timeout_s,
                max_attempts=profile.cluster.max_attempts,
                fallback=profile.cluster.fallback == "on",
                handoff=spec.handoff,
                kv_path=profile.kv.path,
                prefix_caching=profile.engine.prefix_caching,
            ),
            spec.mode,
            spec.codec,
            HandoffForecast(
                max_num_batched_tokens=profile.engine.max_num_batched_tokens,
                allow_lossy=profile.kv.allow_lossy,
            ),
        )
        self._links: dict[str, WorkerLink] = {}
        self._clients: dict[str, asyncio.Queue[Deliver | Fail]] = {}
        self._events: list[Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._readiness = Readiness(
            has_prefill=profile.cluster.prefill > 0,
            fallback=profile.cluster.fallback == "on",
            has_served=spec.has_served,
        )
        self._commands: dict[int, asyncio.Future[CommandDone]] = {}
        self._next_command_id = 1
        self._block_reports: dict[tuple[str, int], asyncio.Future[BlocksReported]] = {}
        self._next_report_id = 1
        self.stopping = asyncio.Event()

    # --- running ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the parent link until it closes or says Shutdown."""
        self._spawn(self._tick_for_ever())
        self._spawn(self._flush_events_for_ever())
        self._spawn(self._stats_for_ever())
        while (message := await self._parent.receive()) is not None and not isinstance(message, Shutdown):
            self._parent_said(message)
        self.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.close()
        self._flush_events()
        await self._parent.drain()

    def _parent_said(self, message: AnyMessage) -> None:
        match message:
            case Ping(seq=seq):
                self._parent.send(Pong(seq=seq))
            case SetWorkers(workers=workers, absent=absent, draining=draining):
                self._relink(message)
                self.apply(WorkersListed(workers, absent, draining))
                roles = [worker.role for worker in workers] + [worker.role for worker in absent]
                self._readiness.has_prefill = any(role in PREFILL_ROLES for role in roles)
                self._probe_pairs()  # a role may have changed
            case SetMode(mode=mode, cause=cause):
                self.apply(ModeSet(mode, cause))
            case SetCodec(codec=codec, cause=cause):
                self.apply(CodecSet(codec, cause))
            case SetHandoff(handoff=handoff, cause=cause):
                self.apply(HandoffSet(handoff, cause))
            case SetLink(bits_per_s=bits_per_s):
                self.apply(LinkSet(bits_per_s / 8))
            case MeasurePrefill():
                self._spawn(self._measure_prefill(message))
            case CommandDone(command_id=command_id):
                future = self._commands.pop(command_id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                raise ValueError(f"the router has no use for {type(message).__name__}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._notice_break)

    def _notice_break(self, task: asyncio.Task[None]) -> None:
        """One of the router's own tasks, or a link, ended by an error that nobody expected: as in ``apply``."""
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self._on_broken()

    def apply(self, stimulus: Stimulus) -> None:
        """Let the state decide, then do as it says.

        A router whose decision raised may hold a request that nobody serves any more: it ends, and a new one begins.
        """
        try:
            instructions = self.state.handle(stimulus, time.monotonic())
        except BaseException:
            traceback.print_exc()
            self._on_broken()
            raise
        for instruction in instructions:
            match instruction:
                case Send(worker_id, message):
                    link = self._links.get(worker_id)
                    if link is not None:
                        link.send(message)
                case Deliver(request_id) | Fail(request_id):
                    client = self._clients.get(request_id)
                    if client is not None:
                        client.put_nowait(instruction)
                case Emit(event):
                    self._events.append(event)

    # --- clients ----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        arrived_at: float,
        label: str = "client",
        client_id: str = "",
        pair: Pair | None = None,
    ) -> tuple[str, asyncio.Queue[Deliver | Fail]]:
        """Take a request; returns its id and the queue its tokens (or its failure) come on.

        The caller reports each token it wrote by ``TokensWritten`` and, if it goes away early, calls ``leave``.
        """
        request_id = f"r{secrets.token_hex(6)}"
        queue: asyncio.Queue[Deliver | Fail] = asyncio.Queue()
        self._clients[request_id] = queue
        self.apply(
            RequestSubmitted(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                arrived_at=arrived_at,
                label=label,
                client_id=client_id,
                pinned_prefill=pair[0] if pair else None,
                pinned_decode=pair[1] if pair else None,
            )
        )
        return request_id, queue

    def refused(self, status: int, reason: str) -> None:
        """A request was turned away before it had an id; it counts all the same."""
        self._events.append(RequestRejected(at=time.monotonic(), source=SOURCE, reason=reason, status=status))

    def delivered_text(self, request_id: str, text: str, prompt: str) -> None:
        """What goes to a client, for the log; ``prompt`` with the first."""
        self._events.append(
            TextDelivered(at=time.monotonic(), source=SOURCE, request_id=request_id, text=text, prompt=prompt)
        )

    def leave(self, request_id: str, reason: str = "client_gone") -> None:
        """The client is served or gone; what still runs for it stops, for ``reason`` (as of RequestCancelled)."""
        del self._clients[request_id]
        self.apply(ClientLeft(request_id, reason))

    # --- workers ----------------------------------------------------------------------------------------------

    def _relink(self, listed: SetWorkers) -> None:
        """One link per listed worker; a changed address is a new worker."""
        wanted = {address.worker_id: address for address in listed.workers}
        stale = [
            link
            for worker_id, link in self._links.items()
            if (address := wanted.get(worker_id)) is None or not link.address.is_place_of(address)
        ]
        for link in stale:
            del self._links[link.address.worker_id]
        for worker_id, address in wanted.items():
            if worker_id not in self._links:
                self._links[worker_id] = WorkerLink(
                    address,
                    self._secret,
                    on_up=lambda worker_id=worker_id: self._worker_up(worker_id),  # type: ignore[misc]
                    on_down=lambda detail, worker_id=worker_id: self.apply(WorkerLost(worker_id, detail)),  # type: ignore[misc]
                    on_message=lambda message, worker_id=worker_id: self._worker_said(worker_id, message),  # type: ignore[misc]
                    on_end=self._notice_break,
                )
        for link in stale:
            self._spawn(link.close())

    def _worker_up(self, worker_id: str) -> None:
        self.apply(WorkerConnected(worker_id))
        self._probe_pairs()

    def _worker_said(self, worker_id: str, message: AnyMessage) -> None:
        match message:
            case Tokens() | PrefillDone() | DecodeAdopted() | HandoffFailed() | RequestError():
                self.apply(WorkerSaid(worker_id, message))
            case BlocksReported(report_id=report_id):
                report = self._block_reports.pop((worker_id, report_id), None)
                if report is not None and not report.done():
                    report.set_result(message)
            case WorkerLoad():
                self.apply(WorkerReported(message))
            case _:
                raise StreamError(f"the router has no use for {type(message).__name__}")

    # --- readiness --------------------------------------------------------------------------------------------

    @property
    def may_wait(self) -> bool:
        """A request that nobody can take now may wait: there was a ready pair once. Else it is turned away."""
        return self._readiness.has_served

    @property
    def readiness(self) -> str:
        """``ready``, ``degraded`` or nothing; see ``Readiness.state``."""
        return self._readiness.state(self.state.workers, self.state.mode)

    def _probe_pairs(self) -> None:
        for pair in self._readiness.start_probes(self.state.workers):
            self._spawn(self._probe(pair))

    async def _probe(self, pair: Pair) -> None:
        """Send a real request through one pair until it answers or one of the two is gone."""
        try:
            while (ports := ports_of(pair, self.state.workers)) is not None:
                _, error = await self._send_through(pair, (1, 2), PROBE_TOKENS)
                if not error:
                    self._readiness.prove(pair, ports)
                    self._parent.send(RouterPairReady(prefill_worker=pair[0], decode_worker=pair[1]))
                    return
                await asyncio.sleep(PROBE_RETRY_S)
        finally:
            self._readiness.end_probe(pair)

    async def _measure_prefill(self, asked: MeasurePrefill) -> None:
        pair = (asked.prefill_worker, asked.decode_worker)
        request_id, error = await self._send_through(pair, asked.prompt_token_ids, asked.max_tokens)
        self._parent.send(PrefillMeasured(request_id=request_id, error=error))

    async def _send_through(
        self, pair: Pair, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> tuple[str, str]:
        """One request of the router's own, to its end. Its id, and how it failed ("" = it did not)."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id, queue = self.submit(
            prompt_token_ids, sampling, time.monotonic(), label="probe", pair=pair
        )
        try:
            while isinstance(answer := await queue.get(), Deliver):
                self.apply(TokensWritten(request_id, 1))
                if answer.finish_reason:
                    return request_id, ""
            return request_id, answer.message
        finally:
            self.leave(request_id)

    # --- operator ---------------------------------------------------------------------------------------------

    async def command(self, sent: CommandSent) -> CommandDone:
        """Relay an operator's command to the supervisor. Its ``command_id`` is replaced by the router's own."""
        command_id = self._next_command_id
        self._next_command_id += 1
        future: asyncio.Future[CommandDone] = asyncio.get_running_loop().create_future()
        self._commands[command_id] = future
        self._parent.send(CommandSent(command_id=command_id, command=sent.command))
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return await future
        except TimeoutError:
            return CommandDone(
                command_id=command_id, ok=False, message=f"no answer within {COMMAND_TIMEOUT_S:.0f} s"
            )
        finally:
            self._commands.pop(command_id, None)

    async def held_blocks(self) -> list[BlocksReported | str]:
        """What each connected worker holds, by worker id; only the id of one that does not answer in time."""
        report_id = self._next_report_id
        self._next_report_id += 1
        connected = sorted(worker_id for worker_id, view in self.state.workers.items() if view.connected)
        loop = asyncio.get_running_loop()
        for worker_id in connected:
            self._block_reports[worker_id, report_id] = loop.create_future()
            self._links[worker_id].send(ReportBlocks(report_id=report_id))
        reports = [self._block_reports[worker_id, report_id] for worker_id in connected]
        await asyncio.wait(reports, timeout=BLOCKS_TIMEOUT_S) if reports else None
        for worker_id in connected:
            self._block_reports.pop((worker_id, report_id), None)
        return [
            report.result() if report.done() else worker_id
            for worker_id, report in zip(connected, reports, strict=True)
        ]

    # --- periodic ---------------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.state.requests:
                self.apply(Ticked())

    async def _flush_events_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVENT_FLUSH_S)
            self._flush_events()

    def _flush_events(self) -> None:
        if self._events:
            self._parent.send(Events(events=tuple(self._events)))
            self._events.clear()

    async def _stats_for_ever(self) -> None:
        process = psutil.Process(os.getpid())
        process.cpu_percent()
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            with contextlib.suppress(psutil.Error):
                self._events.append(
                    RouterStats(
                        at=time.monotonic(),
                        source=SOURCE,
                        in_flight=len(self.state.requests),
                        queued=len(self.state.queue),
                        cpu_percent=process.cpu_percent(),
                        rss_bytes=process.memory_info().rss,
                    )
                )
