"""One figure of a drill, and the words that figures share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cluster.drill_story import DrillStory, SentRequest

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """``text`` is for people ("6/6 finished"); ``look_at`` names requests, events and log files, worst first.

    ``value`` None: it never happened, or there was nothing to measure.
    """

    value: float | None
    text: str
    look_at: tuple[str, ...] = ()


def counted(story: DrillStory, requests: list[SentRequest], what: str, reasons: Iterable[str] = ()) -> Figure:
    """ "2 failed (http_500 2)" """
    text = f"{len(requests)} {what}{in_brackets(Counter(reasons))}"
    return Figure(len(requests), text, look_at_requests(story, requests))


def worst_of(
    story: DrillStory, times: list[tuple[float, SentRequest]], what: str, unit: str, *, sign: bool = False
) -> Figure:
    """The largest; less than nothing counts as nothing."""
    if not times:
        return Figure(None, f"{what} unknown: nothing to measure")
    ordered = sorted(times, key=lambda timed: -timed[0])
    worst = ordered[0][0]
    number = f"{worst:+.2f}" if sign else f"{worst:.0f}"
    return Figure(
        max(worst, 0.0),
        f"{what} {number} {unit}",
        look_at_requests(story, [request for _, request in ordered[:1]]),
    )


def in_brackets(counts: Counter[str]) -> str:
    """ " (b 2, a 1)", nothing of nothing."""
    shown = ", ".join(f"{name} {count}" for name, count in counts.most_common(_SHOWN))
    return f" ({shown})" if shown else ""


def look_at_requests(story: DrillStory, requests: list[SentRequest]) -> tuple[str, ...]:
    """One line for each of the first few: its id in the log, how it ended, and the workers it was on last."""
    return tuple(_line(story, request) for request in requests[:_SHOWN])


def shown(lines: list[str]) -> tuple[str, ...]:
    return tuple(lines[:_SHOWN])


def _line(story: DrillStory, request: SentRequest) -> str:
    timeline = story.timeline(request)
    client = "client left" if request.left_at is not None else "no answer"
    if request.result is not None:
        client = (
            request.result.failure or f"{request.result.num_chunks} tokens, {request.result.finish_reason}"
        )
    if timeline is None:
        return f"request {request.client_id}: {client}; it is not in the log"
    workers = " -> ".join(w for w in (timeline.prefill_worker, timeline.decode_worker) if w) or "no worker"
    reason = f" ({timeline.end_reason})" if timeline.end_reason else ""
    return (
        f"request {timeline.request_id} ({request.client_id}): client: {client}; log: {timeline.phase}{reason}, "
        f"attempt {timeline.attempt}, {workers}"
    )
