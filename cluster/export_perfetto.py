"""A run as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) opens: who worked on which request, and when.

One process of the trace has what happened to the cluster; one is the clients' view, a track per request with the parts
of its TTFT laid end to end; every worker is another, with a track for the prefill and one for the transfer of each
request that it prefills, and one for each that it decodes. Arrows lead from the end of a transfer to the decode it
feeds. Format: Google's "Trace Event Format".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.events import (
    BurstInjected,
    CodecChanged,
    DecodeAdmitted,
    Event,
    FaultInjected,
    FellBack,
    ModeChanged,
    NoteAdded,
    PrefillFinished,
    PrefillStarted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRetried,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
    WorkerExited,
    WorkerReady,
    WorkerStats,
)
from cluster.metrics import RunMetrics
from cluster.request_timeline import TTFT_PARTS, RequestTimeline
from cluster.run_log import PassedOver, read_events

_CLUSTER: Final = 1
_CLIENTS: Final = 2
_EVENTS: Final = 1  # the cluster's one track
_LANES: Final = 3  # tracks of one request in a worker: prefill, transfer, decode
_PREFILL, _TRANSFER, _DECODE = range(_LANES)

Record = dict[str, Any]


def to_perfetto(log: Path, passed: PassedOver) -> bytes:
    """One JSON document; times in microseconds from the run's first event. Raises OSError and RunLogError."""
    trace = _Trace()
    for event in read_events(log, passed):
        trace.fold(event)
    return msgspec.json.encode({"traceEvents": list(trace.records()), "displayTimeUnit": "ms"})


class _Trace:
    """Fold of a log into trace records."""

    def __init__(self) -> None:
        self._metrics = RunMetrics(keep=None)
        self._first_at: float | None = None
        self._last_at = 0.0
        self._records: list[Record] = []
        self._processes: dict[str, int] = {}  # worker -> its number in the trace
        self._requests: dict[str, int] = {}  # request -> its number
        self._open: dict[
            tuple[str, int, int], tuple[str, float]
        ] = {}  # request, attempt, lane -> worker, since
        self._tracks: dict[tuple[int, int], str] = {}
        self._moved: dict[
            tuple[str, int], Record
        ] = {}  # request, attempt -> the slice of its finished transfer
        self._decoded: dict[tuple[str, int], Record] = {}  # ... and of its decode

    def fold(self, event: Event) -> None:
        if self._first_at is None:
            self._first_at = event.at
        self._last_at = max(self._last_at, event.at)
        for counted in self._metrics.fold(event):
            self._request_event(counted)
        match event:
            case WorkerStats():
                self._counters(event)
            case WorkerExited():
                self._close_all(event)
                self._instant(event.at, f"{event.worker_id} exited ({event.cause})")
            case WorkerReady():
                self._instant(event.at, f"{event.worker_id} ready")
            case FaultInjected():
                self._instant(event.at, f"{event.fault} {event.target}")
            case ModeChanged():
                self._instant(event.at, f"mode {event.mode}")
            case CodecChanged():
                self._instant(event.at, f"codec {event.codec}")
            case BurstInjected():
                self._instant(event.at, f"burst {event.prompts} x {event.prompt_tokens}")
            case NoteAdded():
                self._instant(event.at, event.text)

    def records(self) -> Iterator[Record]:
        """All of them, names of processes and tracks first."""
        for request_id, attempt, lane in list(self._open):
            self._close(request_id, attempt, lane, self._last_at, {"outcome": "open when the log ended"})
        clients = [
            record for timeline in self._metrics.timelines.values() for record in self._client(timeline)
        ]
        for name, number in {"cluster": _CLUSTER, "clients": _CLIENTS, **self._processes}.items():
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
            yield {
                "ph": "M",
                "name": "process_sort_index",
                "pid": number,
                "tid": 0,
                "args": {"sort_index": number},
            }
        for (process, track), name in self._tracks.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}
        yield from clients
        yield from self._records
        yield from self._arrows()

    def _request_event(self, event: Any) -> None:
        match event:
            case PrefillStarted():
                self._begin(event.request_id, event.attempt, _PREFILL, event.worker_id, event.at)
            case PrefillFinished():
                facts: Record = {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
                self._close(event.request_id, event.attempt, _PREFILL, event.at, facts)
            case TransferStarted():
                self._begin(event.request_id, event.attempt, _TRANSFER, event.from_worker, event.at)
            case TransferCompleted():
                facts = {
                    "codec": event.codec,
                    "wire_bytes": event.wire_bytes,
                    "exposed_ms": event.exposed_s * 1e3,
                }
                self._close(event.request_id, event.attempt, _TRANSFER, event.at, facts)
            case TransferFailed():
                self._close(event.request_id, event.attempt, _TRANSFER, event.at, {"failed": event.reason})
            case DecodeAdmitted():
                self._begin(event.request_id, event.attempt, _DECODE, event.worker_id, event.at)
            case RequestFinished() | RequestFailed() | RequestCancelled():
                for request_id, attempt, lane in list(self._open):
                    if request_id == event.request_id:
                        self._close(request_id, attempt, lane, event.at, {})
            case FellBack() | RequestRetried():
                what = "fell back" if isinstance(event, FellBack) else "retried"
                self._instant(event.at, f"{event.request_id} {what}: {event.reason}")
            case RequestMigrated():
                self._instant(event.at, f"{event.request_id} migrated")

    def _begin(self, request_id: str, attempt: int, lane: int, worker_id: str, at: float) -> None:
        self._open[request_id, attempt, lane] = worker_id, at

    def _close(self, request_id: str, attempt: int, lane: int, at: float, facts: Record) -> None:
        worker_id, since = self._open.pop((request_id, attempt, lane), ("", at))
        if not worker_id:  # its beginning is not in the log, or it ended before
            return
        process, track = self._track(worker_id, request_id, lane)
        place: Record = {"pid": process, "tid": track}
        name = f"{('prefill', 'transfer', 'decode')[lane]} {request_id}"
        args = {"attempt": attempt, **facts}
        record = self._slice(name, since, at, args) | place
        self._records.append(record)
        if lane == _TRANSFER and "wire_bytes" in facts:  # not one that failed
            self._moved[request_id, attempt] = record
        elif lane == _DECODE:
            self._decoded[request_id, attempt] = record

    def _arrows(self) -> Iterator[Record]:
        """From each finished transfer to the decode it fed.

        Each begins inside the one slice and ends at the beginning of the other, not earlier than it began: the
        acknowledgement that ends a transfer comes after the decode worker has taken it in. Perfetto drops arrows that
        go back in time, begin where no slice is, or whose id is not a number.
        """
        for number, (attempt, moved) in enumerate(self._moved.items(), start=1):
            decoded = self._decoded.get(attempt)
            if decoded is None:
                continue
            arrow: Record = {"name": "KV", "cat": "transfer", "id": number}
            inside = min(moved["ts"] + moved["dur"] - 1.0, decoded["ts"])
            begin, end = ({key: record[key] for key in ("pid", "tid")} for record in (moved, decoded))
            yield arrow | begin | {"ph": "s", "ts": max(moved["ts"], round(inside, 3))}
            yield arrow | end | {"ph": "f", "bp": "e", "ts": decoded["ts"]}

    def _close_all(self, event: WorkerExited) -> None:
        for (request_id, attempt, lane), (worker_id, _) in list(self._open.items()):
            if worker_id == event.worker_id:
                self._close(request_id, attempt, lane, event.at, {"ended by": event.cause})

    def _client(self, timeline: RequestTimeline) -> Iterator[Record]:
        """One request as its client saw it: the whole, and inside it the parts of TTFT and the decode after it."""
        number = self._number(timeline.request_id)
        self._tracks[_CLIENTS, number] = f"{timeline.request_id} ({timeline.label})"
        place: Record = {"pid": _CLIENTS, "tid": number}
        end = self._last_at if timeline.ended_at is None else timeline.ended_at
        facts = {
            "outcome": timeline.phase, "prompt_tokens": timeline.prompt_tokens,
            "output_tokens": timeline.output_tokens, "mode": timeline.mode, "retries": timeline.retries,
        }  # fmt: skip
        yield self._slice(timeline.request_id, timeline.arrived_at, end, facts) | place
        if timeline.ttft_ms is None:
            return
        at = timeline.arrived_at
        for part in TTFT_PARTS:
            length_s = max(0.0, timeline.ttft_parts_ms.get(part, 0.0)) / 1000.0
            if length_s > 0:
                yield self._slice(part, at, min(at + length_s, end), {}) | place
            at += length_s
        first = timeline.arrived_at + timeline.ttft_ms / 1000.0
        if end > first:
            yield self._slice("tokens", first, end, {"itl": len(timeline.itl_ms)}) | place

    def _counters(self, event: WorkerStats) -> None:
        place: Record = {"ph": "C", "pid": self._process(event.worker_id), "tid": 0, "ts": self._us(event.at)}
        self._records.append(
            place | {"name": "sequences", "args": {"waiting": event.waiting, "running": event.running}}
        )
        self._records.append(place | {"name": "KV blocks", "args": {"held": event.held_blocks}})

    def _instant(self, at: float, name: str) -> None:
        self._tracks[_CLUSTER, _EVENTS] = "events"
        place: Record = {"pid": _CLUSTER, "tid": _EVENTS}
        self._records.append({"ph": "i", "s": "t", "name": name, "ts": self._us(at)} | place)

    def _slice(self, name: str, since: float, until: float, args: Record) -> Record:
        return {
            "ph": "X", "name": name, "ts": self._us(since), "args": args,
            "dur": max(0.0, round(self._us(until) - self._us(since), 3)),  # ends that are equal stay equal
        }  # fmt: skip

    def _track(self, worker_id: str, request_id: str, lane: int) -> tuple[int, int]:
        process, track = self._process(worker_id), self._number(request_id) * _LANES + lane
        self._tracks[process, track] = f"{request_id} {('prefill', 'transfer', 'decode')[lane]}"
        return process, track

    def _process(self, worker_id: str) -> int:
        return self._processes.setdefault(worker_id, _CLIENTS + 1 + len(self._processes))

    def _number(self, request_id: str) -> int:
        return self._requests.setdefault(request_id, 1 + len(self._requests))

    def _us(self, at: float) -> float:
        return round((at - (self._first_at or 0.0)) * 1e6, 3)
