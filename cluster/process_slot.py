"""One process the cluster should have, over all its lives: the wish, the living child, and how earlier ones ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import msgspec

from cluster.child_process import ChildProcess
from cluster.control import AnyMessage, StartFailed, WorkerAddress, WorkerUp
from cluster.cpu_plan import plan_cpus
from cluster.profile import Profile
from cluster.restart_policy import ExitStatus, ObservedExit, ObservedProcess
from cluster.spawner import Spawner

ROUTER_ID: Final = "router"


@dataclass(slots=True)
class ProcessSlot:
    """``index`` is the worker's place in the link (-1 for the router); ``failed`` says why it is not restarted."""

    process_id: str
    role: str  # prefill | decode | both | router
    spawner: Spawner
    index: int = -1
    cpus: tuple[int, ...] = ()
    child: ChildProcess | None = None
    up: WorkerUp | None = None  # what the living worker said when it was ready
    refusal: StartFailed | None = None  # what the last child said when it could not start
    kill_cause: str = ""  # why it was ended: operator | hang | mismatch | stop | restart
    starts: int = 0
    exits: list[ObservedExit] = field(default_factory=list)
    restart_told: int = 0  # starts after which a restart was announced in the log
    failed: str = ""
    is_draining: bool = False  # takes no new requests
    is_leaving: bool = False  # stopped for good: not restarted, soon forgotten

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)

    @property
    def is_ready(self) -> bool:
        return self.child is not None and self.child.is_running and self.child.ready_at is not None

    @property
    def address(self) -> WorkerAddress | None:
        """Where the worker answers; None unless it is ready now."""
        if self.up is None or not self.is_ready:
            return None
        return msgspec.structs.replace(self.up.address, role=self.role)

    @property
    def state(self) -> str:
        """For the operator: ready | starting | restarting | failed."""
        if self.failed:
            return "failed"
        if self.child is None or not self.child.is_running:
            return "restarting"
        return "ready" if self.is_ready else "starting"

    def send(self, message: AnyMessage) -> None:
        if self.child is not None:
            self.child.send(message)

    def kill(self, number: int, cause: str) -> None:
        """Send a signal to the whole group for a reason that the exit event will name."""
        if self.child is not None:
            self.kill_cause = cause
            self.child.signal_group(number)

    def observe(self) -> ObservedProcess:
        return ObservedProcess(self.process_id, self.child is not None, tuple(self.exits))

    def begin(self, child: ChildProcess) -> None:
        self.child = child
        self.up = None
        self.refusal = None
        self.kill_cause = ""
        self.starts += 1

    def end(self, child: ChildProcess, status: ExitStatus, stopping: bool) -> ObservedExit:
        """The child is gone; remembers and returns how."""
        now = time.monotonic()
        cause = self.kill_cause or ("stop" if stopping else "crash")
        exit_ = ObservedExit(
            at=now,
            up_s=now - child.ready_at if child.ready_at is not None else 0.0,
            status=status,
            cause=cause,
            refused=self.refusal is not None or cause == "mismatch",
        )
        self.exits = [*self.exits[-63:], exit_]
        self.child = None
        self.up = None
        return exit_


def plan_slots(
    profile: Profile, cpus: Sequence[int], worker_spawner: Spawner, router_spawner: Spawner
) -> list[ProcessSlot]:
    """The processes a profile asks for: the router, then ``prefill-0`` and on, then ``decode-0`` and on.

    Raises ValueError for a profile that wants more cores than there are.
    """
    prefill_ids = [f"prefill-{number}" for number in range(profile.cluster.prefill)]
    decode_ids = [f"decode-{number}" for number in range(profile.cluster.decode)]
    pinned = plan_cpus(prefill_ids, decode_ids, cpus, profile.cluster.pin, profile.cluster.cores_per_worker)
    workers = [
        ProcessSlot(name, name.partition("-")[0], worker_spawner, index, pinned[name])
        for index, name in enumerate([*prefill_ids, *decode_ids])
    ]
    return [ProcessSlot(ROUTER_ID, "router", router_spawner), *workers]


def pairs_of(workers: Sequence[ProcessSlot]) -> set[tuple[str, str]]:
    """Every (prefill, decode) that has to work before the cluster is ready; ("", decode) where nobody prefills."""
    prefills = [slot.process_id for slot in workers if slot.role == "prefill"]
    decodes = [slot.process_id for slot in workers if slot.role == "decode"]
    return set(product(prefills or [""], decodes))
