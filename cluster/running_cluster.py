"""A cluster's processes and what they are to each other: who is ready, who is told of whom, when it serves.

Start: router and workers at once; all agree on the model; every link measured; a real token through every pair.
"""

import asyncio
import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.command_refused import CommandRefused
from cluster.control import (
    AbsentWorker,
    AnyMessage,
    CommandDone,
    CommandSent,
    Events,
    LinkMeasured,
    PrefillMeasured,
    RouterPairReady,
    RouterSpec,
    RouterUp,
    SetLink,
    SetWorkers,
    StartFailed,
    StopCluster,
    SupervisorSpec,
    WorkerSpec,
    WorkerUp,
)
from cluster.cpu_plan import available_cpus
from cluster.events import Event, HeartbeatMissed, PrefillFinished, WorkerDrained
from cluster.fleet import Fleet
from cluster.link_backend import LinkBackend
from cluster.link_prober import LinkProber
from cluster.link_tuner import LinkTuner, MeasuringFailed
from cluster.load import LoadGenerator
from cluster.log_lines import log_line
from cluster.operator_commands import OperatorCommands
from cluster.process_set import ProcessSet
from cluster.process_slot import ROUTER_ID, ProcessSlot, pairs_of, plan_slots
from cluster.run_dir import LOG_DIR
from cluster.spawner import Spawner
from cluster.start_refused import StartRefused
from cluster.targets import LinkGoal
from cluster.worker_agreement import describe_model, disagreement

TICK_S: Final = 0.05
_LOAD_CLOSE_S: Final = 2.0


class RunningCluster:
    """All of a cluster but its log: ``emit`` takes the events, ``request_stop`` a reason to end the run.

    Raises StartRefused for a profile that wants more cores than there are.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        token: str,
        link: LinkBackend,
        http: socket.socket,
        url: str,
        *,
        emit: Callable[[Event], None],
        request_stop: Callable[[str], None],
        worker_spawner: Spawner,
        router_spawner: Spawner,
    ) -> None:
        self._spec = spec
        self._token = token
        self._secret = secrets.token_hex(32)
        self._link = link
        self._http = http
        self._emit = emit
        self._request_stop = request_stop
        try:
            slots = plan_slots(spec.profile, available_cpus(), worker_spawner, router_spawner)
        except ValueError as error:
            raise StartRefused(str(error), 2) from error
        self.processes = ProcessSet(
            slots,
            spec.profile.supervisor,
            Path(spec.run_dir, LOG_DIR),
            first_message=self._first_message,
            emit=emit,
            on_message=self._said,
            on_change=self._slot_changed,
        )
        self._router = self.processes.slot(ROUTER_ID)
        self._prober = LinkProber(link, emit)
        self._tuner = LinkTuner(
            self._router, link, emit, reshaped=self._tell_of_link, probe=self._probe_in_background
        )
        self._load = LoadGenerator(url, spec.profile, emit, spec.profile.model.id)
        self._fleet = Fleet(
            spec.profile.cluster,
            self.processes,
            link,
            worker_spawner,
            mode=lambda: self._commands.mode,
            emit=emit,
            tell_router=self._list_workers,
            measure_links=self._probe_in_background,
            spawn=self._spawn,
        )
        self._commands = OperatorCommands(
            spec.profile.cluster.mode,
            spec.profile.kv.codec,
            spec.profile.cluster.handoff,
            processes=self.processes,
            fleet=self._fleet,
            link=link,
            load=self._load,
            emit=emit,
            retell=self._tell_of_link,
            relink=self._relink,
        )
        self._model: WorkerUp | None = None  # what the first ready worker loaded: the others must agree
        self._pairs: set[tuple[str, str]] = set()
        self._refused: StartRefused | None = None
        self._is_listing = False  # the router may know the workers
        self._is_serving = False
        self._is_stopping = False
        self._changed = asyncio.Event()
        self._inbox: asyncio.Queue[tuple[CommandSent, Callable[[AnyMessage], None]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ticking = asyncio.create_task(self._tick_for_ever(), name="tick")

    # --- start, serve, stop -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when a real token went through every pair. Raises StartRefused."""
        await self._until(self._all_up)
        if self._spec.profile.link.probe:
            for problem in await self._prober.probe(self.processes.workers):
                raise StartRefused(
                    f"link probe failed: {problem}; see the logs in {self._spec.run_dir}/{LOG_DIR}"
                )
        self._is_listing = True
        self._list_workers()
        limit_s = self._spec.profile.supervisor.start_timeout_s
        wanted = pairs_of(self.processes.workers)
        try:
            async with asyncio.timeout(limit_s):
                await self._until(lambda: wanted <= self._pairs)
        except TimeoutError:
            missing = ", ".join(f"{p or 'local'} to {d}" for p, d in sorted(wanted - self._pairs))
            raise StartRefused(f"no token came through {missing} within {limit_s:g} s") from None
        goal = self._spec.profile.link_goal
        if goal is not None:
            await self._tune_link(goal)
        if self._spec.profile.cluster.handoff == "auto":
            await self._calibrate()
        self._is_serving = True
        self._spawn(self._run_commands(), "commands")

    async def start_load(self, name: str) -> None:
        """The load named at start-up."""
        await self._load.start(name, "at start")

    def take(self, sent: CommandSent, reply: Callable[[AnyMessage], None]) -> None:
        """A command from the console or, through the router, from an HTTP client."""
        if isinstance(sent.command, StopCluster):
            self._request_stop(sent.command.reason)
            reply(CommandDone(command_id=sent.command_id, ok=True, message="stopping"))
        elif self._is_stopping or not self._is_serving:
            state = "stopping" if self._is_stopping else "not ready yet"
            reply(CommandDone(command_id=sent.command_id, ok=False, message=f"the cluster is {state}"))
        else:
            self._inbox.put_nowait((sent, reply))

    async def stop(self) -> None:
        """Load, router, workers; returns when all of them are gone."""
        self._is_stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_CLOSE_S):
                await self._load.stop("the cluster stops")
                await self._load.close()
        self._commands.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.wait({self.ticking})  # a tick is never cut short: it may be spawning
        await self.processes.stop([ROUTER_ID])
        await self.processes.stop([slot.process_id for slot in self.processes.workers])

    # --- what the children say --------------------------------------------------------------------------------

    def _said(self, slot: ProcessSlot, message: AnyMessage) -> None:
        match message:
            case Events(events=events):
                for event in events:
                    if isinstance(event, PrefillFinished):
                        self._tuner.prefill_rate.finished(event)
                    elif isinstance(event, WorkerDrained):
                        self._fleet.drained(event.worker_id)
                    elif isinstance(event, HeartbeatMissed):  # its engine does not end a step
                        slot.kill(signal.SIGKILL, "hang")
                    self._emit(
                        event if event.source else msgspec.structs.replace(event, source=slot.process_id)
                    )
            case WorkerUp():
                self._worker_up(slot, message)
            case RouterUp():
                self.processes.mark_ready(slot)
                self._tell_router_of_link()
                self._list_workers()
            case RouterPairReady(prefill_worker=prefill, decode_worker=decode):
                self._pairs.add((prefill, decode))
            case LinkMeasured():
                self._prober.answered(slot.process_id, message)
            case PrefillMeasured():
                self._tuner.prefill_rate.answered(message)
            case CommandSent():
                self.take(message, slot.send)
            case _:
                pass  # Pong: hearing it was the point
        self._changed.set()

    def _worker_up(self, slot: ProcessSlot, up: WorkerUp) -> None:
        if self._model is None:
            self._model = up
            self._emit(describe_model(up, time.monotonic()))
        elif difference := disagreement(self._model, up):
            slot.refusal = StartFailed(message=difference, exit_code=2)
            slot.kill(9, "mismatch")
            self._slot_changed(slot)
            return
        slot.up = up
        slot.send(self._link.worker_link())
        kv_address = f"{up.address.kv_host}:{up.address.kv_port}"
        self.processes.mark_ready(slot, up.address.total_blocks, kv_address)
        self._list_workers()
        if self._is_serving and slot.starts == 1:  # a worker added since
            self._probe_in_background()

    def _slot_changed(self, slot: ProcessSlot) -> None:
        """It ended, refused, or was given up."""
        self._prober.gone(slot.process_id)
        if slot.role == "router":
            self._pairs.clear()
        else:
            self._pairs = {pair for pair in self._pairs if slot.process_id not in pair}
            self._fleet.drained(slot.process_id)
            self._list_workers()
        if not self._is_serving and self._refused is None:
            if slot.refusal is not None:
                self._refused = StartRefused(slot.refusal.message, slot.refusal.exit_code)
            elif slot.failed:
                log = Path(self._spec.run_dir, LOG_DIR, f"{slot.process_id}.log")
                self._refused = StartRefused(f"{slot.process_id} does not stay up: {slot.failed}; see {log}")
        self._changed.set()

    # --- what the children are told ---------------------------------------------------------------------------

    def _first_message(self, slot: ProcessSlot) -> tuple[AnyMessage, tuple[int, ...]]:
        spec = self._spec
        if slot.role == "router":
            listen_fd = self._http.fileno()
            router = RouterSpec(
                run=spec.run,
                run_dir=spec.run_dir,
                secret=self._secret,
                token=self._token,
                profile=spec.profile,
                listen_fd=listen_fd,
                mode=self._commands.mode,
                codec=self._commands.codec,
                handoff=self._commands.handoff,
                cpus=slot.cpus,
                has_served=self._is_serving,
            )
            return router, (listen_fd,)
        netns_fd = self._link.namespace_fd(slot.index)
        worker = WorkerSpec(
            worker_id=slot.process_id,
            role=slot.role,
            run=spec.run,
            secret=self._secret,
            profile=spec.profile,
            cpus=slot.cpus,
            netns_fd=netns_fd,
            kv_host=self._link.host(slot.index),
        )
        return worker, (netns_fd,) if netns_fd >= 0 else ()

    def _list_workers(self) -> None:
        """Tell the router of every worker, and what it may do with each."""
        if self._is_listing and self._router.is_ready:
            staying = [slot for slot in self.processes.workers if not slot.is_leaving]
            self._router.send(
                SetWorkers(
                    workers=tuple(address for slot in staying if (address := slot.address) is not None),
                    absent=tuple(
                        AbsentWorker(worker_id=slot.process_id, role=slot.role, is_coming=not slot.failed)
                        for slot in staying
                        if slot.address is None
                    ),
                    draining=tuple(slot.process_id for slot in staying if slot.is_draining),
                )
            )

    def _tell_router_of_link(self) -> None:
        """It weighs handing off against the link that is, not the one that the profile began with."""
        shape = self._link.shape
        if self._router.is_ready:
            self._router.send(
                SetLink(bits_per_s=shape.bits_per_s, delay_ms=shape.delay_ms, jitter_ms=shape.jitter_ms)
            )

    def _relink(self) -> None:
        """The link has a new shape: tell, log, measure."""
        self._tell_of_link()
        self._probe_in_background()

    def _tell_of_link(self) -> None:
        for slot in self.processes.workers:
            slot.send(self._link.worker_link())
        self._tell_router_of_link()
        self._emit(self._link.describe(time.monotonic()))

    def _probe_in_background(self) -> asyncio.Task[None] | None:
        """None: this run measures no links."""
        return self._spawn(self._probe_again(), "link probe") if self._spec.profile.link.probe else None

    async def _tune_link(self, goal: LinkGoal) -> None:
        """Raises StartRefused when there is no prefill rate to tune it by."""
        pair = min(pairs_of(self.processes.workers))
        decode = self.processes.slot(pair[1]).address
        try:
            if decode is None:
                raise MeasuringFailed(f"{pair[1]} is not ready any more")
            await self._tuner.tune(goal, pair, decode, self._spec.profile.supervisor.start_timeout_s)
        except MeasuringFailed as error:
            raise StartRefused(f"the link cannot be given its rho: {error}") from error

    async def _calibrate(self) -> None:
        """Have the router see prompts of several lengths on each worker, before it has to weigh. It can do without."""
        workers, limit_s = self.processes.workers, self._spec.profile.supervisor.start_timeout_s
        decodes = [slot.process_id for slot in workers if slot.role == "decode"]
        prefills = [slot.process_id for slot in workers if slot.role == "prefill"]
        for pair in [*((worker_id, decodes[0]) for worker_id in prefills), *(("", each) for each in decodes)]:
            decode = self.processes.slot(pair[1]).address
            try:
                if decode is not None:
                    await self._tuner.prefill_rate.send_lengths(pair, decode, limit_s)
            except MeasuringFailed as error:
                log_line(f"calibrating handoff through {pair[0] or 'local'} to {pair[1]}: {error}")

    async def _probe_again(self) -> None:
        for problem in await self._prober.probe(self.processes.workers):
            log_line(f"link probe: {problem}")  # the supervisor's log; the workers' own events say more

    # --- loops ------------------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while not self._is_stopping:
            await self.processes.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    async def _run_commands(self) -> None:
        while True:
            sent, reply = await self._inbox.get()
            try:
                line = await self._commands.run(sent.command)
            except CommandRefused as error:
                reply(CommandDone(command_id=sent.command_id, ok=False, message=str(error)))
            else:
                reply(CommandDone(command_id=sent.command_id, ok=True, message=line))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Raises StartRefused as soon as a child cannot start."""
        while True:
            if self._refused is not None:
                raise self._refused
            if is_true():
                return
            self._changed.clear()
            await self._changed.wait()

    def _all_up(self) -> bool:
        return self._router.is_ready and all(slot.address is not None for slot in self.processes.workers)
