"""A run in other tools' formats. Reads the log only, so a live run can be exported too."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.atomic_file import write_atomically
from cluster.metrics import RunMetrics
from cluster.request_timeline import TTFT_PARTS, RequestTimeline
from cluster.run_log import EVENTS_FILE, read_events
from cluster.samples import percentiles

FORMATS: Final = ("jsonl", "csv")
PLANNED_FORMATS: Final = ("parquet", "perfetto", "vllm-bench")

_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")

CSV_COLUMNS: Final = (
    "request_id", "client_id", "label", "outcome", "reason", "mode", "prefill_worker", "decode_worker", "attempt",
    "prompt_tokens", "cached_tokens", "output_tokens", "arrived_at_s", "ttft_ms",
    *(f"{part}_ms" for part in TTFT_PARTS),
    "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_ms", "e2el_ms",
    "codec", "kv_tokens", "kv_raw_bytes", "kv_wire_bytes", "kv_skipped_tokens", "transfer_ms", "exposed_ms",
    "fallback", "retries", "migrations",
)  # fmt: skip
"""One row a request, in order of arrival. ``arrived_at_s`` counts from the run's first event."""


class ExportError(Exception):
    """A run cannot be exported as asked; the message is one line for the user."""


def export_run(run_dir: Path, fmt: str) -> bytes:
    """The run's log in one of FORMATS.

    Raises ExportError for another format or a run without a log, RunLogError for a damaged one.
    """
    if fmt in PLANNED_FORMATS:
        raise ExportError(f"format {fmt} is not available yet; available: {', '.join(FORMATS)}")
    if fmt not in FORMATS:
        raise ExportError(f"format {fmt!r} is unknown; available: {', '.join(FORMATS)}")
    path = run_dir / EVENTS_FILE
    try:
        return _jsonl(path) if fmt == "jsonl" else _csv(path).encode()
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error


def write_export(path: Path, content: bytes) -> None:
    """Whole or not at all. Raises ExportError when the place cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from error


def _jsonl(path: Path) -> bytes:
    """The events as they are; half a line at the end of a crashed run's log is no event."""
    with path.open("rb") as file:
        return b"".join(line for line in file if line.endswith(b"\n"))


def _csv(path: Path) -> str:
    metrics = RunMetrics(keep=None)
    first_at: float | None = None
    for event in read_events(path):
        first_at = event.at if first_at is None else first_at
        metrics.fold(event)
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for timeline in metrics.timelines.values():
        writer.writerow([_cell(value) for value in _row(timeline, first_at or 0.0)])
    return out.getvalue()


def _row(timeline: RequestTimeline, first_at: float) -> Iterator[str | int | float | None]:
    yield from (timeline.request_id, timeline.client_id, timeline.label)
    yield timeline.phase if timeline.has_ended else "in_flight"
    yield timeline.finish_reason or timeline.end_reason
    yield from (timeline.mode, timeline.prefill_worker, timeline.decode_worker, timeline.attempt)
    yield from (timeline.prompt_tokens, timeline.cached_tokens, timeline.output_tokens)
    yield timeline.arrived_at - first_at
    yield timeline.ttft_ms
    yield from (timeline.ttft_parts_ms.get(part) for part in TTFT_PARTS)
    yield from percentiles(timeline.itl_ms, 50, 99)
    yield max(timeline.itl_ms, default=None)
    yield from (timeline.tpot_ms, timeline.e2el_ms)
    yield from (timeline.codec, timeline.kv_tokens, timeline.kv_raw_bytes, timeline.kv_wire_bytes)
    yield timeline.kv_skipped_tokens
    yield timeline.transfer_s * 1000.0 if timeline.transfers else None
    yield timeline.exposed_s * 1000.0 if timeline.transfers else None
    yield from (timeline.fallback, timeline.retries, timeline.migrations)


def _cell(value: str | int | float | None) -> str:
    """Empty for None; text that a spreadsheet would run as a formula gets a quote before it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    return str(round(value, 6))
