"""The requests a router has not answered fully yet, and the ways one leaves. Part of ``router_state``; pure.

Everything a stimulus leads to is collected in ``out``, in order; ``now`` is the stimulus's time.
"""

from collections import deque
from typing import Final

from cluster.control import AbortRequest, AbsentWorker
from cluster.dispatch import withdraw
from cluster.events import Event, RequestFailed, RequestFinished, TokensDelivered
from cluster.routed_request import RoutedRequest
from cluster.router_messages import Emit, Fail, Instruction, Send
from cluster.worker_views import WorkerViews

SOURCE: Final = "router"


class OpenRequests:
    """``queue``: ids of those that wait for a worker, first come first; ``workers``: what each was promised."""

    def __init__(self) -> None:
        self.requests: dict[str, RoutedRequest] = {}
        self.queue: deque[str] = deque()
        self.workers = WorkerViews()
        self.absent: dict[str, AbsentWorker] | None = None  # None: nothing was said of the workers yet
        self.out: list[Instruction] = []
        self.now = 0.0

    def begin(self, now: float) -> None:
        """A new stimulus."""
        self.now = now
        self.out = []

    def emit(self, event: Event) -> None:
        self.out.append(Emit(event))

    def finish(self, request: RoutedRequest) -> None:
        """Its last token is with the client."""
        timeline = request.timeline
        num_tokens = request.num_written
        span_s = timeline.last_written_at - timeline.first_written_at
        self.log_tokens(request)
        self.emit(
            RequestFinished(
                at=self.now,
                source=SOURCE,
                request_id=request.request_id,
                finish_reason=request.finish_reason,
                output_tokens=num_tokens,
                e2el_ms=(timeline.last_written_at - timeline.arrived_at) * 1e3,
                tpot_ms=span_s / (num_tokens - 1) * 1e3 if num_tokens > 1 else None,
            )
        )
        self.forget(request)

    def fail(self, request: RoutedRequest, status: int, reason: str) -> None:
        """It is over without its end; the client and the log are told why."""
        self.end_attempt(request, reason)
        self.log_tokens(request)
        self.emit(
            RequestFailed(
                at=self.now, source=SOURCE, request_id=request.request_id, reason=reason, status=status
            )
        )
        self.out.append(Fail(request.request_id, status, reason, 1 if status == 503 else 0))
        self.forget(request)

    def forget(self, request: RoutedRequest) -> None:
        """Nothing about it is left here."""
        self.log_tokens(request)
        withdraw(request, self.workers)
        del self.requests[request.request_id]
        if request.request_id in self.queue:
            self.queue.remove(request.request_id)

    def end_attempt(self, request: RoutedRequest, reason: str) -> None:
        """Tell both workers to drop the current attempt, and take its promises back."""
        for worker_id in dict.fromkeys((request.prefill_worker, request.decode_worker)):
            view = self.workers.get(worker_id)
            if view is not None and view.connected:
                abort = AbortRequest(request_id=request.request_id, attempt=request.attempt, reason=reason)
                self.out.append(Send(worker_id, abort))
        withdraw(request, self.workers)

    def log_tokens(self, request: RoutedRequest) -> None:
        """Put the times of the tokens written since the last call into the log."""
        if request.unlogged_token_at:
            self.emit(
                TokensDelivered(
                    at=self.now,
                    source=SOURCE,
                    request_id=request.request_id,
                    first_position=request.num_written - len(request.unlogged_token_at),
                    token_at=tuple(request.unlogged_token_at),
                )
            )
            request.unlogged_token_at = []
