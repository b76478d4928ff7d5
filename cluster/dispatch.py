"""How one attempt of a request is set up: which workers, why, and the messages that start it. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.control import AbsentWorker, StartDecode, StartLocal, StartPrefill
from cluster.events import NO_PREFILL_WORKER
from cluster.handoff_choice import REMOTE, HandoffChoice
from cluster.routed_request import RoutedRequest
from cluster.router_messages import Send
from cluster.selection import Pick, blocks_needed, pick_colocated, pick_decode, pick_prefill
from cluster.worker_roles import DECODE_ROLES, PREFILL_ROLES
from cluster.worker_views import WorkerViews


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """The part of a profile that decides."""

    max_queue: int
    queue_timeout_s: float
    max_attempts: int
    fallback: bool
    handoff: str  # always | auto | never
    kv_path: str  # v1 | v2
    prefix_caching: bool = False  # workers keep KV of prompts for others that begin alike


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """``prefill_worker`` "" = the decode worker prefills, ``prefill_reason`` then says why; it is a fallback only
    when ``fallback_reason`` is set. ``impossible`` says why the request must fail instead. ``choice``: the two ways
    were weighed, against ``weighed_worker``."""

    mode: str
    decode: Pick
    prefill_worker: str = ""
    prefill_reason: str = ""
    fallback_reason: str = ""
    impossible: str = ""
    choice: HandoffChoice | None = None
    weighed_worker: str = ""


def plan_attempt(
    request: RoutedRequest,
    workers: WorkerViews,
    limits: RouterLimits,
    mode: str,
    handoff: str,
    choose: Callable[[str, str], HandoffChoice],
) -> AttemptPlan | None:
    """The next attempt of a queued request; None when no decode worker has room yet.

    ``mode`` is the cluster's; a request that was dispatched before keeps its own. ``handoff``: always | auto | never;
    ``choose`` weighs the two ways for a prefill and a decode worker.
    """
    mode = request.mode or mode
    decode = _pick_decode(request, workers, mode)
    if decode is None:
        return None
    if request.pinned_decode is not None:
        return AttemptPlan(mode, decode, request.pinned_prefill or "", "probe")
    if mode == "colocated":
        return AttemptPlan(mode, decode, prefill_reason="colocated", fallback_reason=request.local_reason)
    if request.local_reason:
        return AttemptPlan(
            mode, decode, prefill_reason=request.local_reason, fallback_reason=request.local_reason
        )
    if request.output_token_ids:
        return AttemptPlan(mode, decode, prefill_reason="continues after a migration")
    if handoff == "never":
        return AttemptPlan(mode, decode, prefill_reason="handoff is never")
    exclude = (decode.worker_id,)
    prefill = pick_prefill(workers.for_prefill(exclude), exclude)
    if prefill is not None and handoff == "auto":
        choice = choose(prefill.worker_id, decode.worker_id)
        taken = prefill.worker_id if choice.choice == REMOTE else ""
        return AttemptPlan(
            mode, decode, taken, choice.reason, choice=choice, weighed_worker=prefill.worker_id
        )
    if prefill is not None:
        return AttemptPlan(mode, decode, prefill.worker_id, prefill.reason)
    if not limits.fallback:
        return AttemptPlan(mode, decode, impossible="no prefill worker is ready; fallback is off")
    return AttemptPlan(mode, decode, prefill_reason=NO_PREFILL_WORKER, fallback_reason=NO_PREFILL_WORKER)


def _pick_decode(request: RoutedRequest, workers: WorkerViews, mode: str) -> Pick | None:
    num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    if request.pinned_decode is not None:
        pinned = workers.get(request.pinned_decode)
        return Pick(pinned.worker_id, "probe") if pinned is not None and pinned.connected else None
    preferred = workers.get(request.preferred_decode)
    if (
        preferred is not None
        and preferred.is_available
        and preferred.can_take(blocks_needed(num_prompt, max_tokens, preferred.address))
    ):
        return Pick(preferred.worker_id, "stays on the decode worker it was meant for")
    if mode == "colocated":
        return pick_colocated(workers.for_colocated(num_prompt, max_tokens), num_prompt, max_tokens)
    for exclude in (request.excluded_decode, ()):
        views = workers.for_decode(num_prompt, max_tokens, exclude)
        picked = pick_decode(views, num_prompt, max_tokens, exclude)
        if picked is not None or not exclude:
            return picked
    return None


def hopeless(
    request: RoutedRequest,
    workers: WorkerViews,
    absent: Mapping[str, AbsentWorker],
    mode: str,
) -> tuple[int, str] | None:
    """Why a request that no worker takes now need not wait: status and reason. None: waiting may help."""
    if request.pinned_decode is not None:
        return None
    is_colocated = (request.mode or mode) == "colocated"
    able = workers.shapes(is_colocated)
    if not able:
        coming = [worker.role for worker in absent.values() if worker.is_coming]
        if any(is_colocated or role in DECODE_ROLES for role in coming):
            return None
        return 503, "no decode worker is left: each has failed for good or was removed"
    num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    if all(blocks_needed(num_prompt, max_tokens, address) > address.total_blocks for address in able):
        largest = max(address.total_blocks * address.block_size for address in able)
        return 400, (
            f"prompt and max_tokens need {num_prompt + max_tokens} tokens of KV; a worker holds {largest}"
        )
    return None


def is_prefill_expected(workers: WorkerViews, absent: Mapping[str, AbsentWorker]) -> bool:
    """A prefill worker that cannot be used now may be usable soon: it comes back, or drains for a restart."""
    return any(worker.is_coming and worker.role in PREFILL_ROLES for worker in absent.values()) or any(
        view.is_prefill() and not view.is_available for view in workers.values()
    )


def promise(request: RoutedRequest, workers: WorkerViews, now: float) -> None:
    """Count what the attempt will take from its workers."""
    decode = workers[request.decode_worker]
    decode.assigned_blocks[request.request_id] = blocks_needed(
        request.num_prompt_tokens, request.sampling.max_tokens, decode.address
    )
    prefiller = workers[request.prefill_worker or request.decode_worker]
    if not prefiller.queued_prompt_tokens:
        prefiller.prefilling_since = now
    prefiller.queued_prompt_tokens[request.request_id] = request.num_prompt_tokens
    for view in (prefiller, decode):
        workers.changed(view)


def withdraw(request: RoutedRequest, workers: WorkerViews) -> None:
    """Take every promise of a request's current attempt back; there are no others."""
    for worker_id in (request.prefill_worker, request.decode_worker):
        view = workers.get(worker_id)
        if view is not None:
            tokens = view.queued_prompt_tokens.pop(request.request_id, None)
            blocks = view.assigned_blocks.pop(request.request_id, None)
            if tokens is not None or blocks is not None:
                workers.changed(view)


def start_messages(request: RoutedRequest, workers: WorkerViews, kv_path: str) -> list[Send]:
    """What the chosen workers must be told; decode first, so that it usually knows the request at its OPEN."""
    if not request.prefill_worker:
        local = StartLocal(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            output_token_ids=tuple(request.output_token_ids),
        )
        return [Send(request.decode_worker, local)]
    address = workers[request.decode_worker].address
    decode = StartDecode(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        prefill_worker=request.prefill_worker,
    )
    prefill = StartPrefill(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        decode_worker=request.decode_worker,
        decode_kv_host=address.kv_host,
        decode_kv_port=address.kv_port,
        codec=request.codec,
        path=kv_path,
    )
    return [Send(request.decode_worker, decode), Send(request.prefill_worker, prefill)]
