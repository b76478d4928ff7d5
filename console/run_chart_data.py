"""What a run's charts are drawn from, as one pure fold over its log. Knows no matplotlib."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.events import Event, LinkConfigured, RunReady, TokensDelivered, TransferCompleted
from cluster.metrics import RunMetrics
from cluster.request_timeline import RequestTimeline
from cluster.run_facts import RunFacts
from cluster.summary import summary_of
from console.chart_marks import mark_letter
from console.feed_text import feed_line
from console.series import Mark


@dataclass(frozen=True, slots=True)
class Transfer:
    """Payload bytes on the wire and when; seconds from the run's first event."""

    began_s: float
    ended_s: float
    wire_bytes: int


@dataclass(slots=True)
class ChartData:
    """Times in seconds from the run's first event, latencies in milliseconds. Requests that did not finish are left
    out of the latencies, as everywhere."""

    run: str
    summary: dict[str, object]
    duration_s: float = 0.0
    finished: list[RequestTimeline] = field(default_factory=list)  # by arrival
    first_at: float = 0.0
    gap_at_s: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)  # since when, bytes/s; 0 = unlimited
    marks: list[Mark] = field(default_factory=list)  # from readiness on


def chart_data(run: str, events: Iterable[Event]) -> ChartData:
    """Fold a log, finished or not."""
    facts, metrics = RunFacts(), RunMetrics(keep=None)
    token_at: dict[str, list[float]] = {}
    transfers: list[TransferCompleted] = []
    links: list[LinkConfigured] = []
    marks: list[Mark] = []
    first_at: float | None = None
    last_at, is_ready = 0.0, False
    for event in events:
        first_at = event.at if first_at is None else first_at
        last_at = max(last_at, event.at)
        facts.fold(event)
        for counted in metrics.fold(event):
            if isinstance(counted, TokensDelivered):
                token_at.setdefault(counted.request_id, []).extend(counted.token_at)
            elif isinstance(counted, TransferCompleted):
                transfers.append(counted)
        if isinstance(event, LinkConfigured):
            links.append(event)
        is_ready = is_ready or isinstance(event, RunReady)
        if is_ready and (letter := mark_letter(event)):
            line = feed_line(event)
            marks.append(Mark(event.at, letter, line.text if line is not None else ""))
    start = first_at or 0.0
    data = ChartData(run, summary_of(facts, metrics), duration_s=max(0.0, last_at - start), first_at=start)
    data.finished = [timeline for timeline in metrics.timelines.values() if timeline.phase == "finished"]
    for timeline in data.finished:
        data.gap_ms.extend(timeline.itl_ms)
        data.gap_at_s.extend(at - start for at in token_at.get(timeline.request_id, ())[1:])
    data.transfers = [
        Transfer(each.at - each.duration_s - start, each.at - start, each.wire_bytes) for each in transfers
    ]
    data.asked = [(link.at - start, link.asked_bits_per_s / 8.0) for link in links]
    data.marks = [Mark(mark.at - start, mark.letter, mark.text) for mark in marks]
    return data


def transfer_rate(data: ChartData, bins: int) -> tuple[list[float], list[float]]:
    """Edges (``bins`` + 1, seconds) and mean payload bytes/s of each bin; a transfer counts evenly over its time."""
    width = data.duration_s / bins if data.duration_s > 0 else 1.0
    volume = [0.0] * bins
    for transfer in data.transfers:
        length = max(transfer.ended_s - transfer.began_s, 1e-9)
        first = min(bins - 1, max(0, int(transfer.began_s / width)))
        last = min(bins - 1, max(0, int(transfer.ended_s / width)))
        for index in range(first, last + 1):
            overlap = min(transfer.ended_s, (index + 1) * width) - max(transfer.began_s, index * width)
            volume[index] += transfer.wire_bytes * max(0.0, overlap) / length
    return [index * width for index in range(bins + 1)], [each / width for each in volume]
