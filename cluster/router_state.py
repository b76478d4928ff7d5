"""Every decision of the router: stimuli and ``now`` in, instructions out. No sockets, no clock, no tasks.

Life of a request here (``Phase``):

    submitted -> QUEUED -> PREFILL -> TRANSFER -> DECODE -> finished
                   ^          |          |          |
                   +----------+----------+----------+   attempt + 1 after a death or a failed handoff

This file takes requests in and tokens out; ``attempts`` holds the failure rules, ``dispatch`` and ``selection`` the
choice of workers, ``open_requests`` the ways a request ends.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from cluster.attempts import Attempts
from cluster.control import DecodeAdopted, HandoffFailed, PrefillDone, RequestError, TokenProduced, Tokens
from cluster.dispatch import RouterLimits, withdraw
from cluster.events import CodecChanged, ModeChanged, RequestArrived, RequestCancelled, RequestRejected
from cluster.open_requests import SOURCE, OpenRequests
from cluster.routed_request import Phase, RoutedRequest, Timeline
from cluster.router_messages import (
    ClientLeft,
    CodecSet,
    Deliver,
    Fail,
    Instruction,
    ModeSet,
    RequestSubmitted,
    Stimulus,
    StopMatched,
    Ticked,
    TokensWritten,
    WorkerConnected,
    WorkerLost,
    WorkerSaid,
    WorkersListed,
)
from cluster.selection import WorkerView, blocks_needed

TOKEN_LOG_INTERVAL_S: Final = 0.2


class RouterState:
    """See the module's docstring. ``handle`` is the only way in."""

    def __init__(
        self, limits: RouterLimits, mode: str, codec: str, worth_transferring: Callable[[int], bool]
    ) -> None:
        self.mode = mode
        self.codec = codec
        self._limits = limits
        self._open = OpenRequests()
        self._attempts = Attempts(limits, self._open, worth_transferring)

    @property
    def requests(self) -> dict[str, RoutedRequest]:
        return self._open.requests

    @property
    def workers(self) -> dict[str, WorkerView]:
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
            case ClientLeft(request_id):
                self._cancel(request_id)
            case StopMatched(request_id):
                self._stop(request_id)
            case TokensWritten(request_id, count):
                self._written(request_id, count)
            case WorkersListed(workers):
                self._list_workers({address.worker_id: WorkerView(address) for address in workers})
            case WorkerConnected(worker_id):
                if worker_id in self.workers:
                    self.workers[worker_id].connected = True
            case WorkerLost(worker_id, detail):
                self._attempts.worker_lost(worker_id, detail)
            case WorkerSaid(worker_id, message):
                self._said(worker_id, message)
            case ModeSet(mode, cause):
                self.mode = mode
                self._open.emit(ModeChanged(at=now, source=SOURCE, mode=mode, cause=cause))
            case CodecSet(codec, cause):
                self.codec = codec
                self._open.emit(CodecChanged(at=now, source=SOURCE, codec=codec, cause=cause))
            case Ticked():
                self._tick()
        self._attempts.dispatch_queue(self.mode, self.codec)
        return self._open.out

    # --- clients ----------------------------------------------------------------------------------------------

    def _submit(self, submitted: RequestSubmitted) -> None:
        now, max_queue = self._open.now, self._limits.max_queue
        num_prompt, max_tokens = len(submitted.prompt_token_ids), submitted.sampling.max_tokens
        if len(self.queue) >= max_queue > 0:
            self._reject(submitted, 429, f"the queue is full ({max_queue} requests wait)", 1)
            return
        addresses = [worker.address for worker in self.workers.values()]
        if addresses and all(blocks_needed(num_prompt, max_tokens, a) > a.total_blocks for a in addresses):
            largest = max(address.total_blocks * address.block_size for address in addresses)
            reason = (
                f"prompt and max_tokens need {num_prompt + max_tokens} tokens of KV; a worker holds {largest}"
            )
            self._reject(submitted, 400, reason, 0)
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
        self.requests[submitted.request_id] = RoutedRequest(
            request_id=submitted.request_id,
            prompt_token_ids=submitted.prompt_token_ids,
            sampling=submitted.sampling,
            timeline=Timeline(arrived_at=submitted.arrived_at, submitted_at=now),
            label=submitted.label,
            pinned_prefill=submitted.pinned_prefill,
            pinned_decode=submitted.pinned_decode,
        )
        self.queue.append(submitted.request_id)

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

    def _cancel(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        self._open.end_attempt(request, "client gone")
        self._open.log_tokens(request)
        self._open.emit(
            RequestCancelled(
                at=self._open.now, source=SOURCE, request_id=request_id, phase=str(request.phase)
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
        request.num_written += count
        timeline.last_written_at = now
        request.unlogged_token_at.extend([now] * count)
        if request.finish_reason and request.num_written == len(request.output_token_ids):
            self._open.finish(request)

    # --- workers ----------------------------------------------------------------------------------------------

    def _list_workers(self, listed: dict[str, WorkerView]) -> None:
        for worker_id, view in list(self.workers.items()):
            new = listed.get(worker_id)
            if new is None or new.address != view.address:
                self._attempts.worker_lost(worker_id, "no longer listed as ready")
                del self.workers[worker_id]
        for worker_id, view in listed.items():
            self.workers.setdefault(worker_id, view)

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
            for view in self.workers.values():
                view.queued_prompt_tokens.pop(request.request_id, None)
            if request.phase is Phase.PREFILL:
                request.phase = Phase.TRANSFER if request.prefill_worker else Phase.DECODE
        elif isinstance(message, DecodeAdopted):
            timeline.prefill_started_at = message.prefill_started_at
            timeline.prefill_done_at = message.prefill_done_at
            timeline.verified_at = message.verified_at
            timeline.admitted_at = message.admitted_at
            request.phase = Phase.DECODE
        elif isinstance(message, HandoffFailed):
            self._attempts.handoff_failed(request, worker_id, message)
        else:
            self._open.fail(request, 500, f"{worker_id}: {message.reason}")

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
