"""Which cores each worker may use. Pure.

A worker has its cores to itself while there are enough, so that a prefill never slows a decode and runs compare. With
fewer cores the two roles still do not share: each role has its part of the cores and its workers take turns on it.
The router is never pinned: it is light, and has to answer when every worker is busy.
"""

import os
from collections import Counter
from collections.abc import Sequence


def available_cpus() -> tuple[int, ...]:
    """The cores this process may use (a container or ``taskset`` may allow fewer than the machine has)."""
    return tuple(sorted(os.sched_getaffinity(0)))


def plan_cpus(
    prefill_ids: Sequence[str],
    decode_ids: Sequence[str],
    cpus: Sequence[int],
    pin: bool = True,
    cores_per_worker: int = 1,
) -> dict[str, tuple[int, ...]]:
    """Worker id -> its cores; () = not pinned. A pinned worker has exactly ``cores_per_worker``.

    Raises ValueError, with what is allowed, for more cores a worker than there are: only single cores are shared.
    """
    if not cpus:
        raise ValueError("no cores; at least one is needed")
    workers = [*prefill_ids, *decode_ids]
    wanted = cores_per_worker * (len(workers) if pin else 1)
    if cores_per_worker > 1 and wanted > len(cpus):
        allowed = max(1, len(cpus) // len(workers) if pin else len(cpus))
        needed = f"{len(workers)} workers need {wanted} cores" if pin else f"that is {wanted} cores"
        raise ValueError(
            f"cluster.cores_per_worker is {cores_per_worker}: {needed}, {len(cpus)} are usable; "
            f"allowed is {allowed}{' or less' if allowed > 1 else ''} here"
        )
    if not pin or len(cpus) == 1:
        return dict.fromkeys(workers, ())
    if len(workers) * cores_per_worker <= len(cpus):
        firsts = range(0, len(cpus), cores_per_worker)
        return {
            worker_id: tuple(cpus[first : first + cores_per_worker])
            for worker_id, first in zip(workers, firsts, strict=False)
        }
    if not prefill_ids or not decode_ids:
        return _in_turns(workers, cpus)
    share = round(len(cpus) * len(prefill_ids) / len(workers))
    num_for_prefill = min(max(share, 1), len(cpus) - 1)
    return _in_turns(prefill_ids, cpus[:num_for_prefill]) | _in_turns(decode_ids, cpus[num_for_prefill:])


def cpus_for_another(
    pinned: Sequence[tuple[int, ...]], cpus: Sequence[int], pin: bool = True, cores_per_worker: int = 1
) -> tuple[int, ...]:
    """Cores for one more worker beside those pinned so: the least used ones; () = not pinned."""
    if not pin or len(cpus) == 1:
        return ()
    workers_on = Counter(cpu for worker_cpus in pinned for cpu in worker_cpus)
    return tuple(sorted(sorted(cpus, key=lambda cpu: (workers_on[cpu], cpu))[:cores_per_worker]))


def _in_turns(worker_ids: Sequence[str], cpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    return {worker_id: (cpus[turn % len(cpus)],) for turn, worker_id in enumerate(worker_ids)}
