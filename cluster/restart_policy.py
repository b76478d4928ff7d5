"""Whether and when a process that ended is started again. Pure: exits and ``now`` in, decisions out.

A process that dies by itself, hangs, or is killed before it was ready is waited for longer each time, and given up as
a crash loop after too many in a short while. One that was up and ready and was killed from outside (the operator,
``kill -9``, the kernel's memory killer) says nothing against its program: it comes back after the shortest wait and is
not counted. One that refused to start (wrong configuration, mismatching model) would refuse again: it is not restarted.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.profile import SupervisorSection


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. ``signal`` 0: by itself with ``exit_code``."""

    exit_code: int = 0
    signal: int = 0

    def __str__(self) -> str:
        return f"signal {signal.Signals(self.signal).name}" if self.signal else f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """One end of a process, as the policy sees it. Times are monotonic seconds."""

    at: float
    up_s: float  # since it was ready; 0 when it never was
    status: ExitStatus
    cause: str = "crash"  # as WorkerExited.cause
    refused: bool = False  # it said StartFailed


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """What is known of one process that should run."""

    process_id: str
    running: bool
    exits: tuple[ObservedExit, ...] = ()


@dataclass(frozen=True, slots=True)
class StartNow:
    process_id: str
    backoff_s: float = 0.0  # the wait that has passed


@dataclass(frozen=True, slots=True)
class StartLater:
    process_id: str
    at: float
    backoff_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    process_id: str
    reason: str


Action = StartNow | StartLater | GiveUp


def plan_starts(processes: Iterable[ObservedProcess], now: float, limits: SupervisorSection) -> list[Action]:
    """One decision for each process that should run and does not."""
    return [_plan_one(process, now, limits) for process in processes if not process.running]


def backoff_s(exits: Sequence[ObservedExit], limits: SupervisorSection) -> float:
    """The wait after the last exit: doubling with each failure in a row, from the start again after a long life."""
    in_a_row = 0
    for exit_ in reversed(exits):
        if not counts_against(exit_):
            break
        in_a_row += 1
        if exit_.up_s >= limits.backoff_reset_s:
            break
    doublings = min(max(in_a_row - 1, 0), 64)  # 2**64 first waits are beyond any maximum
    return float(min(limits.backoff_first_s * 2**doublings, limits.backoff_max_s))


def counts_against(exit_: ObservedExit) -> bool:
    """Whether an exit is a sign of a broken process."""
    if exit_.cause == "restart":
        return False
    killed = exit_.status.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return not (killed and exit_.up_s > 0 and exit_.cause != "hang")


def _plan_one(process: ObservedProcess, now: float, limits: SupervisorSection) -> Action:
    exits = process.exits
    if not exits:
        return StartNow(process.process_id)
    if exits[-1].refused:
        return GiveUp(process.process_id, f"it refused to start ({exits[-1].status})")
    recent = [
        exit_ for exit_ in exits if counts_against(exit_) and exit_.at > now - limits.crash_loop_window_s
    ]
    if len(recent) >= limits.crash_loop_exits and counts_against(exits[-1]):
        return GiveUp(
            process.process_id,
            f"crash loop: {len(recent)} exits within {limits.crash_loop_window_s:g} s, the last by {exits[-1].status}",
        )
    never_ready = exits[-limits.crash_loop_exits :]
    if len(never_ready) == limits.crash_loop_exits and all(exit_.up_s <= 0 for exit_ in never_ready):
        return GiveUp(
            process.process_id,
            f"it never became ready in {len(never_ready)} starts, the last ended by {exits[-1].status}",
        )
    wait_s = backoff_s(exits, limits)
    due_at = exits[-1].at + wait_s
    if now >= due_at:
        return StartNow(process.process_id, wait_s)
    return StartLater(process.process_id, due_at, wait_s)
