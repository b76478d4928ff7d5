"""What the run log is told of a weighed handoff: the choice with both estimates, and what it really took."""

from cluster.dispatch import AttemptPlan
from cluster.events import HandoffChosen, HandoffMeasured
from cluster.handoff_choice import Estimate
from cluster.routed_request import RoutedRequest
from transport.codec_choice import LinkRate


def chosen_event(
    request: RoutedRequest, plan: AttemptPlan, link: LinkRate | None, at: float, source: str
) -> HandoffChosen:
    """For an attempt that was just dispatched. Raises ValueError for a plan without a choice."""
    choice = plan.choice
    if choice is None:
        raise ValueError(f"attempt {request.attempt} of {request.request_id} was not weighed")
    nothing = Estimate(way="", queue_ms=0.0, prefill_ms=0.0, transfer_ms=0.0, stall_ms=0.0, streams=0)
    remote, local = choice.remote or nothing, choice.local or nothing
    return HandoffChosen(
        at=at,
        source=source,
        request_id=request.request_id,
        attempt=request.attempt,
        choice=choice.choice,
        reason=choice.reason,
        prefill_worker=plan.weighed_worker,
        decode_worker=plan.decode.worker_id,
        remote_ms=remote.total_ms,
        remote_queue_ms=remote.queue_ms,
        remote_prefill_ms=remote.prefill_ms,
        remote_transfer_ms=remote.transfer_ms,
        remote_stall_ms=remote.stall_ms,
        local_ms=local.total_ms,
        local_queue_ms=local.queue_ms,
        local_prefill_ms=local.prefill_ms,
        local_stall_ms=local.stall_ms,
        streams=local.streams,
        link_bytes_per_s=link.bytes_per_s if link is not None else 0.0,
        link_source=link.source if link is not None else "",
    )


def measured_event(request: RoutedRequest, estimate: Estimate, at: float, source: str) -> HandoffMeasured:
    """For a request whose first token is out."""
    timeline = request.timeline
    return HandoffMeasured(
        at=at,
        source=source,
        request_id=request.request_id,
        attempt=request.attempt,
        choice=estimate.way,
        forecast_ms=estimate.ttft_ms,
        actual_ms=(timeline.first_token_at - request.dispatched_at) * 1e3,
        queue_ms=(timeline.prefill_started_at - request.dispatched_at) * 1e3,
        prefill_ms=(timeline.prefill_done_at - timeline.prefill_started_at) * 1e3,
        transfer_ms=(timeline.first_token_at - timeline.prefill_done_at) * 1e3,
    )
