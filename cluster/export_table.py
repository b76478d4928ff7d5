"""Requests of a run as a table, one row each in order of arrival: CSV, and Parquet where pyarrow is installed."""

import csv
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cluster.metrics import RunMetrics
from cluster.request_timeline import TTFT_PARTS, RequestTimeline
from cluster.run_log import PassedOver, read_events
from cluster.samples import percentiles

COLUMNS: Final = (
    "request_id", "client_id", "label", "outcome", "reason", "mode", "prefill_worker", "decode_worker", "attempt",
    "prompt_tokens", "cached_tokens", "output_tokens", "arrived_at_s", "ttft_ms",
    *(f"{part}_ms" for part in TTFT_PARTS),
    "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_ms", "e2el_ms",
    "codec", "kv_tokens", "kv_raw_bytes", "kv_wire_bytes", "kv_skipped_tokens", "transfer_ms", "exposed_ms",
    "fallback", "retries", "migrations",
)  # fmt: skip
"""``arrived_at_s`` counts from the run's first event."""

_TEXTS: Final = frozenset(
    (
        "request_id", "client_id", "label", "outcome", "reason", "mode", "prefill_worker", "decode_worker",
        "codec", "fallback",
    )
)  # fmt: skip
"""Columns of text; of the others, times are floats and the rest integers."""

_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")

Cell = str | int | float | None


class MissingLibraryError(Exception):
    """A format needs a library that is not installed; the message names it."""


def rows_of(log: Path, passed: PassedOver) -> Iterator[tuple[Cell, ...]]:
    """Cells in the order of COLUMNS; None: not measured. Raises OSError and RunLogError."""
    metrics = RunMetrics(keep=None)
    first_at: float | None = None
    for event in read_events(log, passed):
        first_at = event.at if first_at is None else first_at
        metrics.fold(event)
    for timeline in metrics.timelines.values():
        yield tuple(_row(timeline, first_at or 0.0))


def to_csv(log: Path, passed: PassedOver) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows_of(log, passed):
        writer.writerow([_csv_cell(value) for value in row])
    return out.getvalue().encode()


def to_parquet(log: Path, passed: PassedOver) -> bytes:
    """Raises MissingLibraryError without pyarrow."""
    try:
        pa = importlib.import_module("pyarrow")
        pq = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingLibraryError(
            "format parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    columns: list[list[Cell]] = [list(column) for column in zip(*rows_of(log, passed), strict=True)]
    columns = columns or [[] for _ in COLUMNS]
    fields = [pa.field(name, _arrow_type(pa, name)) for name in COLUMNS]
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, fields, strict=True)]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), out)
    return out.getvalue()


def _arrow_type(pa: Any, name: str) -> Any:
    if name in _TEXTS:
        return pa.string()
    return pa.float64() if name.endswith(("_ms", "_s")) else pa.int64()


def _row(timeline: RequestTimeline, first_at: float) -> Iterator[Cell]:
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


def _csv_cell(value: Cell) -> str:
    """Empty for None; text that a spreadsheet would run as a formula gets a quote before it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    return str(round(value, 6))
