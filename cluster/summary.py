"""``summary.json``: a run in one document, made from its events alone. Definitions are in docs/metrics.md."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.atomic_file import write_atomically
from cluster.events import Event
from cluster.metrics import KVTotals, LatencyPools, RunMetrics
from cluster.run_dir import SUMMARY_FILE
from cluster.run_facts import ProcessFacts, RunFacts
from cluster.run_log import EVENTS_FILE, read_events
from cluster.samples import Samples

SCHEMA: Final = 1


def summarize(events: Iterable[Event]) -> dict[str, Any]:
    """The summary of a log, finished or not. A number that nothing was measured for is None, never 0."""
    facts, metrics = RunFacts(), RunMetrics()
    for event in events:
        facts.fold(event)
        metrics.fold(event)
    return summary_of(facts, metrics)


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Read the run's log, write its ``summary.json`` whole or not at all, return it.

    Raises OSError, and RunLogError for a log that cannot be read.
    """
    summary = summarize(read_events(run_dir / EVENTS_FILE))
    write_atomically(
        run_dir / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    )
    return summary


def summary_of(facts: RunFacts, metrics: RunMetrics) -> dict[str, Any]:
    """The document for folds in any state; what ``summarize`` returns for a whole log."""
    started = facts.started
    return {
        "schema": SCHEMA,
        "run": started.run if started else "",
        "profile": started.profile if started else "",
        "model": started.model if started else "",
        "dtype": facts.model.dtype if facts.model else "",
        "mode": facts.modes[-1] if facts.modes else "",
        "modes": facts.modes,
        "codec": facts.codecs[-1] if facts.codecs else "",
        "codecs": facts.codecs,
        "started_wall_at": started.wall_at if started else None,
        "duration_s": round(facts.duration_s, 3),
        "stop_reason": facts.stop_reason,
        "orphans": facts.orphans,
        "requests": _requests(metrics),
        "ttft_ms": _latency(metrics.pools.ttft_ms),
        "itl_ms": _latency(metrics.pools.itl_ms),
        "tpot_ms": _latency(metrics.pools.tpot_ms),
        "e2el_ms": _latency(metrics.pools.e2el_ms),
        "ttft_parts_ms": {
            part: _rounded(total / metrics.finished) if metrics.finished else None
            for part, total in metrics.ttft_parts_ms.items()
        },
        "ttft_ms_by_label": _by_label(metrics, "ttft_ms"),
        "itl_ms_by_label": _by_label(metrics, "itl_ms"),
        "throughput": _throughput(facts, metrics),
        "kv": _kv(facts, metrics),
        "handoff": _handoff(facts, metrics),
        "link": _link(facts),
        "prefill_tokens_per_s": _rounded(facts.prefill_tokens_per_s),
        "b_star_bytes_per_s": _rounded(facts.b_star_bytes_per_s),
        "rho": _rounded(facts.rho),
        "target": facts.tuned.target if facts.tuned else "",
        "target_rho": _rounded(facts.tuned.target_rho) if facts.tuned else None,
        "rho_at_start": _rounded(facts.tuned.rho) if facts.tuned else None,
        "workers": [_process(worker) for worker in facts.workers],
        "router": _process(facts.router) if facts.router else None,
    }


def _requests(metrics: RunMetrics) -> dict[str, Any]:
    return {
        "finished": metrics.finished,
        "failed": metrics.failed.total(),
        "rejected": metrics.rejected.total(),
        "cancelled": metrics.cancelled.total(),
        "retried": metrics.retried,
        "migrated": metrics.migrated,
        "fallbacks": dict(metrics.fallbacks),
        "arrived": metrics.arrived,
        "in_flight": len(metrics.in_flight),
        "cut_off": metrics.cut_off,
        "probes": metrics.num_probes,
        "retries_by_reason": dict(metrics.retries),
        "failed_by_reason": dict(metrics.failed),
        "rejected_by_reason": dict(metrics.rejected),
        "position_errors": metrics.position_errors,
    }


def _latency(samples: Samples) -> dict[str, float | int | None]:
    return _percentiles(samples, 50, 90, 99) | {
        "max": _rounded(samples.max),
        "mean": _rounded(samples.mean),
        "count": samples.count,
    }


def _percentiles(samples: Samples, *qs: int) -> dict[str, float | int | None]:
    return {f"p{q}": _rounded(value) for q, value in zip(qs, samples.percentiles(*qs), strict=True)}


def _by_label(metrics: RunMetrics, name: str) -> dict[str, Any]:
    def pool(pools: LatencyPools) -> Samples:
        return pools.itl_ms if name == "itl_ms" else pools.ttft_ms

    return {label: _latency(pool(pools)) for label, pools in sorted(metrics.pools_by_label.items())}


def _throughput(facts: RunFacts, metrics: RunMetrics) -> dict[str, float | None]:
    """Of finished requests, over the serving time."""
    counts = {
        "requests_per_s": metrics.finished,
        "prompt_tokens_per_s": metrics.prompt_tokens,
        "output_tokens_per_s": metrics.output_tokens,
    }
    duration_s = facts.duration_s
    return {name: _rounded(count / duration_s) if duration_s > 0 else None for name, count in counts.items()}


def _kv(facts: RunFacts, metrics: RunMetrics) -> dict[str, Any]:
    kv = metrics.kv
    return {
        "transfers": kv.transfers,
        "tokens": kv.tokens,
        "raw_bytes": kv.raw_bytes,
        "wire_bytes": kv.wire_bytes,
        "skipped_tokens": kv.skipped_tokens,
        "skipped_bytes": kv.skipped_bytes,
        "ratio": _rounded(kv.raw_bytes / kv.wire_bytes) if kv.wire_bytes else None,
        "exposed_ms": _percentiles(kv.exposed_ms, 50, 99),
        "transfer_ms": _percentiles(kv.transfer_ms, 50, 99),
        "hidden_share": _rounded(kv.hidden_share),
        "hidden_busy_share": _rounded(kv.hidden_busy_share),
        "achieved_bytes_per_s": _rounded(kv.achieved_bytes_per_s),
        "bytes_per_token": facts.model.kv_bytes_per_token if facts.model else None,
        "formula_ok": _formula_ok(facts, kv),
        "failures": dict(metrics.transfer_failures),
    }


def _handoff(facts: RunFacts, metrics: RunMetrics) -> dict[str, Any]:
    handoff = metrics.handoff
    return {
        "settings": facts.handoffs,
        "remote": handoff.choices["remote"],
        "local": handoff.choices["local"],
        "unweighed": handoff.unweighed,
        "forecast_error_ms": _percentiles(handoff.error_ms, 50, 90, 99)
        | {"max": _rounded(handoff.error_ms.max), "count": handoff.error_ms.count},
        "forecast_bias_ms": _rounded(handoff.bias_ms),
        "forecast_error_share": _rounded(handoff.error_share),
    }


def _formula_ok(facts: RunFacts, kv: KVTotals) -> bool | None:
    """Raw bytes are exactly tokens x bytes per token, and without a codec exactly those were on the wire. What was
    skipped keeps the same formula."""
    if facts.model is None:
        return None
    per_token = facts.model.kv_bytes_per_token
    return (
        kv.raw_bytes == kv.tokens * per_token
        and kv.skipped_bytes == kv.skipped_tokens * per_token
        and not kv.unequal_raw
    )


def _link(facts: RunFacts) -> dict[str, Any]:
    link = facts.link
    return {
        "backend": link.backend if link else "",
        "asked_bits_per_s": facts.asked_bits_per_s,
        "achieved_bits_per_s": _rounded(facts.achieved_bits_per_s),
        "achieved_back_bits_per_s": _rounded(facts.back_bits_per_s),
        "achieved_rtt_ms": _rounded(facts.rtt_ms),
        "asked_delay_ms": link.asked_delay_ms if link else 0.0,
        "asked_jitter_ms": link.asked_jitter_ms if link else 0.0,
        "asked_loss": link.asked_loss if link else 0.0,
        "limit": link.limit if link else "",
    }


def _process(process: ProcessFacts) -> dict[str, Any]:
    return {
        "id": process.process_id,
        "role": process.role,
        "pid": process.pid,
        "restarts": process.restarts,
        "exits": process.exits,
        "held_blocks": process.held_blocks,
        "stranded_blocks": process.stranded_blocks,
        "peak_rss_bytes": process.peak_rss_bytes,
        "prefill_tokens_per_s": _rounded(process.prefill_tokens_per_s),
        "late_frames": process.late_frames,
        "preemptions": process.preemptions,
        "failed": process.failed,
    }


def _rounded(value: float | None) -> float | None:
    """To a millionth: nobody measures finer, and a document should not pretend to."""
    return None if value is None else round(value, 6)
