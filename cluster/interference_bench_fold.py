"""From the log of one round to its figures: what the steady streams felt, with a burst's prompt waiting and without.

A burst lasts from the arrival of one of its prompts at the router to that prompt's first token. A gap between two
tokens of a stream is in a burst when any of it lies in one. Definitions are in docs/metrics.md. Pure.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    NoteAdded,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RouterStats,
    TokensDelivered,
    TransferCompleted,
    WorkerExited,
    WorkerStats,
)
from cluster.metrics import RequestLatency, Slos

ALONE: Final = "streams alone"
BURSTS: Final = "streams beside bursts"
STEADY, BURST = "steady", "burst"
STALL_MS: Final = 100.0
"""A gap longer than this counts as a stall."""

_ROUTER: Final = "router"


def begin_note(phase: str) -> str:
    """The note in the run's log that begins a phase; ``end_note`` ends it."""
    return f"bench interference: {phase}: begin"


def end_note(phase: str) -> str:
    return f"bench interference: {phase}: end"


class IncompleteRound(Exception):
    """A round's log does not tell what was to be measured; the message is one line."""


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds on the run's clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def has(self, at: float) -> bool:
        return self.begin < at <= self.end

    def overlap(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(begin, self.begin))


@dataclass(slots=True)
class PhaseFigures:
    """One phase of a round. Gaps (ms) and TTFT (ms) are raw; rates are per second of the phase."""

    seconds: float
    burst_seconds: float = 0.0  # of these, a burst's prompt waited
    bursts: int = 0  # prompts of bursts that got their first token
    itl_ms: list[float] = field(default_factory=list)  # of the streams, outside bursts
    burst_itl_ms: list[float] = field(default_factory=list)  # in bursts
    ttft_ms: list[float] = field(default_factory=list)  # of the streams' prompts, outside
    burst_ttft_ms: list[float] = field(default_factory=list)  # that waited in a burst
    prompt_ttft_ms: list[float] = field(default_factory=list)  # of the bursts' own prompts
    unanswered: int = 0  # streams' prompts without a token at the phase's end
    stream_tokens: int = 0
    burst_stream_tokens: int = 0  # of these, in bursts
    tokens: int = 0  # of all answers and of all prompts that were computed
    finished: Counter[str] = field(default_factory=Counter)  # by label
    good: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    fallbacks: int = 0
    transfers: int = 0
    kv_bytes: int = 0
    kv_wire_bytes: int = 0
    cpu: dict[str, float] = field(default_factory=dict)  # process -> cores it used; not sampled: absent
    idle_share: float = 0.0  # of the streams' time in which they had no request open

    @property
    def stalled_share(self) -> float | None:
        """Of the streams' time in gaps in bursts, how much was in gaps that are stalls."""
        total = sum(self.burst_itl_ms)
        return sum(gap for gap in self.burst_itl_ms if gap > STALL_MS) / total if total else None


@dataclass(slots=True)
class _Request:
    label: str
    arrived_at: float
    prompt_tokens: int
    token_at: list[float] = field(default_factory=list)
    ttft_ms: float | None = None
    first_at: float = math.inf
    ended_at: float = math.inf
    finished: RequestFinished | None = None

    @property
    def waits(self) -> tuple[float, float]:
        """From its arrival to its first token, or to its end where that never came."""
        return self.arrived_at, min(self.first_at, self.ended_at)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        return list(zip(self.token_at, self.token_at[1:], strict=False))


class RoundFold:
    """Takes in a round's log, event by event, then tells each phase's figures."""

    def __init__(self, slos: Slos, streams: int) -> None:
        self._slos = slos
        self._streams = streams
        self._notes: dict[str, float] = {}
        self._requests: dict[str, _Request] = {}
        self._failures: list[tuple[float, str]] = []
        self._fallbacks: list[tuple[float, str]] = []
        self._transfers: list[TransferCompleted] = []
        self._used: dict[str, list[tuple[float, float, float]]] = {}  # process -> from, to, cores
        self._sampled_at: dict[str, float] = {}
        self._exits: list[WorkerExited] = []

    def fold(self, event: Event) -> None:
        match event:
            case NoteAdded():
                self._notes.setdefault(event.text, event.at)
            case RequestArrived():
                if event.label in (STEADY, BURST):
                    self._requests[event.request_id] = _Request(event.label, event.at, event.prompt_tokens)
            case TransferCompleted():
                self._transfers.append(event)
            case FellBack():
                self._fallbacks.append((event.at, event.request_id))
            case WorkerStats():
                self._sample(event.worker_id, event.at, event.cpu_percent)
            case RouterStats():
                self._sample(_ROUTER, event.at, event.cpu_percent)
            case WorkerExited() if event.cause != "stop":
                self._exits.append(event)
            case RequestRejected() if event.request_id not in self._requests:
                self._failures.append((event.at, event.reason))  # before it was said to have arrived
            case _:
                request = self._requests.get(getattr(event, "request_id", ""))
                if request is not None:
                    self._fold_own(request, event)

    def _fold_own(self, request: _Request, event: Event) -> None:
        match event:
            case TokensDelivered():
                request.token_at.extend(event.token_at)
            case FirstToken():
                request.first_at, request.ttft_ms = event.at, event.ttft_ms
            case RequestFinished():
                request.ended_at, request.finished = event.at, event
            case RequestCancelled():  # the load was ended under it
                request.ended_at = event.at
            case RequestFailed() | RequestRejected():
                request.ended_at = event.at
                self._failures.append((event.at, event.reason))
            case _:
                pass

    def _sample(self, process: str, at: float, cpu_percent: float) -> None:
        """Each sample is the mean since the one before."""
        since = self._sampled_at.get(process)
        if since is not None:
            self._used.setdefault(process, []).append((since, at, cpu_percent / 100.0))
        self._sampled_at[process] = at

    def figures(self, phase: str) -> PhaseFigures:
        """Raises IncompleteRound when the phase is not in the log, or a process died."""
        if self._exits:
            raise IncompleteRound(
                f"{self._exits[0].worker_id} ended while it was measured: {self._exits[0].cause}"
            )
        begin, end = self._notes.get(begin_note(phase)), self._notes.get(end_note(phase))
        if begin is None or end is None or end <= begin:
            raise IncompleteRound(f"the log does not tell from when to when {phase!r} lasted")
        span = Span(begin, end)
        windows = merged(each.waits for each in self._requests.values() if each.label == BURST)
        found = PhaseFigures(span.seconds, sum(span.overlap(*window) for window in windows))
        for request in self._requests.values():
            self._add_request(found, request, span, windows)
        self._add_facts(found, span)
        return found

    def _add_request(
        self, found: PhaseFigures, request: _Request, span: Span, windows: Sequence[tuple[float, float]]
    ) -> None:
        delivered = [at for at in request.token_at if span.has(at)]
        found.tokens += len(delivered)
        if span.has(request.first_at):
            found.tokens += request.prompt_tokens
            assert request.ttft_ms is not None
            if request.label == BURST:
                found.bursts += 1
                found.prompt_ttft_ms.append(request.ttft_ms)
            elif touches(windows, *request.waits):
                found.burst_ttft_ms.append(request.ttft_ms)
            else:
                found.ttft_ms.append(request.ttft_ms)
        if request.finished is not None and span.has(request.ended_at):
            found.finished[request.label] += 1
            found.good[request.label] += self._slos.are_met_by(_latency(request, request.finished))
        if request.label != STEADY:
            return
        found.stream_tokens += len(delivered)
        found.burst_stream_tokens += sum(touches(windows, at, at) for at in delivered)
        found.unanswered += span.has(request.arrived_at) and request.waits[1] > span.end
        for earlier, later in request.gaps:
            if span.has(later):
                gaps = found.burst_itl_ms if touches(windows, earlier, later) else found.itl_ms
                gaps.append((later - earlier) * 1e3)

    def _add_facts(self, found: PhaseFigures, span: Span) -> None:
        for transfer in self._transfers:
            if span.has(transfer.at) and transfer.request_id in self._requests:
                found.transfers += 1
                found.kv_bytes += transfer.raw_bytes
                found.kv_wire_bytes += transfer.wire_bytes
        found.failed.update(reason for at, reason in self._failures if span.has(at))
        found.fallbacks = sum(
            span.has(at) and request_id in self._requests for at, request_id in self._fallbacks
        )
        for process, samples in self._used.items():
            covered = [(span.overlap(since, at), cores) for since, at, cores in samples]
            if seconds := sum(seconds for seconds, _ in covered):
                found.cpu[process] = sum(seconds * cores for seconds, cores in covered) / seconds
        open_s = sum(
            span.overlap(each.arrived_at, each.ended_at)
            for each in self._requests.values()
            if each.label == STEADY
        )
        found.idle_share = max(0.0, 1.0 - open_s / (self._streams * span.seconds))


def fold_round(events: Iterable[Event], slos: Slos, streams: int) -> RoundFold:
    fold = RoundFold(slos, streams)
    for event in events:
        fold.fold(event)
    return fold


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def touches(windows: Sequence[tuple[float, float]], begin: float, end: float) -> bool:
    """Any of the time from ``begin`` to ``end`` lies in one of ``windows``, which are in order and apart."""
    index = bisect.bisect_left(windows, begin, key=lambda window: window[1])
    return index < len(windows) and windows[index][0] <= end


def _latency(request: _Request, finished: RequestFinished) -> RequestLatency:
    return RequestLatency(
        ttft_ms=math.inf if request.ttft_ms is None else request.ttft_ms,
        tpot_ms=finished.tpot_ms or 0.0,
        e2el_ms=finished.e2el_ms,
        worst_itl_ms=max(((later - earlier) * 1e3 for earlier, later in request.gaps), default=0.0),
    )
