"""What each operator command does, and the one line it answers with."""

import time
from collections.abc import Callable
from typing import Final

from cluster.command_refused import CommandRefused
from cluster.control import (
    AddNote,
    AddWorker,
    ChangeLink,
    Command,
    DrainWorker,
    HealFaults,
    InjectBurst,
    InjectLinkFault,
    KillWorker,
    RemoveWorker,
    RestartWorker,
    ResumeWorker,
    SetCodec,
    SetHandoff,
    SetLoad,
    SetMode,
    SetRole,
    StopCluster,
)
from cluster.events import CodecChanged, Event, HandoffChanged, ModeChanged, NoteAdded
from cluster.fault_injection import FaultInjection
from cluster.fleet import Fleet
from cluster.link_backend import LinkBackend
from cluster.load import LoadError, LoadGenerator
from cluster.process_set import ProcessSet
from cluster.process_slot import ROUTER_ID
from cluster.worker_roles import PREFILL_ROLES
from engine.model_ids import ModelError
from transport.codec_choice import CODEC_CHOICES

MODES: Final = ("disagg", "colocated")
HANDOFFS: Final = ("always", "auto", "never")


class OperatorCommands:
    """Carries out commands one by one. ``mode`` and ``codec`` are what a restarted router begins with."""

    def __init__(
        self,
        mode: str,
        codec: str,
        handoff: str,
        *,
        processes: ProcessSet,
        fleet: Fleet,
        link: LinkBackend,
        load: LoadGenerator,
        emit: Callable[[Event], None],
        retell: Callable[[], None],
        relink: Callable[[], None],
    ) -> None:
        self.mode = mode
        self.codec = codec
        self.handoff = handoff
        self._processes = processes
        self._fleet = fleet
        self._load = load
        self._emit = emit
        self._faults = FaultInjection(processes, link, emit=emit, retell=retell, relink=relink)

    def close(self) -> None:
        """Before the processes are stopped."""
        self._faults.close()

    async def run(self, command: Command) -> str:
        """Do it; returns the line for the operator. Raises CommandRefused."""
        match command:
            case InjectBurst():
                return await self._burst(command)
            case SetLoad():
                return await self._set_load(command)
            case KillWorker():
                return self._faults.signal(command)
            case InjectLinkFault():
                return self._faults.hurt_link(command)
            case HealFaults():
                return await self._faults.heal_all(command)
            case SetMode():
                return self._set_mode(command)
            case SetCodec():
                return self._set_codec(command)
            case SetHandoff():
                return self._set_handoff(command)
            case ChangeLink():
                return await self._faults.change_link(command)
            case DrainWorker() | ResumeWorker() | RestartWorker() | SetRole() | AddWorker() | RemoveWorker():
                return await self._fleet.run(command)
            case AddNote(text=text):
                self._emit(NoteAdded(at=time.monotonic(), text=text))
                return "noted"
            case StopCluster():
                raise CommandRefused("stopping is the supervisor's own")  # it never gets here

    async def _burst(self, command: InjectBurst) -> str:
        if command.prompts < 1 or command.prompt_tokens < 1 or command.max_tokens < 1:
            raise CommandRefused("burst: prompts, prompt_tokens and max_tokens must each be 1 or more")
        try:
            await self._load.burst(command)
        except (LoadError, ModelError) as error:
            raise CommandRefused(str(error)) from error
        return f"burst of {command.prompts} prompts of {command.prompt_tokens} tokens sent"

    async def _set_load(self, command: SetLoad) -> str:
        if not command.name:
            was = self._load.running
            await self._load.stop(command.cause)
            return f"load {was} stopped" if was else "no load is running"
        try:
            await self._load.start(command.name, command.cause)
        except (LoadError, ModelError) as error:
            raise CommandRefused(str(error)) from error
        return f"load {command.name} started"

    def _set_mode(self, command: SetMode) -> str:
        if command.mode not in MODES:
            raise CommandRefused(f"mode {command.mode!r} is unknown; allowed: {', '.join(MODES)}")
        if command.mode == "disagg" and not any(
            slot.role in PREFILL_ROLES for slot in self._processes.workers
        ):
            raise CommandRefused("mode disagg needs a prefill worker; this cluster has none")
        self.mode = command.mode
        router = self._processes.slot(ROUTER_ID)
        if router.is_ready:
            router.send(command)  # its event comes from the router, at the moment of the change
        else:
            self._emit(ModeChanged(at=time.monotonic(), mode=command.mode, cause=command.cause))
        return f"mode {command.mode}"

    def _set_codec(self, command: SetCodec) -> str:
        if command.codec not in CODEC_CHOICES:
            raise CommandRefused(f"codec {command.codec!r} is unknown; allowed: {', '.join(CODEC_CHOICES)}")
        self.codec = command.codec
        router = self._processes.slot(ROUTER_ID)
        if router.is_ready:
            router.send(command)
        else:
            self._emit(CodecChanged(at=time.monotonic(), codec=command.codec, cause=command.cause))
        return f"codec {command.codec}, from the next transfer on"

    def _set_handoff(self, command: SetHandoff) -> str:
        if command.handoff not in HANDOFFS:
            raise CommandRefused(f"handoff {command.handoff!r} is unknown; allowed: {', '.join(HANDOFFS)}")
        self.handoff = command.handoff
        router = self._processes.slot(ROUTER_ID)
        if router.is_ready:
            router.send(command)
        else:
            self._emit(HandoffChanged(at=time.monotonic(), handoff=command.handoff, cause=command.cause))
        return f"handoff {command.handoff}, from the next request on"
