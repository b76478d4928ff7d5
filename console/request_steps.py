"""What each step of a request changes in the request alone: one function a kind of event.

A table and not a ``match``: these are most of a log, and ``match`` asks one class after the other.
"""

from collections.abc import Callable
from typing import Any, Final

from cluster.events import (
    DecodeAdmitted,
    HandoffChosen,
    HandoffMeasured,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    RequestDispatched,
    TextDelivered,
    TransferFailed,
    TransferProgressed,
    TransferStarted,
)
from console.request_view import MAX_TEXT, RequestView
from console.text_format import format_skipped


def _dispatched(request: RequestView, event: RequestDispatched) -> None:
    attempt = request.attempt(event.attempt)
    attempt.at, attempt.mode = event.at, event.mode
    if attempt.transfer_started_at is None:  # else the worker has chosen already
        attempt.codec = event.codec
    attempt.decode_worker, attempt.decode_reason = event.decode_worker, event.decode_reason
    attempt.prefill_worker, attempt.prefill_reason = event.prefill_worker, event.prefill_reason
    request.tell(event.at, f"attempt {event.attempt} sent to {attempt.path}")


def _chosen(request: RequestView, event: HandoffChosen) -> None:
    request.tell(event.at, f"weighed: {event.reason}")


def _measured(request: RequestView, event: HandoffMeasured) -> None:
    took = f"{event.actual_ms:.1f} ms to the first token, forecast {event.forecast_ms:.1f}"
    request.tell(event.at, f"{event.choice} took {took}")


def _prefill_started(request: RequestView, event: PrefillStarted) -> None:
    request.attempt(event.attempt).prefill_started_at = event.at
    request.tell(event.at, f"prefill started on {event.worker_id}")


def _prefill_progressed(request: RequestView, event: PrefillProgressed) -> None:
    attempt = request.attempt(event.attempt)
    attempt.computed_tokens = max(attempt.computed_tokens, event.computed_tokens)


def _prefill_finished(request: RequestView, event: PrefillFinished) -> None:
    attempt = request.attempt(event.attempt)
    attempt.prefill_finished_at, attempt.compute_s = event.at, event.compute_s
    attempt.computed_tokens, attempt.cached_tokens = event.prompt_tokens, event.cached_tokens
    cached = f", {event.cached_tokens:,} from the prefix cache" if event.cached_tokens else ""
    request.tell(event.at, f"prefill finished: {event.prompt_tokens:,} tokens{cached}")


def _transfer_started(request: RequestView, event: TransferStarted) -> None:
    attempt = request.attempt(event.attempt)
    attempt.transfer_started_at, attempt.transfer_raw_bytes = event.at, event.raw_bytes
    attempt.skipped = format_skipped(event.skipped_tokens, event.skipped_bytes)
    attempt.codec = event.codec
    path = f"{event.from_worker} > {event.to_worker} {event.codec}"
    request.tell(event.at, f"transfer started {path}{attempt.skipped}")
    if event.codec_reason:
        request.tell(event.at, f"codec {event.codec}: {event.codec_reason}")


def _transfer_progressed(request: RequestView, event: TransferProgressed) -> None:
    attempt = request.attempt(event.attempt)
    attempt.sent_bytes = max(attempt.sent_bytes, event.sent_bytes)


def _transfer_failed(request: RequestView, event: TransferFailed) -> None:
    request.attempt(event.attempt).failure = event.reason
    request.tell(event.at, f"transfer failed: {event.reason} {event.detail}".rstrip())


def _decode_admitted(request: RequestView, event: DecodeAdmitted) -> None:
    request.attempt(event.attempt).admitted_at = event.at
    request.tell(event.at, f"admitted to decode on {event.worker_id}")


def _text_delivered(request: RequestView, event: TextDelivered) -> None:
    request.prompt_text = event.prompt or request.prompt_text
    request.text = (request.text + event.text)[-MAX_TEXT:]


STEPS: Final[dict[type, Callable[[RequestView, Any], None]]] = {
    RequestDispatched: _dispatched,
    HandoffChosen: _chosen,
    HandoffMeasured: _measured,
    PrefillStarted: _prefill_started,
    PrefillProgressed: _prefill_progressed,
    PrefillFinished: _prefill_finished,
    TransferStarted: _transfer_started,
    TransferProgressed: _transfer_progressed,
    TransferFailed: _transfer_failed,
    DecodeAdmitted: _decode_admitted,
    TextDelivered: _text_delivered,
}
