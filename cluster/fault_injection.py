"""Breaks what the operator or a drill asks for, says so in the log, and heals what was given a time."""

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.command_refused import CommandRefused
from cluster.control import ChangeLink, HealFaults, HealLink, InjectLinkFault, KillWorker
from cluster.events import Event, FaultHealed, FaultInjected
from cluster.link_backend import LinkBackend
from cluster.log_lines import log_line
from cluster.netns import LinkShape, NetnsError
from cluster.process_set import ProcessSet
from cluster.process_slot import ProcessSlot
from cluster.units import format_bits_per_s

SIGNALS: Final = {"KILL": "kill", "TERM": "terminate", "STOP": "hang", "CONT": "resume"}
LINK_FAULTS: Final = ("corrupt", "cut", "stall")
MAX_SECONDS: Final = 3600.0


@dataclass(eq=False)
class _OpenFault:
    """One that is not over. ``heal`` says what it did, "" = there was nothing left to heal.

    ``heal`` None: the worker ends it by itself, or when it is told that all are healed.
    """

    fault: str
    target: str
    seconds: float  # 0: until something ends it
    heal: Callable[[], Awaitable[str]] | None
    began_at: float = field(default_factory=time.monotonic)
    timer: asyncio.Task[None] | None = None


class FaultInjection:
    """``retell`` tells everybody of the link's shape; ``relink`` does so and measures it.

    ``close`` before the processes are stopped: it forgets what was still to heal.
    """

    def __init__(
        self,
        processes: ProcessSet,
        link: LinkBackend,
        *,
        emit: Callable[[Event], None],
        retell: Callable[[], None],
        relink: Callable[[], None],
    ) -> None:
        self._processes = processes
        self._link = link
        self._emit = emit
        self._retell = retell
        self._relink = relink
        self._open: list[_OpenFault] = []
        self._timers: set[asyncio.Task[None]] = set()
        self._before_slow: LinkShape | None = None  # None: the link is as it was asked for

    def close(self) -> None:
        for task in self._timers:
            task.cancel()

    async def heal_all(self, command: HealFaults) -> str:
        """End every fault that is not over, and take back those that wait for a KV frame."""
        for slot in self._processes.slots:
            if slot.role != "router" and slot.child is not None and slot.child.is_running:
                slot.send(HealLink())
        healed = []
        while self._open:  # others may end, or begin, while one is healed
            fault = self._open.pop(0)
            if fault.timer is not None:
                fault.timer.cancel()
            if await self._end(fault, command.cause or "healed"):
                healed.append(f"{fault.fault} {fault.target}")
        return f"healed: {', '.join(healed)}" if healed else "nothing to heal: no fault that lasts is on"

    def signal(self, command: KillWorker) -> str:
        """Raises CommandRefused."""
        slot = self._running(command.worker_id)
        fault = SIGNALS.get(command.signal)
        if fault is None:
            raise CommandRefused(f"signal {command.signal!r} is unknown; allowed: {', '.join(SIGNALS)}")
        if command.seconds and fault != "hang":
            raise CommandRefused(f"signal {command.signal} does not last; allowed with seconds is STOP")
        _check_seconds(command.seconds)
        child = slot.child
        assert child is not None
        if command.signal in ("KILL", "TERM"):
            slot.kill_cause = "operator"
        detail = f"SIG{command.signal} to pid {child.pid}"
        self._tell(fault, slot.process_id, command.cause, detail, command.seconds)
        child.signal(signal.Signals[f"SIG{command.signal}"])

        async def resume() -> str:
            if slot.child is not child or not child.is_running:
                return ""  # the supervisor's kill was first
            child.signal(signal.SIGCONT)
            return f"SIGCONT to pid {child.pid}"

        if fault == "hang":
            self._open_fault(fault, slot.process_id, command.seconds, resume)
        else:
            self._forget("hang", slot.process_id)
        return f"SIG{command.signal} sent to {slot.process_id} (pid {child.pid})"

    def hurt_link(self, command: InjectLinkFault) -> str:
        """Raises CommandRefused."""
        if command.kind not in LINK_FAULTS:
            raise CommandRefused(f"link fault {command.kind!r} is unknown; allowed: {', '.join(LINK_FAULTS)}")
        _check_seconds(command.seconds)
        if command.kind == "stall" and not command.seconds:
            raise CommandRefused("link fault stall needs seconds above 0")
        slot = self._running(command.worker_id)
        if slot.role == "router":
            raise CommandRefused("the router sends no KV; allowed is a worker")
        what = "the next KV frame" if not command.seconds else f"KV frames for {command.seconds:g} s"
        self._tell(
            command.kind, slot.process_id, command.cause, f"{what} of {slot.process_id}", command.seconds
        )
        slot.send(command)
        if command.seconds:
            self._open_fault(command.kind, slot.process_id, command.seconds, None)
        return f"{command.kind} will hit {what} of {slot.process_id}"

    async def change_link(self, command: ChangeLink) -> str:
        """Raises CommandRefused."""
        if not all(
            0 <= value < math.inf for value in (command.bits_per_s, command.delay_ms, command.jitter_ms)
        ):
            raise CommandRefused("link: rate, delay and jitter must be 0 or more")
        _check_seconds(command.seconds)
        before = self._before_slow or self._link.shape
        shape = LinkShape(
            bits_per_s=command.bits_per_s,
            delay_ms=command.delay_ms,
            jitter_ms=command.jitter_ms,
            loss=self._link.shape.loss,
        )
        replaced = self._forget("slow", "link")
        try:
            await asyncio.to_thread(self._link.change, shape)
        except (NetnsError, ValueError) as error:
            for slow in replaced:
                await self._end(slow, "")
            raise CommandRefused(str(error)) from error
        self._before_slow = before if command.seconds else None
        text = _in_words(shape)
        if command.seconds:
            self._tell("slow", "link", command.cause, text, command.seconds)
            self._open_fault("slow", "link", command.seconds, self._restore_link)
            self._retell()
            return f"link {text} for {command.seconds:g} s"
        self._relink()
        return f"link {text}"

    async def _restore_link(self) -> str:
        shape, self._before_slow = self._before_slow, None
        assert shape is not None
        try:
            await asyncio.to_thread(self._link.change, shape)
        except (NetnsError, ValueError) as error:  # the shape that worked before
            log_line(f"link: the shape of before does not come back: {error}")
            return ""
        self._relink()
        return _in_words(shape)

    def _running(self, process_id: str) -> ProcessSlot:
        slot = self._processes.find(process_id)
        if slot is None:
            raise CommandRefused(
                f"worker {process_id!r} is unknown; allowed: {', '.join(self._processes.ids)}"
            )
        if slot.child is None or not slot.child.is_running:
            raise CommandRefused(f"{slot.process_id} is not running ({slot.failed or slot.state})")
        return slot

    def _tell(self, fault: str, target: str, cause: str, detail: str, seconds: float) -> None:
        self._emit(
            FaultInjected(
                at=time.monotonic(), fault=fault, target=target, cause=cause, detail=detail, seconds=seconds
            )
        )

    def _open_fault(
        self, fault: str, target: str, seconds: float, heal: Callable[[], Awaitable[str]] | None
    ) -> None:
        opened = _OpenFault(fault, target, seconds, heal)
        self._open.append(opened)
        if seconds:
            opened.timer = asyncio.create_task(self._end_in_time(opened))
            self._timers.add(opened.timer)
            opened.timer.add_done_callback(self._timers.discard)

    async def _end_in_time(self, fault: _OpenFault) -> None:
        await asyncio.sleep(fault.seconds)
        self._open.remove(fault)
        await self._end(fault, "")

    async def _end(self, fault: _OpenFault, early_cause: str) -> bool:
        """Heal one that is not among the open any more; False if there was nothing left to heal.

        ``early_cause`` "" = its time is over.
        """
        if fault.heal is not None:
            detail = await fault.heal()
        else:  # a stall begins with the next frame, so its time is the earliest end
            detail = "taken back" if early_cause else "by itself"
        if not detail:
            return False
        now = time.monotonic()
        self._emit(
            FaultHealed(
                at=now,
                fault=fault.fault,
                target=fault.target,
                after_s=now - fault.began_at if early_cause else fault.seconds,
                detail=f"{detail} ({early_cause})" if early_cause else detail,
            )
        )
        return True

    def _forget(self, fault: str, target: str) -> list[_OpenFault]:
        """Something else ends or replaces these."""
        forgotten = [each for each in self._open if (each.fault, each.target) == (fault, target)]
        for opened in forgotten:
            self._open.remove(opened)
            if opened.timer is not None:
                opened.timer.cancel()
        return forgotten


def _check_seconds(seconds: float) -> None:
    if not 0 <= seconds <= MAX_SECONDS:
        raise CommandRefused(f"seconds is {seconds:g}; allowed is 0 to {MAX_SECONDS:g}")


def _in_words(shape: LinkShape) -> str:
    delay = f", {shape.delay_ms:g} ms one way" if shape.delay_ms else ""
    return f"{format_bits_per_s(shape.bits_per_s)}{delay}"
