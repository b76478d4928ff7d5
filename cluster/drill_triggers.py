"""When a drill's faults happen: the run's events and ``now`` in, the faults that are due out. Pure.

Only requests of the disturbed round count, and only events since it began. A fault of ``times`` happens again on each
further event (of another request, where it is a request's), not earlier than ``after_s`` after it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.drill import ANY_OF_ROLE, HEALED, LINK_TARGET, PROCESS_TRIGGERS, ROLES, Drill, FaultRule
from cluster.drill_story import DISTURBED
from cluster.events import Event, TokensDelivered
from cluster.metrics import RunMetrics


@dataclass(frozen=True, slots=True)
class DueFault:
    """``targets``: processes, or ``link``; () for a fault at the client. ``client_id`` "": no request is meant."""

    rule: int
    fault: FaultRule
    targets: tuple[str, ...]
    client_id: str = ""


@dataclass(slots=True)
class _Watch:
    """One rule, from its first event to its last fault."""

    number: int
    rule: FaultRule
    seen: set[str] = field(default_factory=set)  # requests that had the event
    waiting: list[tuple[float, str]] = field(default_factory=list)  # (due at, request id or "")
    num_fired: int = 0

    @property
    def num_left(self) -> int:
        return self.rule.times - self.num_fired - len(self.waiting)


class Triggers:
    """``began_at``: monotonic seconds of the disturbed round's beginning. ``worker_ids``: the cluster's workers."""

    def __init__(self, drill: Drill, worker_ids: Sequence[str], began_at: float) -> None:
        self._worker_ids = worker_ids
        self._began_at = began_at
        self._requests = RunMetrics(keep=None)
        self._watches = [_Watch(number, rule) for number, rule in enumerate(drill.faults)]
        self._by_event: dict[str, list[_Watch]] = defaultdict(list)
        for watch in self._watches:
            self._by_event[watch.rule.on].append(watch)
            if not watch.rule.on:
                watch.waiting.append((began_at + watch.rule.at_s + watch.rule.after_s, ""))

    @property
    def is_done(self) -> bool:
        """Every fault has happened as often as it should."""
        return all(watch.num_fired == watch.rule.times for watch in self._watches)

    @property
    def is_stuck(self) -> bool:
        """What is left waits for events of requests: none comes any more once every request was answered."""
        found = False
        for watch in self._watches:
            if watch.num_fired == watch.rule.times:
                continue
            is_after_stuck = watch.rule.on == HEALED and found
            if watch.waiting or (watch.rule.on in (*PROCESS_TRIGGERS, HEALED) and not is_after_stuck):
                return False
            found = True
        return found

    def take(self, event: Event) -> None:
        """The next event of the run's log."""
        counted = self._requests.fold(event)
        for each in counted:
            self._seen(each, each.request_id)
        worker_id = getattr(event, "worker_id", "")
        if not counted and worker_id and event.at >= self._began_at:
            self._process_seen(event, worker_id)

    def due(self, now: float, *, is_healed: bool) -> list[DueFault]:
        """The faults to inject now; each is handed out once. ``is_healed``: those that have happened are over."""
        found: list[DueFault] = []
        are_before_done = True
        for watch in self._watches:
            if watch.rule.on == HEALED and watch.num_left > 0 and are_before_done and is_healed and not found:
                watch.waiting.append((now + watch.rule.after_s, ""))
            are_before_done = are_before_done and watch.num_fired == watch.rule.times
            for due_at, request_id in list(watch.waiting):
                if now < due_at:
                    continue
                targets = self._targets(watch.rule, request_id)
                if targets is None:
                    continue  # the log does not say yet which worker the request is on
                watch.waiting.remove((due_at, request_id))
                watch.num_fired += 1
                timeline = self._requests.timelines.get(request_id)
                client_id = timeline.client_id if timeline is not None else ""
                found.append(DueFault(watch.number, watch.rule, targets, client_id))
        return found

    def again(self, due: DueFault) -> None:
        """It could not be done: the rule waits for its next event."""
        self._watches[due.rule].num_fired -= 1

    def missed(self) -> list[str]:
        """The faults that have not happened as often as they should, in words."""
        return [
            f"faults[{watch.number}] ({watch.rule.fault} {watch.rule.target or watch.rule.of}) happened "
            f"{watch.num_fired} of {watch.rule.times} times: {_when(watch.rule)}, seen for {len(watch.seen)}"
            for watch in self._watches
            if watch.num_fired < watch.rule.times
        ]

    def _seen(self, event: Event, request_id: str) -> None:
        timeline = self._requests.timelines.get(request_id)
        if timeline is None:
            return
        for watch in self._by_event[_name_of(event)]:
            rule = watch.rule
            if not timeline.client_id.startswith(f"{DISTURBED}/{rule.of}/"):
                continue
            if isinstance(event, TokensDelivered) and _end_of(event) <= rule.position:
                continue
            if request_id in watch.seen:
                continue
            watch.seen.add(request_id)
            if len(watch.seen) >= rule.requests and watch.num_left > 0:
                watch.waiting.append((event.at + rule.after_s, request_id))

    def _process_seen(self, event: Event, worker_id: str) -> None:
        for watch in self._by_event[_name_of(event)]:
            rule = watch.rule
            if rule.worker == worker_id:
                watch.seen.add(f"event {event.index}")
                if watch.num_left > 0:
                    watch.waiting.append((event.at + rule.after_s, ""))

    def _targets(self, rule: FaultRule, request_id: str) -> tuple[str, ...] | None:
        if rule.target in ROLES:
            timeline = self._requests.timelines[request_id]
            worker = timeline.prefill_worker if rule.target == "prefill" else timeline.decode_worker
            return (worker,) if worker else None
        if rule.target.startswith(ANY_OF_ROLE):
            role = rule.target.removeprefix(ANY_OF_ROLE)
            return tuple(worker for worker in self._worker_ids if worker.startswith(f"{role}-"))
        if rule.target == LINK_TARGET or rule.target:
            return (rule.target,)
        return ()


def _name_of(event: Event) -> str:
    """In the run log."""
    return str(event.__struct_config__.tag)


def _end_of(event: TokensDelivered) -> int:
    return event.first_position + len(event.token_at)


def _when(rule: FaultRule) -> str:
    if not rule.on:
        return f"at {rule.at_s:g} s"
    if rule.on == HEALED:
        return "when all before were healed"
    return f"on {rule.on} of {rule.of or rule.worker}"
