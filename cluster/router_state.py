"""Every decision of the router: stimuli and ``now`` in, instructions out. No sockets, no clock, no tasks.

Life of a request here (``Phase``):

    submitted -> QUEUED -> PREFILL -> TRANSFER -> DECODE -> finished
                   ^          |          |          |
                   +----------+----------+----------+   attempt + 1 after a death or a failed handoff

This file takes requests in and tokens out; ``attempts`` holds the failure rules, ``dispatch`` and ``selection`` the
choice of workers, ``open_requests`` the ways a request ends.
"""

import math
from collections import deque
from typing import Final

from cluster.attempts import Attempts
from cluster.control import DecodeAdopted, HandoffFailed, PrefillDone, RequestError, TokenProduced, Tokens
from cluster.dispatch import RouterLimits, hopeless, withdraw
from cluster.events import (
    CodecChanged,
    HandoffChanged,
    ModeChanged,
    RequestArrived,
    RequestCancelled,
    RequestRejected,
    WorkerDrained,
)
from cluster.handoff_events import measured_event
from cluster.handoff_forecast import HandoffForecast, Prompt
from cluster.open_requests import SOURCE, OpenRequests
from cluster.routed_request import Phase, RoutedRequest, Timeline
from cluster.router_messages import (
    ClientLeft,
    CodecSet,
    Deliver,
    Fail,
    HandoffSet,
    Instruction,
    LinkSet,
    ModeSet,
    RequestSubmitted,
    Stimulus,
    StopMatched,
    Ticked,
    TokensWritten,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
    WorkerSaid,
    WorkersListed,
)
from cluster.selection import WorkerView
from cluster.worker_views import WorkerViews

TOKEN_LOG_INTERVAL_S: Final = 0.2
MAX_RETRY_AFTER_S: Final = 60


class RouterState:
    """See the module's docstring. ``handle`` is the only way in."""

    def __init__(self, limits: RouterLimits, mode: str, codec: str, forecast: HandoffForecast) -> None:
        self.mode = mode
        self.codec = codec
        self.handoff = limits.handoff
        self._forecast = forecast
        self._limits = limits
        self._open = OpenRequests()
        self._attempts = Attempts(limits, self._open, forecast)

    @property
    def requests(self) -> dict[str, RoutedRequest]:
        return self._open.requests

    @property
    def workers(self) -> WorkerViews:
        return self._open.workers

    @property
    def queue(self) -> deque[str]:
        return self._open.queue

    def handle(self, stimulus: Stimulus, now: float) -> list[Instruction]:
        """Take one fact; return what to do about it, in order."""
        self._open.begin(now)
        match stimulus:
            case RequestSubmitted():
                self._submit(stimulus)
            case ClientLeft(request_id, reason):
                self._cancel(request_id, reason)
            case StopMatched(request_id):
                self._stop(request_id)
            case TokensWritten(request_id, count):
                self._written(request_id, count)
            case WorkersListed():
                self._list_workers(stimulus)
            case WorkerConnected(worker_id):
                view = self.workers.get(worker_id)
                if view is not None:
                    view.connected = True
                    self.workers.changed(view)
            case WorkerLost(worker_id, detail):
                self._attempts.worker_lost(worker_id, detail)
                self._forecast.forget(worker_id)
            case WorkerSaid(worker_id, message):
                self._said(worker_id, message)
            case ModeSet(mode, cause):
                self.mode = mode
                self._open.emit(ModeChanged(at=now, source=SOURCE, mode=mode, cause=cause))
            case CodecSet(codec, cause):
                self.codec = codec
                self._open.emit(CodecChanged(at=now, source=SOURCE, codec=codec, cause=cause))
            case HandoffSet(handoff, cause):
                self.handoff = handoff
                self._open.emit(HandoffChanged(at=now, source=SOURCE, handoff=handoff, cause=cause))
            case LinkSet(bytes_per_s):
                self._forecast.link_set(bytes_per_s)
            case WorkerReported(load):
                self._forecast.reported(load)
            case Ticked():
                self._tick()
        self._attempts.dispatch_queue(self.mode, self.codec, self.handoff)
        self._tell_drained()
        return self._open.out

    # --- clients ----------------------------------------------------------------------------------------------

    def _submit(self, submitted: RequestSubmitted) -> None:
        now, max_queue = self._open.now, self._limits.max_queue
        num_prompt, max_tokens = len(submitted.prompt_token_ids), submitted.sampling.max_tokens
        if len(self.queue) >= max_queue > 0:
            reason = f"the queue is full ({max_queue} requests wait)"
            self._reject(submitted, 429, reason, self._queue_wait_s())
            return
        request = RoutedRequest(
            request_id=submitted.request_id,
            prompt_token_ids=submitted.prompt_token_ids,
            sampling=submitted.sampling,
            timeline=Timeline(arrived_at=submitted.arrived_at, submitted_at=now),
            label=submitted.label,
            pinned_prefill=submitted.pinned_prefill,
            pinned_decode=submitted.pinned_decode,
        )
        absent = self._open.absent
        problem = hopeless(request, self.workers, absent, self.mode) if absent is not None else None
        if problem is not None:
            status, reason = problem
            self._reject(submitted, status, reason, 1 if status == 503 else 0)
            return
        self._open.emit(
            RequestArrived(
                at=submitted.arrived_at,
                source=SOURCE,
                request_id=submitted.request_id,
                prompt_tokens=num_prompt,
                max_tokens=max_tokens,
                label=submitted.label,
                client_id=submitted.client_id,
            )
        )
        self.requests[submitted.request_id] = request
        self.queue.append(submitted.request_id)

    def _queue_wait_s(self) -> int:
        """What a request would wait in the queue by now, in whole seconds: as long as its first one has."""
        first = self.requests[self.queue[0]]
        waited_s = self._open.now - first.timeline.submitted_at
        return min(max(1, math.ceil(waited_s)), MAX_RETRY_AFTER_S)

    def _reject(self, submitted: RequestSubmitted, status: int, reason: str, retry_after_s: int) -> None:
        self._open.emit(
            RequestRejected(
                at=self._open.now,
                source=SOURCE,
                reason=reason,
                status=status,
                request_id=submitted.request_id,
            )
        )
        self._open.out.append(Fail(submitted.request_id, status, reason, retry_after_s))

    def _cancel(self, request_id: str, reason: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        self._open.end_attempt(request, reason)
        self._open.log_tokens(request)
        self._open.emit(
            RequestCancelled(
                at=self._open.now,
                source=SOURCE,
                request_id=request_id,
                phase=str(request.phase),
                reason=reason,
            )
        )
        self._open.forget(request)

    def _stop(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._open.end_attempt(request, "stop string")
            request.finish_reason = "stop"
            self._open.finish(request)

    # --- tokens -----------------------------------------------------------------------------------------------

    def _take_token(self, token: TokenProduced) -> None:
        request = self.requests.get(token.request_id)
        if request is None or token.attempt != request.attempt or request.finish_reason:
            return
        if request.phase is Phase.QUEUED or token.position != len(request.output_token_ids):
            return  # delivered before a migration, or from a worker that lost count: never twice, never a gap
        if not request.output_token_ids:
            request.timeline.first_token_at = token.at
        request.phase = Phase.DECODE
        request.output_token_ids.append(token.token_id)
        request.fruitless_attempts = 0
        if token.finish_reason:
            request.finish_reason = token.finish_reason
            withdraw(request, self.workers)
        self._open.out.append(Deliver(request.request_id, token.token_id, token.finish_reason))

    def _written(self, request_id: str, count: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        now, timeline = self._open.now, request.timeline
        if request.num_written == 0:
            timeline.first_written_at = now
            self._open.emit(timeline.first_token(request_id, now, SOURCE))
            self._measure_handoff(request)
        request.num_written += count
        timeline.last_written_at = now
        request.unlogged_token_at.extend([now] * count)
        if request.finish_reason and request.num_written == len(request.output_token_ids):
            self._open.finish(request)

    def _measure_handoff(self, request: RoutedRequest) -> None:
        """Its first token is out: learn from what the attempt took, beside what was foreseen."""
        if request.estimate is None or not request.timeline.prefill_done_at:
            return
        if request.prefill_worker:
            tail_s = request.timeline.first_token_at - request.timeline.prefill_done_at
            self._forecast.handed_off(request.estimate, request.estimated_bytes, tail_s)
        if request.is_weighed:
            self._open.emit(measured_event(request, request.estimate, self._open.now, SOURCE))

    # --- workers ----------------------------------------------------------------------------------------------

    def _list_workers(self, listed: WorkersListed) -> None:
        addresses = {address.worker_id: address for address in listed.workers}
        self._open.absent = {worker.worker_id: worker for worker in listed.absent}
        for worker_id, view in list(self.workers.items()):
            new = addresses.get(worker_id)
            if new is None or not new.is_place_of(view.address):
                self._attempts.worker_lost(worker_id, "no longer listed as ready")
                self._forecast.forget(worker_id)
                del self.workers[worker_id]
        for worker_id, address in addresses.items():
            view = self.workers.setdefault(worker_id, WorkerView(address))
            view.address = address
            view.set_draining(worker_id in listed.draining, self._open.now)
        self.workers.listed()

    def _tell_drained(self) -> None:
        """Once per drain, when nothing is left on the worker."""
        for view in self.workers.draining:
            worker_id = view.worker_id
            if view.draining_since is None or view.is_drained:
                continue
            if not any(request.is_on(worker_id) for request in self.requests.values()):
                view.is_drained = True
                after_s = self._open.now - view.draining_since
                self._open.emit(
                    WorkerDrained(at=self._open.now, source=SOURCE, worker_id=worker_id, after_s=after_s)
                )

    def _said(
        self, worker_id: str, message: Tokens | PrefillDone | DecodeAdopted | HandoffFailed | RequestError
    ) -> None:
        if isinstance(message, Tokens):
            for token in message.tokens:
                self._take_token(token)
            return
        request = self.requests.get(message.request_id)
        if request is None or message.attempt != request.attempt or request.phase is Phase.QUEUED:
            return  # an old attempt's
        timeline = request.timeline
        if isinstance(message, PrefillDone):
            timeline.prefill_started_at = message.started_at
            timeline.prefill_done_at = message.done_at
            if message.compute_s > 0:
                num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
                self._forecast.prefilled(worker_id, num_tokens, message.compute_s)
            self._holds(worker_id, request)
            view = self.workers.get(request.prefill_worker or request.decode_worker)
            if view is not None:
                if next(iter(view.queued_prompt_tokens), "") == request.request_id:
                    view.prefilling_since = self._open.now  # the next one's turn
                view.queued_prompt_tokens.pop(request.request_id, None)
                self.workers.changed(view)
            if request.phase is Phase.PREFILL:
                request.phase = Phase.TRANSFER if request.prefill_worker else Phase.DECODE
        elif isinstance(message, DecodeAdopted):
            timeline.prefill_started_at = message.prefill_started_at
            timeline.prefill_done_at = message.prefill_done_at
            timeline.verified_at = message.verified_at
            timeline.admitted_at = message.admitted_at
            if self._forecast.is_exact(request.codec):
                self._holds(worker_id, request)
            request.phase = Phase.DECODE
        elif isinstance(message, HandoffFailed):
            self._attempts.handoff_failed(request, worker_id, message)
        else:
            self._open.fail(request, 500, f"{worker_id}: {message.reason}")

    def _holds(self, worker_id: str, request: RoutedRequest) -> None:
        view = self.workers.get(worker_id)
        if view is not None and request.chain:
            self._forecast.holds(view, Prompt(request.num_prompt_tokens, request.codec, request.chain))

    # --- time -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._open.now
        for request in list(self.requests.values()):
            self._attempts.decide_late(request)
            waited_s = now - request.timeline.submitted_at
            if request.phase is Phase.QUEUED and waited_s > self._limits.queue_timeout_s:
                self._open.fail(request, 503, f"no worker could take the request for {waited_s:.0f} s")
            elif request.unlogged_token_at and now - request.unlogged_token_at[0] >= TOKEN_LOG_INTERVAL_S:
                self._open.log_tokens(request)
