"""What happened in a drill: the run's events and what its clients saw, put side by side. A pure fold.

``facts`` are the client's: which requests were sent in which round and what came of them. The events are the cluster's.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cluster.drill import Drill
from cluster.events import (
    Event,
    FaultHealed,
    FaultInjected,
    FellBack,
    FirstToken,
    HeartbeatMissed,
    RequestMigrated,
    RequestRetried,
    RunStopping,
    TransferCompleted,
    TransferFailed,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarting,
    WorkerStats,
)
from cluster.load_client import RequestResult
from cluster.metrics import RunMetrics
from cluster.request_timeline import RequestTimeline
from cluster.run_facts import RunFacts

UNDISTURBED: Final = "undisturbed"
DISTURBED: Final = "disturbed"
AFTER: Final = "after"
"""The rounds of a drill: without faults, with them, and a last request each to see that all is as before."""

TURNED_AWAY: Final = ("http_429", "http_503")

RequestFact = FellBack | RequestRetried | RequestMigrated | TransferFailed | TransferCompleted | FirstToken
ProcessFact = WorkerStarting | WorkerReady | WorkerExited | WorkerFailed | HeartbeatMissed


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request by its client. ``result`` None: no answer by the end of the round, or the client left before."""

    round: str
    group: str
    number: int
    prompt: int
    sent_at: float
    result: RequestResult | None = None
    left_at: float | None = None
    ended_at: float | None = None  # when the result was there

    @property
    def client_id(self) -> str:
        return f"{self.round}/{self.group}/{self.number}"

    @property
    def has_finished(self) -> bool:
        return self.result is not None and not self.result.failure

    @property
    def was_turned_away(self) -> bool:
        return self.result is not None and self.result.failure in TURNED_AWAY

    @property
    def has_failed(self) -> bool:
        return self.result is not None and bool(self.result.failure) and not self.was_turned_away


@dataclass(frozen=True, slots=True)
class DoneFault:
    """One fault as it was carried out. ``refusal``: why the cluster would not, "" = it did; ``seconds`` as asked."""

    rule: int
    fault: str
    target: str
    at: float
    refusal: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DrillFacts:
    """What the drill itself knows when the cluster has stopped.

    ``missed``: faults that never came to happen, in words. ``orphans``: processes still alive after the stop.
    ``idle_at``: when every worker had said that it is idle, None = not all did. ``memory``: process -> (seconds since
    the disturbed round began, resident bytes), in order.
    """

    sent: tuple[SentRequest, ...]
    faults: tuple[DoneFault, ...] = ()
    missed: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    idle_at: float | None = None
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)


class DrillStory:
    """See the module. Requests are those of the disturbed round unless another is named."""

    def __init__(self, drill: Drill, facts: DrillFacts, events: Iterable[Event]) -> None:
        self.drill = drill
        self.facts = facts
        self.metrics = RunMetrics(keep=None)
        self.run = RunFacts()
        self.injected: list[FaultInjected] = []
        self.healed: list[FaultHealed] = []
        self.process_facts: list[ProcessFact] = []  # from the disturbed round to the stop
        self.request_facts: list[RequestFact] = []
        self.last_stats: dict[str, WorkerStats] = {}  # of each worker, before the cluster stopped
        self._failed_transfers: set[tuple[str, int]] = set()
        began_at = min((request.sent_at for request in facts.sent if request.round == DISTURBED), default=0.0)
        is_stopping = False
        for event in events:
            self.run.fold(event)
            for counted in self.metrics.fold(event):
                if isinstance(counted, RequestFact) and self._is_first(counted):
                    self.request_facts.append(counted)
            match event:
                case RunStopping():
                    is_stopping = True
                case FaultInjected():
                    self.injected.append(event)
                case FaultHealed():
                    self.healed.append(event)
                case WorkerStats() if not is_stopping:
                    self.last_stats[event.worker_id] = event
                case (
                    WorkerStarting() | WorkerReady() | WorkerExited() | WorkerFailed() | HeartbeatMissed()
                ) if event.at >= began_at and not is_stopping:
                    self.process_facts.append(event)
        self._by_client_id = {timeline.client_id: timeline for timeline in self.metrics.timelines.values()}
        self._by_round: dict[str, list[SentRequest]] = defaultdict(list)
        self._undisturbed: dict[tuple[str, int], list[SentRequest]] = defaultdict(list)
        for request in facts.sent:
            self._by_round[request.round].append(request)
            if request.round == UNDISTURBED and request.has_finished:
                self._undisturbed[request.group, request.prompt].append(request)

    def sent(self, round_: str = DISTURBED) -> list[SentRequest]:
        return self._by_round[round_]

    def timeline(self, request: SentRequest) -> RequestTimeline | None:
        """What the log tells of it; None: it never arrived."""
        return self._by_client_id.get(request.client_id)

    def disturbed(self) -> Iterator[tuple[SentRequest, RequestTimeline]]:
        """The requests that the log knows, with what it tells."""
        for request in self.sent():
            timeline = self.timeline(request)
            if timeline is not None:
                yield request, timeline

    def is_disturbed(self, fact: RequestFact) -> bool:
        """Whether it is of the disturbed round."""
        return self.metrics.timelines[fact.request_id].client_id.startswith(f"{DISTURBED}/")

    def undisturbed(self, request: SentRequest) -> list[SentRequest]:
        """The finished requests of the same prompt of the undisturbed round."""
        return self._undisturbed[request.group, request.prompt]

    def _is_first(self, fact: RequestFact) -> bool:
        """Both ends tell of a failed transfer; one of them counts."""
        if not isinstance(fact, TransferFailed):
            return fact.request_id in self.metrics.timelines
        key = (fact.request_id, fact.attempt)
        is_first = key not in self._failed_transfers
        self._failed_transfers.add(key)
        return is_first and fact.request_id in self.metrics.timelines
