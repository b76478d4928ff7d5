"""Which cores each worker may use. Pure.

A worker has one core to itself while there are enough, so that a prefill never slows a decode and runs compare. With
fewer cores the two roles still do not share: each role has its part of the cores and its workers take turns on it.
The router is never pinned: it is light, and has to answer when every worker is busy.
"""

import os
from collections.abc import Sequence


def available_cpus() -> tuple[int, ...]:
    """The cores this process may use (a container or ``taskset`` may allow fewer than the machine has)."""
    return tuple(sorted(os.sched_getaffinity(0)))


def plan_cpus(
    prefill_ids: Sequence[str], decode_ids: Sequence[str], cpus: Sequence[int], pin: bool = True
) -> dict[str, tuple[int, ...]]:
    """Worker id -> its cores; () = not pinned. Raises ValueError for no cores at all."""
    if not cpus:
        raise ValueError("no cores; at least one is needed")
    workers = [*prefill_ids, *decode_ids]
    if not pin or len(cpus) == 1:
        return dict.fromkeys(workers, ())
    if len(workers) <= len(cpus):
        return {worker_id: (cpu,) for worker_id, cpu in zip(workers, cpus, strict=False)}
    if not prefill_ids or not decode_ids:
        return _in_turns(workers, cpus)
    share = round(len(cpus) * len(prefill_ids) / len(workers))
    num_for_prefill = min(max(share, 1), len(cpus) - 1)
    return _in_turns(prefill_ids, cpus[:num_for_prefill]) | _in_turns(decode_ids, cpus[num_for_prefill:])


def _in_turns(worker_ids: Sequence[str], cpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    return {worker_id: (cpus[turn % len(cpus)],) for turn, worker_id in enumerate(worker_ids)}
