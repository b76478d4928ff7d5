"""Which faults of a drill are still going on. Pure: faults and the run's events in."""

from collections.abc import Sequence
from typing import Final

from cluster.drill_cluster_figures import PROCESS_FAULTS
from cluster.drill_story import DoneFault
from cluster.events import Event, FaultHealed, WorkerFailed, WorkerReady

MARGIN_S: Final = 0.2
"""What heals by the clock is over by then, and the log says so."""


class OpenFaults:
    """A process is healed when it is ready again, goes on, or was given up; a link when its time is over."""

    def __init__(self) -> None:
        self._processes: list[DoneFault] = []
        self._over_at = 0.0

    def add(self, fault: DoneFault) -> None:
        if fault.refusal:
            return
        if fault.fault in PROCESS_FAULTS:
            self._processes.append(fault)
        elif fault.seconds:
            self._over_at = max(self._over_at, fault.at + fault.seconds + MARGIN_S)

    def take(self, event: Event) -> None:
        match event:
            case WorkerReady(worker_id=target) | WorkerFailed(worker_id=target):
                self._heal(target, event.at, PROCESS_FAULTS)
            case FaultHealed(target=target, fault=kind):
                self._heal(target, event.at, (kind,))

    def _heal(self, target: str, at: float, kinds: Sequence[str]) -> None:
        self._processes = [
            fault
            for fault in self._processes
            if fault.target != target or fault.at > at or fault.fault not in kinds
        ]

    def are_over(self, now: float) -> bool:
        return not self._processes and now >= self._over_at
