"""Forecasts beside what real clusters gave for the same requests. Pure.

A machine is now faster and now slower, so a split is forecast and run several times in turns: medians are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from cluster.events import Event, RequestArrived, RequestFinished
from cluster.metrics import RunMetrics, Slos
from cluster.request_timeline import TTFT_PARTS
from cluster.sim_figures import SimFigures

GOAL: Final = 0.15
"""How far off p50 and p90 may be before the document says that the goal was missed."""

_QUANTILES: Final = ("p50", "p90", "p99")
_JUDGED: Final = ("p50", "p90", "")


@dataclass(frozen=True, slots=True)
class Trial:
    """One split, forecast and run once. ``alone``: forecast from the engine's benchmark, without any correction."""

    run: str
    forecast: SimFigures
    alone: SimFigures
    measured: RunMetrics
    duration_s: float  # first arrival to last end, as the forecast's
    client_lag_s: float  # p99
    costs_from: str
    corrected_by: str


def fold_run(events: Iterable[Event]) -> tuple[RunMetrics, float]:
    """A run's metrics, and the seconds from its first arrival to its last end, probes left out."""
    metrics = RunMetrics()
    arrived: dict[str, float] = {}
    ended_at = 0.0
    for event in events:
        metrics.fold(event)
        if isinstance(event, RequestArrived) and event.label != "probe":
            arrived[event.request_id] = event.at
        elif isinstance(event, RequestFinished) and event.request_id in arrived:
            ended_at = max(ended_at, event.at)
    return metrics, max(0.0, ended_at - min(arrived.values(), default=ended_at))


def split_document(trials: Sequence[Trial], slos: Slos) -> dict[str, Any]:
    """JSON-ready, of trials of one split. ``error`` is forecast over measured less 1, of their medians; None where
    either is missing."""
    rows = [
        _row(figure, q, [_figures(trial, slos, figure, q) for trial in trials])
        for figure, q in [
            *((name, q) for name in ("ttft_ms", "itl_ms") for q in _QUANTILES),
            ("goodput_per_s", ""),
        ]
    ]
    judged = [abs(row["error"]) for row in rows if row["q"] in _JUDGED and row["error"] is not None]
    return {
        "split": trials[0].forecast.name,
        "runs": [trial.run for trial in trials],
        "costs_from": [trial.costs_from for trial in trials],
        "corrected_by": [trial.corrected_by for trial in trials],
        "rows": rows,
        "worst_error": max(judged, default=None),
        "goal_met": bool(judged) and max(judged) <= GOAL,
        "finished": {
            "forecast": [trial.forecast.finished for trial in trials],
            "measured": [trial.measured.finished for trial in trials],
        },
        "ttft_parts_ms": {
            "forecast": _means([trial.forecast.ttft_parts_ms for trial in trials]),
            "measured": _means([_parts_ms(trial.measured) for trial in trials]),
        },
        "client": {"schedule_lag_p99_ms": max(trial.client_lag_s for trial in trials) * 1e3},
    }


def _figures(
    trial: Trial, slos: Slos, figure: str, q: str
) -> tuple[float | None, float | None, float | None]:
    """Forecast, forecast from the benchmark alone, measured."""
    if not q:
        measured = trial.measured.goodput(slos, trial.duration_s)
        return trial.forecast.goodput_per_s, trial.alone.goodput_per_s, measured
    pool = getattr(trial.measured.pools, figure)
    return getattr(trial.forecast, figure)[q], getattr(trial.alone, figure)[q], pool.percentile(float(q[1:]))


def _row(
    figure: str, q: str, triples: Sequence[tuple[float | None, float | None, float | None]]
) -> dict[str, Any]:
    forecasts, alones, measureds = (
        [value for value in values if value is not None] for values in zip(*triples, strict=True)
    )
    forecast, alone, measured = (median(each) if each else None for each in (forecasts, alones, measureds))
    return {
        "figure": figure,
        "q": q,
        "forecast": forecast,
        "forecasts": forecasts,
        "measured": measured,
        "measurements": measureds,
        "error": _error(forecast, measured),
        "alone": alone,
        "alone_error": _error(alone, measured),
    }


def _error(forecast: float | None, measured: float | None) -> float | None:
    return forecast / measured - 1 if forecast is not None and measured else None


def _parts_ms(measured: RunMetrics) -> dict[str, float]:
    return {part: measured.ttft_parts_ms[part] / max(1, measured.finished) for part in TTFT_PARTS}


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in parts) / len(parts) for name in parts[0]}
