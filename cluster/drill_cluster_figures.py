"""Figures of a drill's faults and of the cluster's processes: noticed, recovered, and nothing left behind.

Each is a pure function of the story. ``key`` is what stands behind the dot of the figure's name, "" = all.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Final

from cluster.drill_figure import Figure, in_brackets, shown
from cluster.drill_story import DoneFault, DrillStory
from cluster.events import (
    HeartbeatMissed,
    TransferCompleted,
    TransferFailed,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarting,
)

PROCESS_FAULTS: Final = ("kill", "terminate", "hang", "restart")
_UNSEEN: Final = ("leave", "resume")
"""Nothing of the cluster is broken by these."""

_TimeOf = Callable[[DrillStory, DoneFault], float | None]


def faults(story: DrillStory, _: str) -> Figure:
    """Faults that did not come to happen."""
    refused = [f"{done.fault} {done.target}: {done.refusal}" for done in story.facts.faults if done.refusal]
    num_done = len(story.facts.faults) - len(refused)
    missing = [*story.facts.missed, *refused]
    return Figure(len(missing), f"{num_done} faults injected, {len(missing)} not", shown(missing))


def noticed_s(story: DrillStory, key: str) -> Figure:
    """The longest time from a fault to the event that shows that it was noticed. ``key``: of one kind of fault."""
    return _longest(story, key, _noticed_at, "noticed after")


def recovered_s(story: DrillStory, key: str) -> Figure:
    """The longest time from a fault until its target works again: a process is ready or goes on, a transfer came
    through when the fault was over. ``key``: of one kind of fault."""
    return _longest(story, key, _recovered_at, "recovered after")


def serves_again_s(story: DrillStory, key: str) -> Figure:
    """The longest time from a fault to the first token of a request that was sent after it and finished.

    ``key``: of one kind of fault.
    """
    served = sorted(
        (log.first_token_at, request.sent_at)
        for request, log in story.disturbed()
        if request.has_finished and log.first_token_at is not None
    )

    def served_at(_: DrillStory, fault: DoneFault) -> float | None:
        return next((at for at, sent_at in served if sent_at >= fault.at), None)

    return _longest(story, key, served_at, "a new request served after")


def restarts(story: DrillStory, key: str) -> Figure:
    """``key``: of one process."""
    again = [
        event
        for event in story.process_facts
        if isinstance(event, WorkerStarting) and event.restarts and (not key or event.worker_id == key)
    ]
    by_process = Counter(event.worker_id for event in again)
    lines = [f"event {e.index}: {e.worker_id} started, restart {e.restarts}; {e.log}" for e in again]
    return Figure(len(again), f"{len(again)} restarts{in_brackets(by_process)}", shown(lines))


def given_up(story: DrillStory, _: str) -> Figure:
    """Processes that are not started any more."""
    lost = [event for event in story.process_facts if isinstance(event, WorkerFailed)]
    lines = [f"event {event.index}: {event.worker_id}: {event.reason}" for event in lost]
    return Figure(len(lost), f"{len(lost)} processes given up", shown(lines))


def stranded_blocks(story: DrillStory, _: str) -> Figure:
    """KV blocks held when nothing was left to do."""
    held = {
        worker: stats for worker, stats in story.last_stats.items() if stats.held_blocks or stats.reserved
    }
    total = sum(stats.held_blocks for stats in held.values())
    lines = [
        f"event {stats.index}: {worker} holds {stats.held_blocks} blocks "
        f"({stats.running} running, {stats.reserved} wait for KV, {stats.handing_off} hand off); logs/{worker}.log"
        for worker, stats in held.items()
    ]
    if story.facts.idle_at is None and not total:
        return Figure(None, "stranded blocks unknown: not every worker said that it is idle", shown(lines))
    return Figure(total, f"{total} blocks stranded", shown(lines))


def orphans(story: DrillStory, _: str) -> Figure:
    """Processes of the cluster alive after its end, and those that it had to kill at its end."""
    if story.run.orphans is None:
        return Figure(None, "orphans unknown: the log has no end", ("logs/supervisor.log",))
    lines = list(story.facts.orphans)
    if story.run.orphans:
        lines.append(f"logs/supervisor.log: {story.run.orphans} processes did not end when they were told")
    total = len(story.facts.orphans) + story.run.orphans
    return Figure(total, f"{total} orphans", shown(lines))


def memory_growth_mib(story: DrillStory, key: str) -> Figure:
    """How much more memory a process holds in the last quarter of the round than in the second one: the largest of all
    that were sampled in both. ``key``: of one process."""
    grown = []
    for process, samples in story.facts.memory.items():
        end_s = samples[-1][0] if samples else 0.0
        early = [size for at, size in samples if end_s / 4 <= at < end_s / 2]
        late = [size for at, size in samples if at >= end_s * 3 / 4]
        if early and late and (not key or process == key):
            grown.append(((statistics.median(late) - statistics.median(early)) / 2**20, process))
    if not grown:
        return Figure(None, "memory was not sampled long enough")
    worst_mib, process = max(grown)
    return Figure(max(worst_mib, 0.0), f"memory {worst_mib:+.1f} MiB ({process})", (f"logs/{process}.log",))


def _longest(story: DrillStory, key: str, at_of: _TimeOf, what: str) -> Figure:
    times: list[tuple[float | None, DoneFault]] = [
        (None if (at := at_of(story, fault)) is None else at - fault.at, fault)
        for fault in story.facts.faults
        if not fault.refusal and fault.fault not in _UNSEEN and (not key or fault.fault == key)
    ]
    if not times:
        return Figure(None, f"{what}: there was no fault")
    never = [fault for took_s, fault in times if took_s is None]
    if never:
        lines = [f"{fault.fault} {fault.target}: never; logs/{fault.target}.log" for fault in never]
        return Figure(None, f"{what}: never, for {len(never)} of {len(times)} faults", shown(lines))
    worst_s, fault = max(((took_s or 0.0, fault) for took_s, fault in times), key=lambda timed: timed[0])
    return Figure(
        worst_s, f"{what} {worst_s:.2f} s", (f"{fault.fault} {fault.target}; logs/{fault.target}.log",)
    )


def _noticed_at(story: DrillStory, fault: DoneFault) -> float | None:
    if fault.fault in PROCESS_FAULTS:
        return _process_at(story, fault, WorkerExited, HeartbeatMissed)
    return _request_at(story, TransferFailed, fault.at)


def _recovered_at(story: DrillStory, fault: DoneFault) -> float | None:
    healed_at = _healed_at(story, fault) if fault.seconds else None
    if fault.fault in PROCESS_FAULTS:
        ready_at = _process_at(story, fault, WorkerReady)
        return min((at for at in (ready_at, healed_at) if at is not None), default=None)
    return _request_at(story, TransferCompleted, fault.at if healed_at is None else healed_at)


def _healed_at(story: DrillStory, fault: DoneFault) -> float | None:
    """When the log says that it is over: only a fault that was given a time heals by itself."""
    return next(
        (
            healed.at
            for healed in story.healed
            if (healed.fault, healed.target) == (fault.fault, fault.target) and healed.at >= fault.at
        ),
        None,
    )


def _process_at(story: DrillStory, fault: DoneFault, *kinds: type) -> float | None:
    return next(
        (
            event.at
            for event in story.process_facts
            if isinstance(event, kinds) and event.worker_id == fault.target and event.at >= fault.at
        ),
        None,
    )


def _request_at(story: DrillStory, kind: type, since: float) -> float | None:
    return min(
        (fact.at for fact in story.request_facts if isinstance(fact, kind) and fact.at >= since), default=None
    )
