"""What a worker tells the router and the run log about its attempts, whichever side they are on."""

import time
from dataclasses import dataclass
from typing import Final

from cluster.attempt import AttemptMessage
from cluster.control import HandoffFailed, PrefillDone, RequestError
from cluster.events import PrefillFinished, PrefillProgressed, PrefillStarted, TransferFailed
from cluster.worker_outbox import WorkerOutbox
from engine.outputs import PrefillProgress

PROGRESS_INTERVAL_S: Final = 0.2


@dataclass(slots=True)
class PrefillClock:
    """When an attempt's prompt was computed; 0.0 = not yet."""

    started_at: float = 0.0
    done_at: float = 0.0
    cached_tokens: int = 0
    compute_s: float = 0.0  # engine time of its own
    is_alone: bool = True  # in every step so far
    told_at: float = 0.0  # the last progress in the log


class AttemptReports:
    """Every method says one fact about the attempt that ``message`` started."""

    def __init__(self, worker_id: str, outbox: WorkerOutbox) -> None:
        self._worker_id = worker_id
        self._outbox = outbox

    def prefill_progressed(
        self,
        message: AttemptMessage,
        clock: PrefillClock,
        progress: PrefillProgress,
        step_started_at: float,
        now: float,
        own_s: float | None,
    ) -> None:
        """A chunk of the prompt was computed; the first one reaches the log, also as the start, then a few a second.

        ``own_s``: what of the step was its own; None where other prompts were in it."""
        clock.cached_tokens += progress.num_cached
        clock.compute_s += own_s or 0.0
        clock.is_alone = clock.is_alone and own_s is not None
        if not clock.started_at:
            clock.started_at = step_started_at
            self._outbox.emit(
                PrefillStarted(
                    at=step_started_at,
                    source=self._worker_id,
                    request_id=message.request_id,
                    attempt=message.attempt,
                    worker_id=self._worker_id,
                )
            )
        if not progress.done and now - clock.told_at >= PROGRESS_INTERVAL_S:
            clock.told_at = now
            self._outbox.emit(
                PrefillProgressed(
                    at=now,
                    source=self._worker_id,
                    request_id=message.request_id,
                    attempt=message.attempt,
                    worker_id=self._worker_id,
                    computed_tokens=progress.start + progress.num_tokens,
                )
            )

    def prefill_done(self, message: AttemptMessage, clock: PrefillClock, num_tokens: int, now: float) -> None:
        """The whole prompt is computed and the first token sampled."""
        clock.done_at = now
        self._outbox.say(
            PrefillDone(
                request_id=message.request_id,
                attempt=message.attempt,
                started_at=clock.started_at,
                done_at=now,
                compute_s=clock.compute_s if clock.is_alone and not clock.cached_tokens else 0.0,
            )
        )
        self._outbox.emit(
            PrefillFinished(
                at=now,
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                worker_id=self._worker_id,
                prompt_tokens=num_tokens,
                compute_s=now - clock.started_at,
                cached_tokens=clock.cached_tokens,
            )
        )

    def handoff_failed(self, message: AttemptMessage, reason: str, detail: str) -> None:
        """The KV of this attempt will not arrive; what was held for it is free."""
        self.transfer_failed(message, reason, detail)
        self._outbox.say(
            HandoffFailed(
                request_id=message.request_id, attempt=message.attempt, reason=reason, detail=detail
            )
        )

    def transfer_failed(self, message: AttemptMessage, reason: str, detail: str) -> None:
        """The same for the log only: the router wanted it so."""
        self._outbox.emit(
            TransferFailed(
                at=time.monotonic(),
                source=self._worker_id,
                request_id=message.request_id,
                attempt=message.attempt,
                worker_id=self._worker_id,
                reason=reason,
                detail=detail,
            )
        )

    def refused(self, message: AttemptMessage, reason: str) -> None:
        """This worker cannot do the attempt at all."""
        self._outbox.say(RequestError(request_id=message.request_id, attempt=message.attempt, reason=reason))
