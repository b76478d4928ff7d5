"""The cores that simulated workers share when all of them run on one machine. Pure.

Workers are placed as the supervisor places them (``cpu_plan``). Those on the same cores take turns, so each is slower
while the others step. And while no core is idle, the router and its clients take their time from the workers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.cpu_plan import plan_cpus


@dataclass(frozen=True, slots=True)
class SimMachine:
    """The cores of one machine, and how a profile lays workers on them."""

    cpus: tuple[int, ...]
    pin: bool = True
    cores_per_worker: int = 1


class Cores:
    """Raises ValueError for workers that ``plan_cpus`` refuses. A worker that was not planned may use all cores."""

    def __init__(self, machine: SimMachine, prefill_ids: Sequence[str], decode_ids: Sequence[str]) -> None:
        planned = plan_cpus(prefill_ids, decode_ids, machine.cpus, machine.pin, machine.cores_per_worker)
        self._all = frozenset(machine.cpus)
        self._planned = {worker_id: frozenset(cpus) or self._all for worker_id, cpus in planned.items()}
        self._each = machine.cores_per_worker

    def shares(self, stepping: Iterable[str]) -> dict[str, float]:
        """How fast each of the workers that step is, 1 = as if it were alone."""
        cpus_of = {worker_id: self._planned.get(worker_id, self._all) for worker_id in stepping}
        on = Counter(cpus_of.values())
        return {
            worker_id: min(1.0, len(cpus) / (on[cpus] * self._each)) for worker_id, cpus in cpus_of.items()
        }

    def are_full(self, stepping: Iterable[str]) -> bool:
        """No core is left for anything else."""
        on = Counter(self._planned.get(worker_id, self._all) for worker_id in stepping)
        busy = sum(min(len(cpus), count * self._each) for cpus, count in on.items())
        return busy >= len(self._all)
