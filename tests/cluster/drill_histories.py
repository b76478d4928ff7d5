"""Whole drills told by hand: a history in which every promise is kept, and one way to break each of them.

A ``Told`` drill is a list of requests and faults; its events and facts are made from these, as a cluster and its
clients would have left them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.drill import ANY_OF_ROLE, Drill
from cluster.drill_cluster_figures import PROCESS_FAULTS
from cluster.drill_expectation import Expectation
from cluster.drill_story import AFTER, DISTURBED, UNDISTURBED, DoneFault, DrillFacts, DrillStory, SentRequest
from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    HeartbeatMissed,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRetried,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarting,
    WorkerStats,
)
from cluster.load_client import RequestResult

BEGAN = {UNDISTURBED: 10.0, DISTURBED: 100.0, AFTER: 400.0}
STOPPING = 500.0
LATE = 1000.0


@dataclass
class ToldRequest:
    round: str
    group: str
    number: int
    prompt: int
    max_tokens: int
    sent_at: float
    ttft_s: float = 0.1
    gap_s: float = 0.01
    text: str = "as always"
    failure: str = ""  # as the client sees it
    retry_after_s: float | None = 1.0
    is_answered: bool = True
    log_end: str = "finished"  # finished | failed | none
    left_at: float | None = None
    left_phase: str = ""
    left_noticed_s: float = 0.05
    retried: list[str] = field(default_factory=list)  # reasons, as the next three
    fell_back: list[str] = field(default_factory=list)
    transfers_failed: list[str] = field(default_factory=list)
    migrated: list[str] = field(default_factory=list)
    has_gap: bool = False

    @property
    def request_id(self) -> str:
        return f"r-{self.round}-{self.group}-{self.number}"

    def fail(self, failure: str) -> None:
        self.failure = failure
        self.log_end = "none" if failure in ("http_429", "http_503") else "failed"

    def sent(self) -> SentRequest:
        result = RequestResult(
            "client",
            ttft_s=self.ttft_s,
            itl_s=(self.gap_s,) * (self.max_tokens - 1),
            e2el_s=1.0,
            failure=self.failure,
            request_id=self.request_id,
            text=self.text,
            finish_reason="length",
            num_chunks=self.max_tokens,
            retry_after_s=self.retry_after_s,
        )
        is_answered = self.is_answered and self.left_at is None
        return SentRequest(
            self.round,
            self.group,
            self.number,
            self.prompt,
            self.sent_at,
            result if is_answered else None,
            self.left_at,
            self.sent_at + 1.0 if is_answered else None,
        )

    def events(self) -> list[Event]:
        if self.log_end == "none":
            return []
        at, name = self.sent_at, self.request_id
        found: list[Event] = [
            RequestArrived(
                at=at,
                request_id=name,
                prompt_tokens=100,
                max_tokens=self.max_tokens,
                client_id=f"{self.round}/{self.group}/{self.number}",
            ),
            RequestDispatched(
                at=at,
                request_id=name,
                attempt=1,
                mode="disagg",
                codec="raw",
                decode_worker="decode-0",
                decode_reason="",
                prefill_worker="prefill-0",
            ),
        ]
        found += [RequestRetried(at=at, request_id=name, attempt=2, reason=why) for why in self.retried]
        found += [
            FellBack(at=at, request_id=name, attempt=2, worker_id="decode-0", reason=why, prompt_tokens=100)
            for why in self.fell_back
        ]
        found += [
            TransferFailed(at=at + 0.3, request_id=name, attempt=1, worker_id=worker, reason=why)
            for why in self.transfers_failed
            for worker in ("prefill-0", "decode-0")  # both ends tell
        ]
        found += [
            RequestMigrated(at=at, request_id=name, attempt=2, from_worker=worker, delivered_tokens=1)
            for worker in self.migrated
        ]
        if self.left_at is not None:
            end: Event = RequestCancelled(
                at=self.left_at + self.left_noticed_s, request_id=name, phase=self.left_phase
            )
            return [*found, end]
        first_at = at + self.ttft_s
        found.append(
            TransferCompleted(
                at=first_at,
                request_id=name,
                attempt=1,
                from_worker="prefill-0",
                to_worker="decode-0",
                codec="raw",
                tokens=1,
                raw_bytes=1,
                wire_bytes=1,
                duration_s=0.1,
                exposed_s=0.1,
                busy_s=0.1,
            )
        )
        found.append(FirstToken(at=first_at, request_id=name, ttft_ms=self.ttft_s * 1e3))
        found.append(
            TokensDelivered(
                at=first_at, request_id=name, first_position=int(self.has_gap), token_at=(first_at,)
            )
        )
        if self.log_end == "failed":
            return [*found, RequestFailed(at=first_at, request_id=name, reason="broken", status=500)]
        finished = RequestFinished(
            at=first_at + 1.0, request_id=name, finish_reason="length", output_tokens=1, e2el_ms=1e3
        )
        return [*found, finished]


@dataclass
class ToldFault:
    rule: int
    fault: str
    target: str
    at: float
    noticed_s: float = 0.1
    recovered_s: float = 1.0
    comes_back: bool = True
    seconds: float = 0.0

    def events(self) -> list[Event]:
        if self.fault not in PROCESS_FAULTS:
            return []
        role = self.target.partition("-")[0]
        seen_at, ready_at = self.at + self.noticed_s, self.at + self.recovered_s
        found: list[Event] = []
        if self.fault == "hang":
            found.append(HeartbeatMissed(at=seen_at, worker_id=self.target, silent_s=2.0))
        found.append(WorkerExited(at=seen_at, worker_id=self.target, role=role, pid=1))
        if self.comes_back:
            found.append(
                WorkerStarting(at=ready_at, worker_id=self.target, role=role, pid=2, restarts=1, log="x.log")
            )
            found.append(WorkerReady(at=ready_at, worker_id=self.target, role=role, pid=2, after_s=0.1))
        return found


@dataclass
class Told:
    """One drill's whole story."""

    drill: Drill
    requests: list[ToldRequest]
    faults: list[ToldFault]
    missed: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    held_blocks: int = 0
    given_up: str = ""
    growth_mib: float = 0.0
    more_restarts: int = 0

    def of(self, round_: str = DISTURBED, group: str = "") -> list[ToldRequest]:
        return [r for r in self.requests if r.round == round_ and group in ("", r.group)]

    def story(self) -> DrillStory:
        facts = DrillFacts(
            sent=tuple(request.sent() for request in self.requests),
            faults=tuple(DoneFault(f.rule, f.fault, f.target, f.at, seconds=f.seconds) for f in self.faults),
            missed=self.missed,
            orphans=self.orphans,
            idle_at=STOPPING - 1.0,
            memory={
                "supervisor": [(t, int((100 + self.growth_mib * (t >= 75)) * 2**20)) for t in range(101)]
            },
        )
        return DrillStory(self.drill, facts, self._events())

    def _events(self) -> list[Event]:
        middle: list[Event] = []
        for part in [*self.requests, *self.faults]:
            middle += part.events()
        for number in range(self.more_restarts):
            middle.append(
                WorkerStarting(at=450.0, worker_id="decode-0", role="decode", pid=3, restarts=number + 1)
            )
        if self.given_up:
            middle.append(WorkerFailed(at=450.0, worker_id=self.given_up, reason="crash loop"))
        middle.append(
            WorkerStats(at=STOPPING - 2.0, worker_id="decode-0", role="decode", held_blocks=self.held_blocks)
        )
        begin = RunStarted(
            at=0.0, run="r", profile="10gbe", model="tiny", mode="disagg", codec="raw", wall_at=1.0
        )
        return [
            begin,
            RunReady(at=1.0, after_s=1.0, url=""),
            *sorted(middle, key=lambda event: event.at),
            RunStopping(at=STOPPING, reason="drill is over"),
            RunStopped(at=STOPPING + 1.0),
        ]


def kept(drill: Drill) -> Told:
    """A history in which everything that the drill expects is true."""
    told = Told(drill, [], [])
    for name, group in drill.requests.items():
        count = group.num_prompts * 2 if group.streams else group.count
        for round_, number_of in ((UNDISTURBED, group.num_prompts), (DISTURBED, count), (AFTER, 1)):
            if round_ == AFTER and group.is_disturbance:
                continue
            told.requests += [
                ToldRequest(
                    round_, name, n, n % group.num_prompts, group.max_tokens, BEGAN[round_] + n * 0.01
                )
                for n in range(number_of)
            ]
    for number, rule in enumerate(drill.faults):
        for time in range(rule.times):
            at = BEGAN[DISTURBED] + 10.0 * number + 2.0 * time
            told.faults += [
                ToldFault(number, rule.fault, target, at, seconds=rule.seconds)
                for target in _targets(rule.target)
            ]
    last = max((fault.at for fault in told.faults), default=0.0)
    for request in told.of()[-1:]:
        request.sent_at = max(request.sent_at, last + 0.5)  # one that is sent after every fault
    for expectation in drill.expect:
        if expectation.sense != "<=" and expectation.bound:
            MAKE.get(expectation.figure, _nothing)(told, expectation, int(expectation.bound))
    return told


def broken(drill: Drill, expectation: Expectation) -> Told:
    """As ``kept``, but for this one promise."""
    told = kept(drill)
    if expectation.figure in MAKE and expectation.sense == "==" and expectation.bound == 0:
        MAKE[expectation.figure](told, expectation, 1)
    else:
        BREAK[expectation.figure](told, expectation)
    return told


def _targets(target: str) -> list[str]:
    if target.startswith(ANY_OF_ROLE):
        role = target.removeprefix(ANY_OF_ROLE)
        return [f"{role}-0", f"{role}-1"]
    return [f"{target}-0" if target in ("prefill", "decode") else target or "client"]


def _nothing(told: Told, expectation: Expectation, count: int) -> None:
    """True without doing anything."""


# --- making true ------------------------------------------------------------------------------------------------


def _make_failed(told: Told, expectation: Expectation, count: int) -> None:
    for request in told.of()[:count]:
        request.fail(expectation.key or "broken_stream")


def _make_failed_by_nothing(told: Told, expectation: Expectation, count: int) -> None:
    for request in told.of()[:count]:
        request.fail("error_event")


def _make_rejected(told: Told, expectation: Expectation, count: int) -> None:
    group = [name for name, group in told.drill.requests.items() if group.is_disturbance][:1]
    for request in told.of(group=group[0] if group else "")[:count]:
        request.fail(expectation.key or "http_429")


def _make_turned_away_rudely(told: Told, expectation: Expectation, count: int) -> None:
    for request in told.of()[-count:]:
        request.fail("http_429")
        request.retry_after_s = None


def _make_left(told: Told, expectation: Expectation, count: int) -> None:
    if not expectation.key:
        return  # the phases are told apart
    staying = [r for r in told.of() if r.left_at is None and told.drill.requests[r.group].is_disturbance]
    for request in staying[:count]:
        request.left_at, request.left_phase = request.sent_at + 1.0, expectation.key


def _make_list(attribute: str, default: str) -> "Make":
    def make(told: Told, expectation: Expectation, count: int) -> None:
        for request in told.of()[:count]:
            if not getattr(request, attribute) or expectation.key not in ("", *getattr(request, attribute)):
                getattr(request, attribute).append(expectation.key or default)

    return make


def _make_restarts(told: Told, expectation: Expectation, count: int) -> None:
    if not expectation.bound:
        told.more_restarts = count


Make = Callable[[Told, Expectation, int], None]
MAKE: dict[str, Make] = {
    "failed": _make_failed,
    "failed_without_rule": _make_failed_by_nothing,
    "rejected": _make_rejected,
    "without_retry_after": _make_turned_away_rudely,
    "left": _make_left,
    "retried": _make_list("retried", "prefill_died"),
    "fallbacks": _make_list("fell_back", "prefill_died"),
    "transfer_failures": _make_list("transfers_failed", "peer_closed"),
    "migrated": _make_list("migrated", "decode-0"),
    "restarts": _make_restarts,
}


# --- breaking ---------------------------------------------------------------------------------------------------


def _break_finished(told: Told, expectation: Expectation) -> None:
    for request in told.of(group=expectation.key)[: 1 if expectation.bound is None else None]:
        request.fail("http_500")


def _break_list(attribute: str) -> "Break":
    def clear(told: Told, expectation: Expectation) -> None:
        for request in told.of():
            setattr(request, attribute, [])

    return clear


def _break_failed(told: Told, expectation: Expectation) -> None:
    for request in told.of():
        request.failure, request.log_end = "", "finished"


def _break_left(told: Told, expectation: Expectation) -> None:
    for request in told.of():
        if expectation.key in ("", request.left_phase):
            request.left_at = None


def _break_requests(round_: str, **changes: object) -> "Break":
    def change(told: Told, expectation: Expectation) -> None:
        for number, request in enumerate(told.requests):
            is_meant = request.round == round_ and expectation.key in ("", request.group)
            if is_meant and request.left_at is None and not request.failure:
                told.requests[number] = replace(request, **changes)  # type: ignore[arg-type]

    return change


def _break_faults(**changes: object) -> "Break":
    def change(told: Told, expectation: Expectation) -> None:
        told.faults = [replace(fault, **changes) for fault in told.faults]  # type: ignore[arg-type]
        for request in told.requests:  # faults of links are seen at transfers
            if request.round == DISTURBED:
                request.sent_at += LATE
                if request.left_at is not None:
                    request.left_at += LATE

    return change


def _break_noticed_late(told: Told, expectation: Expectation) -> None:
    for request in told.of():
        request.left_noticed_s = LATE


def _break_told(**changes: object) -> "Break":
    def change(told: Told, expectation: Expectation) -> None:
        for name, value in changes.items():
            setattr(told, name, value)

    return change


def _break_restarts(told: Told, expectation: Expectation) -> None:
    told.faults = [replace(fault, comes_back=False) for fault in told.faults]


Break = Callable[[Told, Expectation], None]
BREAK: dict[str, Break] = {
    "finished": _break_finished,
    "failed": _break_failed,
    "rejected": _break_failed,
    "left": _break_left,
    "left_noticed_ms": _break_noticed_late,
    "retried": _break_list("retried"),
    "fallbacks": _break_list("fell_back"),
    "transfer_failures": _break_list("transfers_failed"),
    "migrated": _break_list("migrated"),
    "unfinished": _break_requests(DISTURBED, is_answered=False),
    "unaccounted": _break_requests(DISTURBED, failure="broken_stream"),
    "tokens_differ": _break_requests(DISTURBED, text="something else"),
    "position_errors": _break_requests(DISTURBED, has_gap=True),
    "undisturbed_failed": _break_requests(UNDISTURBED, failure="http_500", log_end="failed"),
    "after_failed": _break_requests(AFTER, failure="http_503", log_end="none"),
    "worst_ttft_added_s": _break_requests(DISTURBED, ttft_s=LATE),
    "worst_gap_added_s": _break_requests(DISTURBED, gap_s=LATE),
    "itl_p99_ratio": _break_requests(DISTURBED, gap_s=LATE),
    "after_ttft_added_s": _break_requests(AFTER, ttft_s=LATE),
    "faults": _break_told(missed=("faults[0] happened 0 of 1 times",)),
    "noticed_s": _break_faults(noticed_s=LATE),
    "recovered_s": _break_faults(recovered_s=LATE),
    "serves_again_s": _break_requests(DISTURBED, ttft_s=LATE),
    "restarts": _break_restarts,
    "given_up": _break_told(given_up="prefill-0"),
    "stranded_blocks": _break_told(held_blocks=3),
    "orphans": _break_told(orphans=("pid 1 (decode-0) is sleeping",)),
    "memory_growth_mib": _break_told(growth_mib=LATE),
}
