"""What decode steps took in a run, from its log: gaps between tokens while their worker computed no prompt. Pure.

They are told apart by whether a core was idle. A worker is taken to step from the start to the end of each prefill, and
from the first to the last token of each answer.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.events import Event, PrefillFinished, PrefillStarted, RequestDispatched, TokensDelivered
from cluster.sim_machine import Cores


@dataclass(slots=True)
class ObservedSteps:
    """Seconds; in no order."""

    free: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)  # while every core had a worker that stepped


def observed_steps(events: Iterable[Event], cores: Cores) -> ObservedSteps:
    """``events`` of a run whose workers lie on ``cores``."""
    prefills: dict[str, list[tuple[float, float]]] = defaultdict(list)
    started: dict[str, float] = {}
    decode_worker: dict[str, str] = {}
    tokens: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, RequestDispatched):
            decode_worker[event.request_id] = event.decode_worker
        elif isinstance(event, PrefillStarted):
            started[event.request_id] = event.at
        elif isinstance(event, PrefillFinished):
            prefills[event.worker_id].append((started.get(event.request_id, event.at), event.at))
        elif isinstance(event, TokensDelivered):
            tokens[event.request_id].extend(event.token_at)
    answers = [
        (decode_worker.get(request_id, ""), token_at) for request_id, token_at in tokens.items() if token_at
    ]
    busy = {worker_id: list(spans) for worker_id, spans in prefills.items()}
    for worker_id, token_at in answers:
        busy.setdefault(worker_id, []).append((token_at[0], token_at[-1]))
    fullness = _fullness(busy, cores)
    computing = {worker_id: _Switches.of(spans) for worker_id, spans in prefills.items()}
    found = ObservedSteps()
    for worker_id, token_at in answers:
        own = computing.get(worker_id)
        for earlier, later in pairwise(token_at):
            middle = (earlier + later) / 2
            if own is None or not own.is_on(middle):
                (found.full if fullness.is_on(middle) else found.free).append(later - earlier)
    return found


class _Switches:
    """On and off over time; off before the first time."""

    def __init__(self, changes: Iterable[tuple[float, bool]]) -> None:
        ordered = sorted(changes, key=lambda change: change[0])
        self._times = [at for at, _ in ordered]
        self._states = [is_on for _, is_on in ordered]

    @classmethod
    def of(cls, spans: Iterable[tuple[float, float]]) -> "_Switches":
        """On within any of the spans."""
        steps = sorted((at, delta) for began, ended in spans for at, delta in ((began, 1), (ended, -1)))
        changes, depth = [], 0
        for at, delta in steps:
            depth += delta
            changes.append((at, depth > 0))
        return cls(changes)

    def is_on(self, at: float) -> bool:
        index = bisect_right(self._times, at) - 1
        return index >= 0 and self._states[index]


def _fullness(busy: dict[str, list[tuple[float, float]]], cores: Cores) -> _Switches:
    steps = sorted(
        (at, worker_id, delta)
        for worker_id, spans in busy.items()
        for began, ended in spans
        for at, delta in ((began, 1), (ended, -1))
    )
    depth: dict[str, int] = defaultdict(int)
    changes = []
    for at, worker_id, delta in steps:
        depth[worker_id] += delta
        changes.append((at, cores.are_full(each for each, count in depth.items() if count > 0)))
    return _Switches(changes)
