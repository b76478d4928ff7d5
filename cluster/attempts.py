"""When a request gets its next attempt, and what a failed one leads to. Part of ``router_state``; pure.

Failure rules, each leaving an event with its reason:

- prefill worker lost: another prefill worker, else local prefill on the same decode worker;
- handoff failed: local prefill on the same decode worker;
- decode worker full: another decode worker, else wait in the queue;
- decode worker lost: another decode worker goes on after the tokens already delivered;
- ``fallback off``: the first two reach the client as an error instead.

A KV stream that ended may be the first sign of a process's death, so that one is acted on only after
``DEATH_NOTICE_S``, when the router would know.
"""

from collections import Counter
from typing import Final

from cluster.control import HandoffFailed
from cluster.dispatch import (
    AttemptPlan,
    RouterLimits,
    hopeless,
    is_prefill_expected,
    plan_attempt,
    promise,
    start_messages,
)
from cluster.events import FellBack, RequestDispatched, RequestMigrated, RequestRetried
from cluster.handoff_choice import Estimate
from cluster.handoff_events import chosen_event
from cluster.handoff_forecast import HandoffForecast, Prompt
from cluster.open_requests import SOURCE, OpenRequests
from cluster.prefix_memory import chain_of
from cluster.routed_request import Phase, RoutedRequest
from cluster.selection import pick_prefill

DEATH_NOTICE_S: Final = 0.3
RETRY_FULL_AFTER_S: Final = 0.05
STREAM_ENDED: Final = ("peer_closed", "truncated")
"""Failures that a process's death looks like from the other end of its connection."""


class Attempts:
    """``forecast`` weighs where a prompt is computed (``handoff = "auto"``)."""

    def __init__(self, limits: RouterLimits, open_requests: OpenRequests, forecast: HandoffForecast) -> None:
        self._limits = limits
        self._open = open_requests
        self._forecast = forecast

    # --- dispatching ------------------------------------------------------------------------------------------

    def dispatch_queue(self, mode: str, codec: str, handoff: str) -> None:
        """First come, first served: a request that no worker has room for holds those behind it."""
        while self._open.queue:
            request = self._open.requests[self._open.queue[0]]
            if request.excluded_decode and self._open.now < request.decide_at:
                return
            if request.fruitless_attempts >= self._limits.max_attempts:
                attempts = f"{request.fruitless_attempts} attempts without a token"
                self._open.fail(request, 500, f"gave up after {attempts}")
            elif not self._dispatch(request, mode, codec, handoff):
                return

    def _dispatch(self, request: RoutedRequest, mode: str, codec: str, handoff: str) -> bool:
        """Start the next attempt; False when it has to wait. The request may also fail here."""
        workers, now = self._open.workers, self._open.now
        if handoff == "auto" and self._limits.prefix_caching and not request.chain and workers:
            block_size = next(iter(workers.values())).address.block_size
            request.chain = chain_of(request.prompt_token_ids, block_size)
        prompt = Prompt(request.num_prompt_tokens, request.codec or codec, request.chain)
        streams: Counter[str] = Counter()
        if self._forecast.can_foresee:
            streams = self._streams()
            self._settle_links()
        plan = plan_attempt(
            request,
            workers,
            self._limits,
            mode,
            handoff,
            lambda prefill, decode: self._forecast.choose(
                prompt, workers[prefill], workers[decode], streams, now
            ),
        )
        absent = self._open.absent
        if plan is None:
            problem = hopeless(request, workers, absent, mode) if absent is not None else None
            if problem is not None:
                self._open.fail(request, *problem)
            return problem is not None
        if plan.impossible and (absent is None or is_prefill_expected(workers, absent)):
            return False
        if plan.impossible:
            self._open.fail(request, 503, plan.impossible)
            return True
        self._open.queue.remove(request.request_id)
        self._foresee(request, plan, prompt, streams)
        request.begin_attempt(plan.mode, request.codec or codec, plan.prefill_worker, plan.decode.worker_id)
        request.dispatched_at = now
        promise(request, workers, now)
        self._open.emit(
            RequestDispatched(
                at=self._open.now,
                source=SOURCE,
                request_id=request.request_id,
                attempt=request.attempt,
                mode=request.mode,
                codec=request.codec if plan.prefill_worker else "",
                decode_worker=plan.decode.worker_id,
                decode_reason=plan.decode.reason,
                prefill_worker=plan.prefill_worker,
                prefill_reason=plan.prefill_reason,
            )
        )
        if plan.choice is not None:
            decode = workers[plan.decode.worker_id]
            link = self._forecast.link(workers[plan.weighed_worker], decode.address)
            self._open.emit(chosen_event(request, plan, link, now, SOURCE))
        if plan.fallback_reason:
            self._open.emit(
                FellBack(
                    at=self._open.now,
                    source=SOURCE,
                    request_id=request.request_id,
                    attempt=request.attempt,
                    worker_id=plan.decode.worker_id,
                    reason=plan.fallback_reason,
                    prompt_tokens=request.num_prompt_tokens,
                    detail=request.local_detail,
                )
            )
        request.local_reason = request.local_detail = ""
        self._open.out.extend(start_messages(request, workers, self._limits.kv_path))
        return True

    def _streams(self) -> Counter[str]:
        """Sequences that decode, by worker."""
        return Counter(
            request.decode_worker for request in self._open.requests.values() if request.phase is Phase.DECODE
        )

    def _settle_links(self) -> None:
        """A worker that hands nothing off now has a free link, whatever was foreseen."""
        busy = {
            request.prefill_worker
            for request in self._open.requests.values()
            if request.phase in (Phase.PREFILL, Phase.TRANSFER)
        }
        for worker_id in self._open.workers:
            if worker_id not in busy:
                self._forecast.link_idle(worker_id)

    def _foresee(
        self, request: RoutedRequest, plan: AttemptPlan, prompt: Prompt, streams: Counter[str]
    ) -> None:
        """Remember what the attempt should take: what it took says how good the forecasts are."""
        request.is_weighed = plan.choice is not None
        estimate: Estimate | str | None = plan.choice.chosen if plan.choice is not None else None
        if not plan.prefill_worker:
            request.estimate = estimate if isinstance(estimate, Estimate) else None
            return
        workers, now = self._open.workers, self._open.now
        prefill, decode = workers[plan.prefill_worker], workers[plan.decode.worker_id]
        estimate = estimate or self._forecast.remote(prompt, prefill, decode, streams, now)
        request.estimate = estimate if isinstance(estimate, Estimate) else None
        request.estimated_bytes = self._forecast.bytes_to_move(prompt, decode)
        if request.estimate is not None:
            self._forecast.transferring(plan.prefill_worker, request.estimate, now)

    # --- failing ----------------------------------------------------------------------------------------------

    def worker_lost(self, worker_id: str, detail: str) -> None:
        """Every request that depended on this worker goes on without it."""
        view = self._open.workers.get(worker_id)
        if view is None:
            return
        view.connected = False
        for request in list(self._open.requests.values()):
            if request.phase is Phase.QUEUED or request.finish_reason:
                continue
            if request.decode_worker == worker_id:
                self._decode_died(request, worker_id, detail)
            elif request.prefill_worker == worker_id and request.phase in (Phase.PREFILL, Phase.TRANSFER):
                self._prefill_died(request, worker_id, detail)
        view.queued_prompt_tokens.clear()
        view.assigned_blocks.clear()
        self._open.workers.changed(view)

    def _prefill_died(self, request: RoutedRequest, worker_id: str, detail: str) -> None:
        decode_worker = request.decode_worker
        self._open.end_attempt(request, f"{worker_id} died")
        if request.label == "probe":
            self._open.fail(request, 503, f"{worker_id} died")
        elif pick_prefill(self._open.workers.values(), exclude=(decode_worker,)) is not None:
            self._requeue(request)
            self._retried(request, "prefill_died", f"{worker_id}: {detail}")
        else:
            self._fall_back(request, decode_worker, "prefill_died", f"{worker_id}: {detail}")

    def _decode_died(self, request: RoutedRequest, worker_id: str, detail: str) -> None:
        self._open.end_attempt(request, f"{worker_id} died")
        if request.label == "probe":
            self._open.fail(request, 503, f"{worker_id} died")
            return
        self._requeue(request)
        if request.output_token_ids:
            self._open.emit(
                RequestMigrated(
                    at=self._open.now,
                    source=SOURCE,
                    request_id=request.request_id,
                    attempt=request.attempt + 1,
                    from_worker=worker_id,
                    delivered_tokens=len(request.output_token_ids),
                )
            )
        else:
            self._retried(request, "decode_died", f"{worker_id}: {detail}")

    def handoff_failed(self, request: RoutedRequest, worker_id: str, message: HandoffFailed) -> None:
        """The KV of the current attempt will not arrive."""
        detail = f"{worker_id}: {message.detail}" if message.detail else worker_id
        if message.reason == "decode_full":
            full = request.decode_worker
            self._open.end_attempt(request, "decode full")
            self._requeue(request)
            request.excluded_decode = (*request.excluded_decode, full)
            request.decide_at = self._open.now + RETRY_FULL_AFTER_S
            self._retried(request, "decode_full", detail)
        elif message.reason in STREAM_ENDED:
            if not request.failure_reason:
                request.failure_reason, request.failure_detail = message.reason, detail
                request.decide_at = self._open.now + DEATH_NOTICE_S
        else:
            self._transfer_failed(request, message.reason, detail)

    def decide_late(self, request: RoutedRequest) -> None:
        """No death was heard of in time: a stream that ended was a failed transfer."""
        if request.failure_reason and self._open.now >= request.decide_at:
            self._transfer_failed(request, request.failure_reason, request.failure_detail)

    def _transfer_failed(self, request: RoutedRequest, reason: str, detail: str) -> None:
        decode_worker = request.decode_worker
        self._open.end_attempt(request, f"transfer failed: {reason}")
        self._fall_back(request, decode_worker, f"transfer_{reason}", detail)

    def _fall_back(self, request: RoutedRequest, decode_worker: str, reason: str, detail: str) -> None:
        if not self._limits.fallback or request.label == "probe":
            self._open.fail(request, 502, f"{reason} ({detail}); fallback is off")
            return
        request.local_reason, request.local_detail = reason, detail
        request.preferred_decode = decode_worker
        self._requeue(request)

    def _requeue(self, request: RoutedRequest) -> None:
        """Back to the head of the queue: it has waited already."""
        request.requeue()
        self._open.queue.appendleft(request.request_id)

    def _retried(self, request: RoutedRequest, reason: str, detail: str) -> None:
        self._open.emit(
            RequestRetried(
                at=self._open.now,
                source=SOURCE,
                request_id=request.request_id,
                attempt=request.attempt + 1,
                reason=reason,
                detail=detail,
            )
        )
