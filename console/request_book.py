"""All requests of a run: the live ones, the last that ended, and totals. A fold over request events."""

from collections.abc import Iterator
from typing import Final

from cluster.events import (
    FellBack,
    FirstToken,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    TokensDelivered,
    TransferCompleted,
)
from cluster.request_filter import RequestEvent
from console.fallback_ledger import FallbackLedger
from console.judgement import BURST, STEADY, ModeBook
from console.request_steps import STEPS
from console.request_view import CANCELLED, DECODE, DONE, FAILED, REJECTED, RequestView
from console.series import BucketSeries

KEPT_DONE: Final = 500


class RequestBook:
    """``live`` holds every request without an end; ``done`` at most KEPT_DONE, oldest first.

    Fed through a ``RequestFilter``: a request's events come after its arrival, and probes not at all.
    """

    def __init__(self) -> None:
        self.live: dict[str, RequestView] = {}
        self.done: dict[str, RequestView] = {}
        self.finished = 0
        self.failed = 0
        self.cancelled = 0
        self.rejected: dict[int, int] = {}
        self.retries = 0
        self.migrations = 0
        self.fallbacks: dict[str, int] = {}
        self.ledger = FallbackLedger()
        self.modes = ModeBook()
        self.transfers = 0
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.itl_ms = BucketSeries()
        self.ttft_ms = BucketSeries()
        self.kv_bytes = BucketSeries()

    def __iter__(self) -> Iterator[RequestView]:
        """Live ones, then ended ones, each oldest first."""
        yield from self.live.values()
        yield from self.done.values()

    def get(self, request_id: str) -> RequestView | None:
        return self.live.get(request_id) or self.done.get(request_id)

    @property
    def num_running(self) -> int:
        """Requests an engine works on: prefill, transfer or decode."""
        return sum(1 for request in self.live.values() if request.phase != "queued")

    @property
    def num_waiting(self) -> int:
        return sum(1 for request in self.live.values() if request.phase == "queued")

    def add_tokens(self, event: TokensDelivered) -> None:
        """``fold`` of the most frequent kind."""
        request = self.live.get(event.request_id) or self.done.get(event.request_id)
        if request is not None:
            gaps = request.add_tokens(event.first_position, event.token_at)
            self.itl_ms.extend(gaps)
            self.modes.add_gaps(request.mode, request.load, gaps)

    def fold(self, event: RequestEvent) -> None:
        """Take one event in, in whatever order the processes' events were merged."""
        if type(event) is TokensDelivered:
            self.add_tokens(event)
            return
        if type(event) is RequestRejected:
            self.rejected[event.status] = self.rejected.get(event.status, 0) + 1
            if event.request_id in self.live:
                self._end(self.live[event.request_id], event.at, REJECTED, f"{event.status} {event.reason}")
            return
        if type(event) is RequestArrived:
            self.live[event.request_id] = RequestView(event.request_id, event.at)
        request = self.get(event.request_id)
        if request is None:
            return  # ended long ago
        step = STEPS.get(type(event))
        if step is not None:
            step(request, event)
        else:
            self._fold_counted(event, request)

    def _fold_counted(self, event: RequestEvent, request: RequestView) -> None:
        """What changes more than the request itself."""
        match event:
            case RequestArrived():
                request.prompt_tokens, request.max_tokens = event.prompt_tokens, event.max_tokens
                request.label, request.client_id = event.label, event.client_id
                if event.label == STEADY:
                    request.load = self.modes.loads
                elif event.label == BURST:
                    self.modes.bursts.begin(event.request_id, event.at)
                request.tell(event.at, f"arrived: {event.prompt_tokens:,} prompt tokens ({event.label})")
            case FirstToken():
                request.first_token, request.first_token_at = event, event.at
                self.ttft_ms.add(event.at, event.ttft_ms)
                self.modes.add_ttft(request.mode, request.load, event.at, event.ttft_ms)
                self.modes.bursts.end(event.request_id, event.at)
                request.tell(event.at, "first token sent to the client")
            case TransferCompleted():
                request.attempt(event.attempt).transfer = event
                self._count_transfer(event)
                request.tell(event.at, "transfer acknowledged")
            case RequestFinished():
                request.out_tokens = max(request.out_tokens, event.output_tokens)
                request.e2el_ms, request.tpot_ms = event.e2el_ms, event.tpot_ms
                self._end(request, event.at, DONE, event.finish_reason)
            case FellBack():
                request.fallback = event.reason
                self.fallbacks[event.reason] = self.fallbacks.get(event.reason, 0) + 1
                self._charge(
                    request, event, "fallback", event.reason, event.prompt_tokens, worker_id=event.worker_id
                )
                request.tell(
                    event.at, f"FALLBACK on {event.worker_id}: {event.reason} {event.detail}".rstrip()
                )
            case RequestRetried():
                request.retries += 1
                self.retries += 1
                self._charge(request, event, "retry", event.reason, request.prompt_tokens)
                request.tell(
                    event.at, f"RETRY as attempt {event.attempt}: {event.reason} {event.detail}".rstrip()
                )
            case RequestMigrated():
                request.migrations += 1
                self.migrations += 1
                again = request.prompt_tokens + event.delivered_tokens
                self._charge(request, event, "migration", f"{event.from_worker} lost", again)
                request.tell(
                    event.at, f"MIGRATED from {event.from_worker} after {event.delivered_tokens} tokens"
                )
            case RequestFailed():
                self._end(request, event.at, FAILED, event.reason)
            case RequestCancelled():
                self._end(request, event.at, CANCELLED, f"in {event.phase}")

    def router_lost(self, at: float) -> None:
        """The router exited: the streams of all live requests broke and nobody will report their end."""
        for request in list(self.live.values()):
            self._end(request, at, FAILED, "the router exited")

    def _charge(
        self,
        request: RequestView,
        event: FellBack | RequestRetried | RequestMigrated,
        kind: str,
        cause: str,
        tokens: int,
        worker_id: str = "",
    ) -> None:
        """Put what a failure cost into the ledger; what was waited for in vain began with the attempt that failed."""
        failed = request.attempts.get(event.attempt - 1)
        began_at = failed.at if failed is not None and failed.at is not None else event.at
        if kind == "migration" and request.last_token_at is not None:
            began_at = request.last_token_at  # what was delivered until then was not in vain
        beside = sum(
            1
            for other in self.live.values()
            if worker_id and other is not request and other.phase == DECODE
            and other.latest is not None and other.latest.decode_worker == worker_id
        )  # fmt: skip
        self.ledger.add(
            kind, cause, at=event.at, request_id=request.request_id, tokens=tokens, lost_s=event.at - began_at,
            worker_id=worker_id, beside=beside,
        )  # fmt: skip

    def _count_transfer(self, event: TransferCompleted) -> None:
        self.transfers += 1
        self.raw_bytes += event.raw_bytes
        self.wire_bytes += event.wire_bytes
        self.modes.add_transfer(event)
        self.kv_bytes.spread(event.at - event.duration_s, event.at, float(event.wire_bytes))

    def _end(self, request: RequestView, at: float, end: str, detail: str) -> None:
        if request.end:
            return
        request.close(at, end, detail)
        self.modes.bursts.end(request.request_id, at)
        request.tell(at, f"{end}: {detail}" if detail else end)
        if end == DONE:
            self.finished += 1
        elif end == FAILED:
            self.failed += 1
        elif end == CANCELLED:
            self.cancelled += 1
        del self.live[request.request_id]
        self.done[request.request_id] = request
        if len(self.done) > KEPT_DONE:
            del self.done[next(iter(self.done))]
