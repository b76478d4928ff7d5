"""What each operator command does, and the one line it answers with."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Final

from cluster.control import (
    AddNote,
    ChangeLink,
    Command,
    InjectBurst,
    KillWorker,
    SetCodec,
    SetLoad,
    SetMode,
    StopCluster,
)
from cluster.events import CodecChanged, Event, FaultInjected, ModeChanged, NoteAdded
from cluster.link_backend import LinkBackend
from cluster.load import LoadError, LoadGenerator
from cluster.netns import LinkShape, NetnsError
from cluster.process_set import ProcessSet
from cluster.process_slot import ROUTER_ID
from cluster.units import format_bits_per_s
from engine.model_ids import ModelError
from transport.codec_choice import CODEC_CHOICES

MODES: Final = ("disagg", "colocated")
SIGNALS: Final = {"KILL": "kill", "TERM": "terminate", "STOP": "hang", "CONT": "resume"}


class CommandRefused(Exception):
    """The command cannot be carried out; the message says what is wrong and what is allowed."""


class OperatorCommands:
    """Carries out commands one by one. ``mode`` and ``codec`` are what a restarted router begins with."""

    def __init__(
        self,
        mode: str,
        codec: str,
        *,
        processes: ProcessSet,
        link: LinkBackend,
        load: LoadGenerator,
        emit: Callable[[Event], None],
        relink: Callable[[], None],
    ) -> None:
        self.mode = mode
        self.codec = codec
        self._processes = processes
        self._link = link
        self._load = load
        self._emit = emit
        self._relink = relink

    async def run(self, command: Command) -> str:
        """Do it; returns the line for the operator. Raises CommandRefused."""
        match command:
            case InjectBurst():
                return await self._burst(command)
            case SetLoad():
                return await self._set_load(command)
            case KillWorker():
                return self._kill(command)
            case SetMode():
                return self._set_mode(command)
            case SetCodec():
                return self._set_codec(command)
            case ChangeLink():
                return await self._change_link(command)
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

    def _kill(self, command: KillWorker) -> str:
        slot = self._processes.find(command.worker_id)
        if slot is None:
            allowed = ", ".join(self._processes.ids)
            raise CommandRefused(f"worker {command.worker_id!r} is unknown; allowed: {allowed}")
        fault = SIGNALS.get(command.signal)
        if fault is None:
            raise CommandRefused(f"signal {command.signal!r} is unknown; allowed: {', '.join(SIGNALS)}")
        child = slot.child
        if child is None or not child.is_running:
            raise CommandRefused(f"{slot.process_id} is not running ({slot.failed or slot.state})")
        if command.signal in ("KILL", "TERM"):
            slot.kill_cause = "operator"
        self._emit(
            FaultInjected(
                at=time.monotonic(),
                fault=fault,
                target=slot.process_id,
                cause=command.cause,
                detail=f"SIG{command.signal} to pid {child.pid}",
            )
        )
        child.signal(signal.Signals[f"SIG{command.signal}"])
        return f"SIG{command.signal} sent to {slot.process_id} (pid {child.pid})"

    def _set_mode(self, command: SetMode) -> str:
        if command.mode not in MODES:
            raise CommandRefused(f"mode {command.mode!r} is unknown; allowed: {', '.join(MODES)}")
        if command.mode == "disagg" and not any(slot.role == "prefill" for slot in self._processes.workers):
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

    async def _change_link(self, command: ChangeLink) -> str:
        if command.bits_per_s < 0 or command.delay_ms < 0 or command.jitter_ms < 0:
            raise CommandRefused("link: rate, delay and jitter must be 0 or more")
        shape = LinkShape(
            bits_per_s=command.bits_per_s,
            delay_ms=command.delay_ms,
            jitter_ms=command.jitter_ms,
            loss=self._link.shape.loss,
        )
        try:
            await asyncio.to_thread(self._link.change, shape)
        except (NetnsError, ValueError) as error:
            raise CommandRefused(str(error)) from error
        self._relink()
        delay = f", {command.delay_ms:g} ms one way" if command.delay_ms else ""
        return f"link {format_bits_per_s(command.bits_per_s)}{delay}"
