"""One request as the router follows it: where it is, what was delivered, and the times its TTFT is made of."""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.events import FirstToken
from cluster.handoff_choice import Estimate
from cluster.prefix_memory import Chain
from engine.request import SamplingParams


class Phase(StrEnum):
    """Where a request is. QUEUED -> PREFILL -> (TRANSFER ->) DECODE; any failure leads back to QUEUED or out."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(slots=True)
class Timeline:
    """Monotonic times of the attempt that succeeds; 0.0 = not yet."""

    arrived_at: float
    submitted_at: float
    prefill_started_at: float = 0.0
    prefill_done_at: float = 0.0
    verified_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0  # the worker emitted it
    first_written_at: float = 0.0
    last_written_at: float = 0.0

    def first_token(self, request_id: str, at: float, source: str) -> FirstToken:
        """TTFT and its parts; without a handoff the transfer and admission parts are zero."""
        verified_at = self.verified_at or self.prefill_done_at
        admitted_at = self.admitted_at or verified_at
        ttft_s = self.first_written_at - self.arrived_at
        queue_s = self.prefill_started_at - self.submitted_at
        prefill_s = self.prefill_done_at - self.prefill_started_at
        exposed_s = verified_at - self.prefill_done_at
        admit_s = admitted_at - verified_at
        first_decode_s = self.first_token_at - admitted_at
        router_s = self.submitted_at - self.arrived_at + self.first_written_at - self.first_token_at
        parts_s = queue_s + prefill_s + exposed_s + admit_s + first_decode_s + router_s
        return FirstToken(
            at=at,
            source=source,
            request_id=request_id,
            ttft_ms=ttft_s * 1e3,
            queue_ms=queue_s * 1e3,
            prefill_ms=prefill_s * 1e3,
            transfer_exposed_ms=exposed_s * 1e3,
            admit_wait_ms=admit_s * 1e3,
            first_decode_ms=first_decode_s * 1e3,
            router_ms=router_s * 1e3,
            residual_ms=(ttft_s - parts_s) * 1e3,
        )


@dataclass(slots=True)
class RoutedRequest:
    """The router's state of one request. ``output_token_ids`` were delivered and are never delivered again."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeline: Timeline
    label: str = "client"
    mode: str = ""  # fixed at the first dispatch: in-flight requests finish as they began
    codec: str = ""
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    fruitless_attempts: int = (
        0  # since its last token: one that goes on is not given up, however often it moves
    )
    dispatched_at: float = 0.0  # the current attempt
    estimate: Estimate | None = None  # of the current attempt, where it could be foreseen
    estimated_bytes: int = 0  # that were to be moved
    chain: Chain = ()  # of the prompt, once it was needed
    is_weighed: bool = False  # the estimate decided between the two ways
    prefill_worker: str = ""  # of the current attempt; "" = the decode worker prefills
    decode_worker: str = ""
    pinned_prefill: str | None = None  # probes name their pair
    pinned_decode: str | None = None
    local_reason: str = ""  # why the next attempt must prefill on the decode worker
    local_detail: str = ""
    preferred_decode: str = ""  # a fallback stays on the decode worker it was meant for
    excluded_decode: tuple[str, ...] = ()  # refused this request
    failure_reason: str = ""  # a failed handoff whose cause is not yet known for sure
    failure_detail: str = ""
    decide_at: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)
    num_written: int = 0
    unlogged_token_at: list[float] = field(default_factory=list)  # written, not yet in the run log
    finish_reason: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def is_on(self, worker_id: str) -> bool:
        """The current attempt still needs that worker."""
        if self.phase is Phase.QUEUED or self.finish_reason:
            return False
        is_prefilled = self.phase is Phase.DECODE
        return self.decode_worker == worker_id or (self.prefill_worker == worker_id and not is_prefilled)

    def begin_attempt(self, mode: str, codec: str, prefill_worker: str, decode_worker: str) -> None:
        self.mode, self.codec = mode, codec
        self.attempt += 1
        self.fruitless_attempts += 1
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self.phase = Phase.PREFILL
        self.excluded_decode = ()

    def requeue(self) -> None:
        """The attempt is over; what it measured does not count unless its first token was delivered."""
        self.phase = Phase.QUEUED
        self.prefill_worker = self.decode_worker = ""
        self.failure_reason = self.failure_detail = ""
        self.estimate, self.is_weighed = None, False
        if not self.output_token_ids:
            self.timeline.prefill_started_at = self.timeline.prefill_done_at = 0.0
            self.timeline.verified_at = self.timeline.admitted_at = 0.0
