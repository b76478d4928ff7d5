"""One request as its events tell it. Knows no other request and no clock of its own."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.events import (
    DecodeAdmitted,
    FellBack,
    FirstToken,
    HandoffChosen,
    HandoffMeasured,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    TextDelivered,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    TransferProgressed,
    TransferStarted,
)
from cluster.request_filter import RequestEvent

TTFT_PARTS: Final = (
    "queue", "prefill", "transfer_exposed", "admit_wait", "first_decode", "router", "residual",
)  # fmt: skip
"""What TTFT is the sum of, in the order in which time passes (router and residual last)."""

_RANK: Final = {"queued": 0, "prefill": 1, "transfer": 2, "decode": 3}


@dataclass(slots=True)
class RequestTimeline:
    """Where a request is and what it has cost. Times ``*_at`` are monotonic seconds; None: not yet, or never.

    ``phase`` is queued, prefill, transfer or decode while it runs, then its outcome: finished, failed, rejected,
    cancelled, or cut_off (the cluster was stopped under it).
    """

    request_id: str
    arrived_at: float
    prompt_tokens: int
    max_tokens: int
    label: str = "client"
    client_id: str = ""
    phase: str = "queued"
    attempt: int = 0
    mode: str = ""
    codec: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_reason: str = ""
    decode_reason: str = ""
    computed_tokens: int = 0
    cached_tokens: int = 0
    prefill_started_at: float | None = None
    prefill_finished_at: float | None = None
    transfer_started_at: float | None = None
    failed_transfer_attempt: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    ttft_ms: float | None = None
    ttft_parts_ms: dict[str, float] = field(default_factory=dict)  # keys: TTFT_PARTS
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    itl_ms: "array[float]" = field(default_factory=lambda: array("d"))  # every gap between tokens, in order
    output_tokens: int = 0  # delivered so far
    position_errors: int = 0  # batches that did not begin where the last one ended
    transfers: int = 0
    kv_tokens: int = 0
    kv_raw_bytes: int = 0
    kv_wire_bytes: int = 0
    kv_skipped_tokens: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    fallback: str = ""  # the last reason
    retries: int = 0
    migrations: int = 0
    finish_reason: str = ""
    end_reason: str = ""  # why it failed or was rejected, or the phase it was cancelled in

    @classmethod
    def begin(cls, event: RequestArrived) -> "RequestTimeline":
        return cls(
            request_id=event.request_id,
            arrived_at=event.at,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            label=event.label,
            client_id=event.client_id,
        )

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    def apply(self, event: RequestEvent) -> None:
        """Take in one event of this request. A second end changes nothing."""
        _APPLY[type(event)](self, event)

    def end(self, outcome: str, at: float, reason: str = "") -> None:
        if self.ended_at is None:
            self.phase, self.ended_at, self.end_reason = outcome, at, reason

    def _advance(self, phase: str, attempt: int) -> None:
        """Phases of one attempt only go forward (workers' events come in any order); a new attempt starts over."""
        if self.ended_at is not None or attempt < self.attempt:
            return
        if attempt > self.attempt:
            self.attempt, self.phase = attempt, phase
        elif _RANK[phase] > _RANK[self.phase]:
            self.phase = phase

    def _dispatched(self, event: RequestDispatched) -> None:
        self._advance("queued", event.attempt)
        if event.attempt >= self.attempt:
            self.mode, self.codec = event.mode, event.codec
            self.prefill_worker, self.prefill_reason = event.prefill_worker, event.prefill_reason
            self.decode_worker, self.decode_reason = event.decode_worker, event.decode_reason

    def _prefill_started(self, event: PrefillStarted) -> None:
        self._advance("prefill", event.attempt)
        self.prefill_started_at = event.at

    def _prefill_progressed(self, event: PrefillProgressed) -> None:
        self._advance("prefill", event.attempt)
        self.computed_tokens = event.computed_tokens

    def _prefill_finished(self, event: PrefillFinished) -> None:
        self._advance("transfer" if self.prefill_worker == event.worker_id else "prefill", event.attempt)
        self.prefill_finished_at = event.at
        self.computed_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens

    def _transfer_started(self, event: TransferStarted) -> None:
        self.transfer_started_at = event.at

    def _transfer_completed(self, event: TransferCompleted) -> None:
        self.transfers += 1
        self.kv_tokens += event.tokens
        self.kv_raw_bytes += event.raw_bytes
        self.kv_wire_bytes += event.wire_bytes
        self.kv_skipped_tokens += event.skipped_tokens
        self.transfer_s += event.duration_s
        self.exposed_s += event.exposed_s
        self.codec = event.codec

    def _transfer_failed(self, event: TransferFailed) -> None:
        self.transfer_started_at = None
        self.failed_transfer_attempt = event.attempt

    def _decode_admitted(self, event: DecodeAdmitted) -> None:
        self._advance("decode", event.attempt)
        self.admitted_at = event.at

    def _first_token(self, event: FirstToken) -> None:
        self._advance("decode", self.attempt)
        self.first_token_at = event.at
        self.ttft_ms = event.ttft_ms
        self.ttft_parts_ms = {
            "queue": event.queue_ms,
            "prefill": event.prefill_ms,
            "transfer_exposed": event.transfer_exposed_ms,
            "admit_wait": event.admit_wait_ms,
            "first_decode": event.first_decode_ms,
            "router": event.router_ms,
            "residual": event.residual_ms,
        }

    def _tokens_delivered(self, event: TokensDelivered) -> None:
        self._advance("decode", self.attempt)
        if event.first_position != self.output_tokens:
            self.position_errors += 1
        previous = self.last_token_at
        for at in event.token_at:
            if previous is not None:
                self.itl_ms.append((at - previous) * 1000.0)
            previous = at
        self.last_token_at = previous
        self.output_tokens = event.first_position + len(event.token_at)

    def _fell_back(self, event: FellBack) -> None:
        self.fallback = event.reason

    def _retried(self, event: RequestRetried) -> None:
        self.retries += 1

    def _migrated(self, event: RequestMigrated) -> None:
        self.migrations += 1

    def _finished(self, event: RequestFinished) -> None:
        if self.ended_at is None:
            self.end("finished", event.at)
            self.finish_reason, self.e2el_ms = event.finish_reason, event.e2el_ms
            self.tpot_ms = event.tpot_ms

    def _failed(self, event: RequestFailed) -> None:
        self.end("failed", event.at, event.reason)

    def _rejected(self, event: RequestRejected) -> None:
        self.end("rejected", event.at, event.reason)

    def _cancelled(self, event: RequestCancelled) -> None:
        self.end("cancelled", event.at, event.phase)


def _ignore(timeline: RequestTimeline, event: Any) -> None:
    """Nothing to keep: the arrival made the timeline, how far a transfer is counts only while it lasts, and how
    handoffs were weighed counts for the run."""


_APPLY: Final[dict[type, Callable[[RequestTimeline, Any], None]]] = {
    TokensDelivered: RequestTimeline._tokens_delivered,
    RequestArrived: _ignore,
    RequestDispatched: RequestTimeline._dispatched,
    HandoffChosen: _ignore,
    HandoffMeasured: _ignore,
    PrefillStarted: RequestTimeline._prefill_started,
    PrefillProgressed: RequestTimeline._prefill_progressed,
    PrefillFinished: RequestTimeline._prefill_finished,
    TransferStarted: RequestTimeline._transfer_started,
    TransferProgressed: _ignore,
    TextDelivered: _ignore,
    TransferCompleted: RequestTimeline._transfer_completed,
    TransferFailed: RequestTimeline._transfer_failed,
    DecodeAdmitted: RequestTimeline._decode_admitted,
    FirstToken: RequestTimeline._first_token,
    RequestFinished: RequestTimeline._finished,
    FellBack: RequestTimeline._fell_back,
    RequestRetried: RequestTimeline._retried,
    RequestMigrated: RequestTimeline._migrated,
    RequestFailed: RequestTimeline._failed,
    RequestRejected: RequestTimeline._rejected,
    RequestCancelled: RequestTimeline._cancelled,
}
