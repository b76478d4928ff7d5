"""A forecast beside what a real cluster gave for the same requests. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cluster.events import Event
from cluster.metrics import RunMetrics, Slos
from cluster.request_timeline import TTFT_PARTS
from cluster.samples import Samples
from cluster.sim_figures import SimFigures

GOAL: Final = 0.15
"""How far off p50 and p90 may be before the document says that the goal was missed."""

_JUDGED: Final = ("p50", "p90")


def fold_run(events: Iterable[Event]) -> RunMetrics:
    metrics = RunMetrics()
    for event in events:
        metrics.fold(event)
    return metrics


def validation_document(
    forecast: SimFigures, measured: RunMetrics, slos: Slos, duration_s: float, client: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON-ready. ``error`` is forecast over measured less 1; None where either is missing. ``duration_s``: first
    arrival to last end, as the forecast's."""
    rows = [
        *_rows("ttft_ms", forecast.ttft_ms, measured.pools.ttft_ms),
        *_rows("itl_ms", forecast.itl_ms, measured.pools.itl_ms),
        _row("goodput_per_s", "", forecast.goodput_per_s, measured.goodput(slos, duration_s)),
    ]
    judged = [abs(row["error"]) for row in rows if row["q"] in (*_JUDGED, "") and row["error"] is not None]
    finished = max(1, measured.finished)
    return {
        "rows": rows,
        "goal": GOAL,
        "worst_error": max(judged, default=None),
        "goal_met": bool(judged) and max(judged) <= GOAL,
        "finished": {"forecast": forecast.finished, "measured": measured.finished},
        "ttft_parts_ms": {
            "forecast": dict(forecast.ttft_parts_ms),
            "measured": {part: measured.ttft_parts_ms[part] / finished for part in TTFT_PARTS},
        },
        "client": dict(client),
    }


def _rows(name: str, forecast: Mapping[str, float | None], pool: Samples) -> list[dict[str, Any]]:
    return [_row(name, q, forecast[q], pool.percentile(float(q[1:]))) for q in ("p50", "p90", "p99")]


def _row(name: str, q: str, forecast: float | None, measured: float | None) -> dict[str, Any]:
    error = forecast / measured - 1 if forecast is not None and measured else None
    return {"figure": name, "q": q, "forecast": forecast, "measured": measured, "error": error}
