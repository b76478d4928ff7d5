"""Keeps the processes of a cluster running: spawns, pings, notices ends and silence, restarts by the policy.

Each ``tick`` is observe -> plan -> act -> emit; the plan itself is ``restart_policy`` and ``heartbeat``, both pure.
Knows nothing of what the processes do for each other; that is the supervisor's.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cluster.child_process import ChildProcess, group_members
from cluster.control import AnyMessage, Ping, StartFailed
from cluster.events import (
    Event,
    HeartbeatMissed,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRestarting,
    WorkerStarting,
)
from cluster.heartbeat import PING_INTERVAL_S, Heartbeats
from cluster.log_lines import last_text
from cluster.process_slot import ProcessSlot
from cluster.profile import SupervisorSection
from cluster.restart_policy import ExitStatus, GiveUp, StartLater, StartNow, plan_starts
from cluster.spawner import SpawnError

LOG_LINES_KEPT = 20

FirstMessage = Callable[[ProcessSlot], tuple[AnyMessage, tuple[int, ...]]]
"""What a new child is told first, and the descriptors it inherits."""


class ProcessSet:
    """All children of one supervisor.

    ``on_message`` gets every message but StartFailed, which is noted in the slot; ``on_change`` is called after a child
    ended, refused or was given up.
    """

    def __init__(
        self,
        slots: Sequence[ProcessSlot],
        limits: SupervisorSection,
        log_dir: Path,
        *,
        first_message: FirstMessage,
        emit: Callable[[Event], None],
        on_message: Callable[[ProcessSlot, AnyMessage], None],
        on_change: Callable[[ProcessSlot], None],
    ) -> None:
        self._slots = {slot.process_id: slot for slot in slots}
        self._limits = limits
        self._log_dir = log_dir
        self._first_message = first_message
        self._emit = emit
        self._on_message = on_message
        self._on_change = on_change
        self._heartbeats = Heartbeats(limits.heartbeat_timeout_s)
        self._next_ping_at = 0.0
        self._ping_seq = 0
        self._groups: list[int] = []
        self._stopping = False

    @property
    def slots(self) -> list[ProcessSlot]:
        return list(self._slots.values())

    @property
    def workers(self) -> list[ProcessSlot]:
        return [slot for slot in self._slots.values() if slot.index >= 0]

    @property
    def ids(self) -> list[str]:
        return list(self._slots)

    def find(self, process_id: str) -> ProcessSlot | None:
        return self._slots.get(process_id)

    def slot(self, process_id: str) -> ProcessSlot:
        """Raises KeyError for a name that is not of this cluster."""
        return self._slots[process_id]

    async def tick(self, now: float) -> None:
        """Start what is due, ping, kill what is silent or takes too long to start. Call it often."""
        if self._stopping:
            return
        wanted = [slot.observe() for slot in self._slots.values() if not slot.failed and not slot.is_leaving]
        for action in plan_starts(wanted, now, self._limits):
            slot = self._slots.get(action.process_id)
            if slot is None or slot.is_leaving:  # since the last process was started
                continue
            match action:
                case StartNow() if slot.spawner.is_pending:
                    continue
                case StartNow(backoff_s=backoff_s):
                    self._tell_restart(slot, backoff_s)
                    await self._spawn(slot)
                case StartLater(backoff_s=backoff_s):
                    self._tell_restart(slot, backoff_s)
                case GiveUp(reason=reason):
                    self._give_up(slot, reason)
        if now >= self._next_ping_at:
            self._next_ping_at = now + PING_INTERVAL_S
            self._check_life(now)

    def add(self, slot: ProcessSlot) -> None:
        """One more process to keep running, from the next tick on."""
        self._slots[slot.process_id] = slot

    async def restart(self, slot: ProcessSlot) -> None:
        """Stop one process, as ``stop`` does; the next ticks start it again, also when it had been given up."""
        if slot.child is not None:
            slot.kill_cause = "restart"
            await slot.child.stop(self._limits.stop_grace_s)
        if slot.failed:
            slot.failed, slot.exits = "", []

    async def remove(self, slot: ProcessSlot) -> None:
        """Stop one process, as ``stop`` does, and forget it."""
        slot.is_leaving = True
        if slot.child is not None:
            slot.kill_cause = "stop"
            await slot.child.stop(self._limits.stop_grace_s)
        del self._slots[slot.process_id]

    async def stop(self, process_ids: Iterable[str]) -> None:
        """Terminate, wait, kill these, all at once; returns when they are gone. Nothing is restarted any more."""
        self._stopping = True
        children = [child for name in process_ids if (child := self._slots[name].child) is not None]
        await asyncio.gather(*(child.stop(self._limits.stop_grace_s) for child in children))

    def kill_all(self) -> None:
        """SIGKILL to everything now."""
        self._stopping = True
        for slot in self._slots.values():
            slot.kill(signal.SIGKILL, slot.kill_cause or "stop")

    def survivors(self) -> list[int]:
        """Pids that still live in the groups of children that have ended."""
        return [pid for group in self._groups for pid in group_members(group)]

    def mark_ready(self, slot: ProcessSlot, total_blocks: int = 0, kv_address: str = "") -> None:
        """The child said so itself."""
        child = slot.child
        if child is not None and child.ready_at is None:
            self._emit(
                WorkerReady(
                    at=time.monotonic(),
                    worker_id=slot.process_id,
                    role=slot.role,
                    pid=child.pid,
                    after_s=child.mark_ready(),
                    total_blocks=total_blocks,
                    kv_address=kv_address,
                )
            )

    async def _spawn(self, slot: ProcessSlot) -> None:
        message, pass_fds = self._first_message(slot)
        log_path = self._log_dir / f"{slot.process_id}.log"
        try:
            child = await ChildProcess.spawn(
                slot.process_id,
                slot.spawner,
                log_path,
                first=message,
                pass_fds=pass_fds,
                on_message=lambda child, message: self._said(slot, child, message),
                on_exit=lambda child, status: self._ended(slot, child, status),
            )
        except SpawnError as error:
            self._give_up(slot, str(error))
            return
        slot.begin(child)
        if slot.is_leaving:  # since it was asked for
            slot.kill(signal.SIGKILL, "stop")
        self._emit(
            WorkerStarting(
                at=child.spawned_at,
                worker_id=slot.process_id,
                role=slot.role,
                pid=child.pid,
                restarts=slot.restarts,
                cpus=slot.cpus,
                log=str(log_path),
            )
        )

    def _said(self, slot: ProcessSlot, child: ChildProcess, message: AnyMessage) -> None:
        if isinstance(message, StartFailed):
            slot.refusal = message
        else:
            self._on_message(slot, message)

    def _ended(self, slot: ProcessSlot, child: ChildProcess, status: ExitStatus) -> None:
        exit_ = slot.end(child, status, self._stopping)
        if child.leftover:
            self._groups.append(child.pid)
        self._emit(
            WorkerExited(
                at=exit_.at,
                worker_id=slot.process_id,
                role=slot.role,
                pid=child.pid,
                exit_code=status.exit_code,
                signal=status.signal,
                cause=exit_.cause,
            )
        )
        self._on_change(slot)

    def _check_life(self, now: float) -> None:
        self._ping_seq += 1
        heard_at = {}
        for slot in self._slots.values():
            child = slot.child
            if child is None or not child.is_running:
                continue
            if child.ready_at is not None:
                heard_at[slot.process_id] = max(child.heard_at, child.ready_at)
                child.send(Ping(seq=self._ping_seq))
            elif now - child.spawned_at > self._limits.start_timeout_s:
                if slot.kill_cause != "hang":
                    limit_s = self._limits.start_timeout_s
                    self._emit(
                        HeartbeatMissed(at=now, worker_id=slot.process_id, silent_s=limit_s, part="start")
                    )
                slot.kill(signal.SIGKILL, "hang")
        for process_id, silent_s in self._heartbeats.silent(heard_at, now).items():
            slot = self._slots[process_id]
            if slot.kill_cause != "hang":
                self._emit(HeartbeatMissed(at=now, worker_id=process_id, silent_s=silent_s))
                slot.kill(signal.SIGKILL, "hang")

    def _tell_restart(self, slot: ProcessSlot, backoff_s: float) -> None:
        """Once for each end."""
        if slot.restart_told < slot.starts:
            slot.restart_told = slot.starts
            self._emit(
                WorkerRestarting(
                    at=time.monotonic(),
                    worker_id=slot.process_id,
                    restarts=slot.starts,
                    backoff_s=backoff_s,
                )
            )

    def _give_up(self, slot: ProcessSlot, reason: str) -> None:
        log_path = self._log_dir / f"{slot.process_id}.log"
        slot.failed = slot.refusal.message if slot.refusal is not None else reason
        self._emit(
            WorkerFailed(
                at=time.monotonic(),
                worker_id=slot.process_id,
                reason=slot.failed,
                detail=last_text(log_path, LOG_LINES_KEPT),
            )
        )
        self._on_change(slot)
