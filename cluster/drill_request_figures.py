"""Figures of a drill's requests: how they ended, what they went through, whether their tokens are right, how late.

Each is a pure function of the story. ``key`` is what stands behind the dot of the figure's name, "" = all.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np

from cluster.drill import ROUTER
from cluster.drill_figure import Figure, counted, in_brackets, look_at_requests, worst_of
from cluster.drill_story import AFTER, UNDISTURBED, DrillStory, RequestFact, SentRequest
from cluster.events import FellBack, RequestMigrated, RequestRetried, TransferFailed, WorkerExited
from cluster.metrics import ROUTER_DIED

BROKEN: Final = "broken_stream"
TICK_MS: Final = 4.0
"""Of a kernel with 250 Hz: for so long one process may keep another from a core, whatever either is doing."""
_ROUTER_MARGIN_S: Final = 1.0
"""The supervisor notices the router's end a little after its clients."""


def finished(story: DrillStory, key: str) -> Figure:
    """``key``: of one group."""
    sent = [request for request in story.sent() if not key or request.group == key]
    bad = [request for request in sent if not request.has_finished]
    num_good = len(sent) - len(bad)
    return Figure(num_good, f"{num_good}/{len(sent)} finished", look_at_requests(story, bad))


def failed(story: DrillStory, key: str) -> Figure:
    """By what the client saw: broken_stream, error_event, http_500, ... Being turned away is not failing."""
    bad = [r for r in story.sent() if r.has_failed and (not key or _failure(r) == key)]
    return counted(story, bad, "failed", map(_failure, bad))


def failed_without_rule(story: DrillStory, _: str) -> Figure:
    """Failed requests but for streams that broke with the router: no rule says that anything else may fail."""
    exits = [e.at for e in story.process_facts if isinstance(e, WorkerExited) and e.worker_id == ROUTER]

    def broke_with_router(request: SentRequest) -> bool:
        end = request.ended_at or request.sent_at
        return _failure(request) == BROKEN and any(
            request.sent_at <= at + _ROUTER_MARGIN_S and at <= end + _ROUTER_MARGIN_S for at in exits
        )

    bad = [request for request in story.sent() if request.has_failed and not broke_with_router(request)]
    return counted(story, bad, "failed against the rules", map(_failure, bad))


def rejected(story: DrillStory, key: str) -> Figure:
    """Turned away with 429 or 503. ``key``: http_429 or http_503."""
    bad = [r for r in story.sent() if r.was_turned_away and (not key or _failure(r) == key)]
    return counted(story, bad, "turned away", map(_failure, bad))


def without_retry_after(story: DrillStory, _: str) -> Figure:
    """Turned away without being told when to come again."""
    turned = [request for request in story.sent() if request.was_turned_away]
    bad = [r for r in turned if r.result is not None and r.result.retry_after_s is None]
    return counted(story, bad, "turned away without Retry-After")


def left(story: DrillStory, key: str) -> Figure:
    """Requests whose client left. ``key``: the phase in which the router noticed."""
    gone = [(request, log.end_reason) for request, log in story.disturbed() if log.phase == "cancelled"]
    gone = [(request, phase) for request, phase in gone if not key or phase == key]
    phases = Counter(phase for _, phase in gone)
    return Figure(
        len(gone),
        f"{len(gone)} clients left{in_brackets(phases)}",
        look_at_requests(story, [r for r in story.sent() if r.left_at is not None]),
    )


def left_noticed_ms(story: DrillStory, _: str) -> Figure:
    """The longest time from a client's leaving to the router's order to stop the work."""
    times = [
        ((log.ended_at - request.left_at) * 1e3, request)
        for request, log in story.disturbed()
        if request.left_at is not None and log.ended_at is not None
    ]
    return worst_of(story, times, "a client's leaving noticed after", "ms")


def unfinished(story: DrillStory, _: str) -> Figure:
    """No answer by the end of the round, and the client was still there."""
    bad = [r for r in story.facts.sent if r.result is None and r.left_at is None]
    return counted(story, bad, "without an end")


def unaccounted(story: DrillStory, _: str) -> Figure:
    """Requests that finished by the log and not by the client, or the other way round."""
    bad = []
    for request in story.facts.sent:
        log = story.timeline(request)
        phase = log.phase if log is not None else ""
        if log is not None and log.end_reason == ROUTER_DIED:
            continue  # its last words were lost with it
        if request.left_at is None and (phase == "finished") != request.has_finished:
            bad.append(request)
    return counted(story, bad, "told differently by log and client")


def retried(story: DrillStory, key: str) -> Figure:
    """``key``: the reason."""
    found = _requests_with(story, RequestRetried, key)
    workers = Counter(
        log.prefill_worker
        for request, log in story.disturbed()
        if log.request_id in found and log.prefill_worker
    )
    on = f" on {', '.join(sorted(workers))}" if workers else ""
    return _of_log(story, found, f"retried{on}")


def migrated(story: DrillStory, key: str) -> Figure:
    """``key``: the worker that was left."""
    return _of_log(story, _requests_with(story, RequestMigrated, key), "migrated")


def fallbacks(story: DrillStory, key: str) -> Figure:
    """Prompts that were to be handed off and were prefilled by the decode worker. ``key``: the reason."""
    return _of_log(story, _requests_with(story, FellBack, key), f"fell back{f' ({key})' if key else ''}")


def transfer_failures(story: DrillStory, key: str) -> Figure:
    """Requests of which a transfer failed. ``key``: the reason."""
    found = _requests_with(story, TransferFailed, key)
    return _of_log(story, found, f"with a failed transfer{f' ({key})' if key else ''}")


def tokens_differ(story: DrillStory, _: str) -> Figure:
    """Finished requests whose text, number of tokens or finish reason is not that of the undisturbed round."""
    bad = [
        request
        for request in [*story.sent(), *story.sent(AFTER)]
        if request.has_finished and {_answer(r) for r in story.undisturbed(request)} != {_answer(request)}
    ]
    return counted(story, bad, "tokens differ")


def position_errors(story: DrillStory, _: str) -> Figure:
    """Tokens missing or twice, by the positions in the log."""
    bad = [request for request, log in story.disturbed() if log.position_errors]
    return counted(story, bad, "with a token missing or twice")


def undisturbed_failed(story: DrillStory, _: str) -> Figure:
    """Requests that did not even finish before the faults: then there is nothing to compare with."""
    sent = story.sent(UNDISTURBED)
    figure = counted(story, [request for request in sent if not request.has_finished], "failed undisturbed")
    return figure if sent else Figure(None, "nothing was sent undisturbed")


def after_failed(story: DrillStory, _: str) -> Figure:
    """Requests that did not finish when all was over."""
    sent = story.sent(AFTER)
    bad = [request for request in sent if not request.has_finished]
    text = f"{len(sent) - len(bad)}/{len(sent)} served afterwards"
    return Figure(len(bad) if sent else None, text, look_at_requests(story, bad))


def worst_ttft_added_s(story: DrillStory, key: str) -> Figure:
    """The most that a request's first token came later than undisturbed. ``key``: of one group."""
    return worst_of(story, _ttft_added(story, _measured(story, key)), "worst TTFT", "s", sign=True)


def after_ttft_added_s(story: DrillStory, _: str) -> Figure:
    """As worst_ttft_added_s, of the requests sent when all was over."""
    sent = [request for request in story.sent(AFTER) if request.has_finished]
    return worst_of(story, _ttft_added(story, sent), "TTFT afterwards", "s", sign=True)


def worst_gap_added_s(story: DrillStory, key: str) -> Figure:
    """The most that a request's longest gap between tokens was longer than undisturbed. ``key``: of one group."""
    times = []
    for request in _measured(story, key):
        before = [_longest_gap_s(other) for other in story.undisturbed(request)]
        if before:
            times.append((_longest_gap_s(request) - max(before), request))
    return worst_of(story, times, "worst gap", "s", sign=True)


def itl_p99_ratio(story: DrillStory, key: str) -> Figure:
    """ITL p99 over all gaps, as a multiple of the undisturbed, of TICK_MS at least. ``key``: of one group."""
    measured = _measured(story, key)
    groups = {request.group for request in measured}
    before = [r for r in story.sent(UNDISTURBED) if r.has_finished and r.group in groups]
    now_ms, before_ms = _gaps_ms(measured), _gaps_ms(before)
    if not now_ms or not before_ms:
        return Figure(None, "no gaps to compare")
    p99_ms, undisturbed_ms = float(np.percentile(now_ms, 99)), float(np.percentile(before_ms, 99))
    text = f"ITL p99 {p99_ms:.1f} ms, undisturbed {undisturbed_ms:.1f} ms"
    text += f" (counts as {TICK_MS:g})" if undisturbed_ms < TICK_MS else ""
    longest = sorted(measured, key=_longest_gap_s, reverse=True)
    return Figure(p99_ms / max(undisturbed_ms, TICK_MS), text, look_at_requests(story, longest[:1]))


def _failure(request: SentRequest) -> str:
    return request.result.failure if request.result is not None else ""


def _answer(request: SentRequest) -> tuple[str, int, str]:
    assert request.result is not None
    return request.result.text, request.result.num_chunks, request.result.finish_reason


def _longest_gap_s(request: SentRequest) -> float:
    return max(request.result.itl_s, default=0.0) if request.result is not None else 0.0


def _gaps_ms(requests: Iterable[SentRequest]) -> list[float]:
    return [gap * 1e3 for request in requests if request.result is not None for gap in request.result.itl_s]


def _measured(story: DrillStory, key: str) -> list[SentRequest]:
    """Finished requests of the groups that are disturbed, not those that disturb."""
    groups = story.drill.requests
    return [
        request
        for request in story.sent()
        if request.has_finished
        and not groups[request.group].is_disturbance
        and (not key or request.group == key)
    ]


def _ttft_added(story: DrillStory, requests: Iterable[SentRequest]) -> list[tuple[float, SentRequest]]:
    times = []
    for request in requests:
        before = [other.result.ttft_s for other in story.undisturbed(request) if other.result is not None]
        if before and request.result is not None:
            times.append((request.result.ttft_s - statistics.fmean(before), request))
    return times


def _reason(fact: RequestFact) -> str:
    match fact:
        case RequestMigrated(from_worker=worker):
            return worker
        case FellBack(reason=reason) | RequestRetried(reason=reason) | TransferFailed(reason=reason):
            return reason
    return ""


def _requests_with(story: DrillStory, kind: type[RequestFact], key: str) -> set[str]:
    """Ids of the disturbed requests with such an event."""
    return {
        fact.request_id
        for fact in story.request_facts
        if isinstance(fact, kind) and story.is_disturbed(fact) and (not key or _reason(fact) == key)
    }


def _of_log(story: DrillStory, request_ids: set[str], what: str) -> Figure:
    found = [request for request, log in story.disturbed() if log.request_id in request_ids]
    return Figure(len(found), f"{len(found)} {what}", look_at_requests(story, found or story.sent()))
