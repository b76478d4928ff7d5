"""Changes to the set of workers while it serves: drain, restart, roles, one more, one less. Nothing in flight is lost.

A drain is the router's to carry out: it is told who drains and says (``WorkerDrained``) when nothing is left there.
What a restart or a removal does not wait for goes on elsewhere, as after a death.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cluster.command_refused import CommandRefused
from cluster.control import (
    AddWorker,
    DrainWorker,
    FleetCommand,
    RemoveWorker,
    RestartWorker,
    ResumeWorker,
    SetRole,
)
from cluster.cpu_plan import available_cpus, cpus_for_another
from cluster.events import Event, RoleChanged, WorkerAdded, WorkerDraining, WorkerRemoved, WorkerResumed
from cluster.link_backend import LinkBackend
from cluster.log_lines import log_line
from cluster.netns import NetnsError
from cluster.process_set import ProcessSet
from cluster.process_slot import ProcessSlot
from cluster.profile import ClusterSection
from cluster.profile_checks import MAX_WORKERS
from cluster.spawner import Spawner
from cluster.worker_roles import DECODE_ROLES, PREFILL_ROLES, WORKER_ROLES

MAX_DRAIN_S: Final = 3600.0


class Fleet:
    """``tell_router`` sends the router the list of workers; ``measure_links`` probes them; ``spawn`` starts a task that
    ends with the cluster; ``mode`` is the cluster's mode now."""

    def __init__(
        self,
        settings: ClusterSection,
        processes: ProcessSet,
        link: LinkBackend,
        worker_spawner: Spawner,
        *,
        mode: Callable[[], str],
        emit: Callable[[Event], None],
        tell_router: Callable[[], None],
        measure_links: Callable[[], object],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._link = link
        self._worker_spawner = worker_spawner
        self._mode = mode
        self._emit = emit
        self._tell_router = tell_router
        self._measure_links = measure_links
        self._spawn = spawn
        self._drained: dict[str, asyncio.Event] = {}  # of those that drain
        self._changing: dict[str, str] = {}  # worker id -> restart | remove, while it goes on
        self._ids = set(processes.ids)  # ever used: an id names one worker for the whole run

    async def run(self, command: FleetCommand) -> str:
        """Begin it; returns the line for the operator. Raises CommandRefused."""
        match command:
            case DrainWorker():
                return self._drain(command)
            case ResumeWorker():
                return self._resume(command)
            case RestartWorker():
                return self._restart(command)
            case SetRole():
                return self._set_role(command)
            case AddWorker():
                return await self._add(command)
            case RemoveWorker():
                return self._remove(command)

    def drained(self, worker_id: str) -> None:
        """The router's word, or the worker is gone: nothing is left on it."""
        if worker_id in self._drained:
            self._drained[worker_id].set()

    # --- commands ---------------------------------------------------------------------------------------------

    def _drain(self, command: DrainWorker) -> str:
        slot = self._idle(command.worker_id)
        if slot.is_draining:
            raise CommandRefused(f"{slot.process_id} drains already")
        self._check_others(slot, "drain")
        self._begin_drain(slot, "drain", command.cause)
        return f"{slot.process_id} drains: no new requests"

    def _resume(self, command: ResumeWorker) -> str:
        slot = self._idle(command.worker_id)
        if not slot.is_draining:
            raise CommandRefused(f"{slot.process_id} does not drain")
        self._end_drain(slot)
        self._emit(WorkerResumed(at=time.monotonic(), worker_id=slot.process_id, cause=command.cause))
        return f"{slot.process_id} takes requests again"

    def _restart(self, command: RestartWorker) -> str:
        slot = self._idle(command.worker_id)
        _check_drain_s(command.drain_s)
        self._changing[slot.process_id] = "restart"
        self._begin_drain(slot, "restart", command.cause)
        self._spawn(self._restart_drained(slot, command.drain_s), f"restart {slot.process_id}")
        return f"{slot.process_id} restarts once it is drained, in {command.drain_s:g} s at the latest"

    async def _restart_drained(self, slot: ProcessSlot, drain_s: float) -> None:
        await self._until_drained(slot, drain_s)
        await self._processes.restart(slot)
        del self._changing[slot.process_id]
        self._end_drain(slot)

    def _set_role(self, command: SetRole) -> str:
        slot = self._idle(command.worker_id)
        _check_role(command.role)
        if command.role == slot.role:
            raise CommandRefused(f"{slot.process_id} has the role {slot.role} already")
        self._check_others(slot, f"become {command.role}", command.role)
        from_role, slot.role = slot.role, command.role
        slot.send(command)
        self._emit(
            RoleChanged(
                at=time.monotonic(),
                worker_id=slot.process_id,
                from_role=from_role,
                role=slot.role,
                cause=command.cause,
            )
        )
        self._tell_router()
        self._measure_links()
        return f"{slot.process_id} has the role {slot.role}, from the next request on"

    async def _add(self, command: AddWorker) -> str:
        _check_role(command.role)
        workers = self._processes.workers
        if len(workers) >= MAX_WORKERS:
            raise CommandRefused(f"the cluster has {len(workers)} workers; allowed is {MAX_WORKERS} or fewer")
        used = {slot.index for slot in workers}
        index = next(number for number in range(MAX_WORKERS) if number not in used)
        try:
            await asyncio.to_thread(self._link.make_place, index)
        except NetnsError as error:
            raise CommandRefused(f"no place in the link for another worker: {error}") from error
        settings = self._settings
        pinned = [slot.cpus for slot in workers]
        cpus = cpus_for_another(pinned, available_cpus(), settings.pin, settings.cores_per_worker)
        name = next(
            f"{command.role}-{n}" for n in range(len(self._ids) + 1) if f"{command.role}-{n}" not in self._ids
        )
        self._ids.add(name)
        self._processes.add(ProcessSlot(name, command.role, self._worker_spawner, index, cpus))
        self._emit(WorkerAdded(at=time.monotonic(), worker_id=name, role=command.role, cause=command.cause))
        self._tell_router()
        return f"{name} starts"

    def _remove(self, command: RemoveWorker) -> str:
        slot = self._idle(command.worker_id)
        _check_drain_s(command.drain_s)
        self._check_others(slot, "leave")
        self._changing[slot.process_id] = "remove"
        self._begin_drain(slot, "remove", command.cause)
        self._spawn(self._remove_drained(slot, command), f"remove {slot.process_id}")
        return f"{slot.process_id} leaves once it is drained, in {command.drain_s:g} s at the latest"

    async def _remove_drained(self, slot: ProcessSlot, command: RemoveWorker) -> None:
        await self._until_drained(slot, command.drain_s)
        await self._processes.remove(slot)
        del self._changing[slot.process_id]
        self._end_drain(slot)
        self._emit(WorkerRemoved(at=time.monotonic(), worker_id=slot.process_id, cause=command.cause))

    # --- draining ---------------------------------------------------------------------------------------------

    def _begin_drain(self, slot: ProcessSlot, reason: str, cause: str) -> None:
        if not slot.is_draining:
            self._drained[slot.process_id] = asyncio.Event()
        slot.is_draining = True
        self._emit(WorkerDraining(at=time.monotonic(), worker_id=slot.process_id, reason=reason, cause=cause))
        self._tell_router()

    def _end_drain(self, slot: ProcessSlot) -> None:
        slot.is_draining = False
        self._drained.pop(slot.process_id, None)
        self._tell_router()

    async def _until_drained(self, slot: ProcessSlot, limit_s: float) -> None:
        if slot.address is None:  # it has nothing
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._drained[slot.process_id].wait()
        except TimeoutError:
            log_line(f"{slot.process_id} is not drained after {limit_s:g} s: what it has goes on elsewhere")

    # --- refusals ---------------------------------------------------------------------------------------------

    def _idle(self, worker_id: str) -> ProcessSlot:
        """The worker of that id, with which nothing else is being done."""
        slot = self._processes.find(worker_id)
        if slot is None or slot.index < 0:
            allowed = ", ".join(slot.process_id for slot in self._processes.workers)
            raise CommandRefused(f"worker {worker_id!r} is unknown; allowed: {allowed}")
        if worker_id in self._changing:
            raise CommandRefused(
                f"{worker_id} is being {_CHANGING[self._changing[worker_id]]}; wait for its end"
            )
        return slot

    def _check_others(self, slot: ProcessSlot, verb: str, role: str = "") -> None:
        """Refuse to take the last worker of its kind away. ``role`` is what the worker will be, "" = nothing."""
        staying = [
            other.role
            for other in self._processes.workers
            if other is not slot and not other.is_draining and not other.failed and not other.is_leaving
        ]
        roles = [*staying, role]
        if self._mode() == "colocated":
            if not any(roles):
                raise CommandRefused(
                    f"{slot.process_id} cannot {verb}: it is the only worker that takes requests"
                )
            return
        if not any(other in DECODE_ROLES for other in roles):
            raise CommandRefused(
                f"{slot.process_id} cannot {verb}: it is the only decode worker that takes requests; "
                "add one first, or restart_worker it: requests wait meanwhile"
            )
        may_do_without = verb == "drain" and self._settings.fallback == "on"
        if not may_do_without and not any(other in PREFILL_ROLES for other in roles):
            raise CommandRefused(
                f"{slot.process_id} cannot {verb}: it is the only prefill worker that takes requests; "
                "add one first, or set mode colocated"
            )


_CHANGING: Final = {"restart": "restarted", "remove": "removed"}


def _check_role(role: str) -> None:
    if role not in WORKER_ROLES:
        raise CommandRefused(f"role {role!r} is unknown; allowed: {', '.join(WORKER_ROLES)}")


def _check_drain_s(drain_s: float) -> None:
    if not 0 <= drain_s <= MAX_DRAIN_S:
        raise CommandRefused(f"drain_s is {drain_s:g}; allowed is 0 to {MAX_DRAIN_S:g}")
