"""The interference benchmark as one document: every round's figures, each arm's median and spread, and what they say.
Pure.
"""

import importlib.metadata
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cluster.interference_bench import (
    IDLE_LIMIT,
    LAG_LIMIT_MS,
    LOAD,
    ClientFigures,
    InterferenceResult,
    InterferenceSpec,
    Round,
)
from cluster.interference_bench_fold import BURST, STALL_MS, STEADY, PhaseFigures
from cluster.interference_bench_verdict import cost, verdict
from cluster.planner import kv_bytes_per_token
from cluster.profile import Profile
from cluster.samples import percentiles
from cluster.slo import format_slos
from engine.config import ModelConfig

SCHEMA: Final = 1
CURVE_SHARES: Final = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0)
"""Shares of time that a chart is drawn from."""


def interference_document(
    spec: InterferenceSpec,
    profile: Profile,
    config: ModelConfig,
    dtype: str,
    machine: Mapping[str, Any],
    result: InterferenceResult,
) -> dict[str, Any]:
    """JSON-ready. ``machine`` is ``machine_facts()``.

    An arm's ``summary`` holds ``{"median", "min", "max"}`` of each figure over its valid rounds, or over all where none
    is valid (``valid`` 0); None where no round had a sample. The figures' names are those of a round's ``alone`` and
    ``bursts``, which docs/metrics.md defines.
    """
    load, burst, cluster = profile.load[LOAD], profile.burst, profile.cluster
    workers = cluster.prefill + cluster.decode
    cores = min(workers * cluster.cores_per_worker, int(machine["cores"]))
    arms = []
    for arm in spec.arms:
        rounds = [each for each in result.rounds if each.arm == arm.name]
        valid = [each for each in rounds if not each.invalid]
        arms.append(
            {
                "name": arm.name,
                "mode": arm.mode,
                "max_num_batched_tokens": arm.budget,
                "whole_prompt": arm.is_whole,
                "handoff": arm.handoff,
                "valid": len(valid),
                "rounds": [_round(each, cores) for each in rounds],
                "summary": _summary([_round(each, cores) for each in valid or rounds]),
                "curves": {
                    "alone": _curve(rounds, lambda each: [*each.alone.itl_ms, *each.alone.burst_itl_ms]),
                    "in_burst": _curve(rounds, lambda each: each.bursts.burst_itl_ms),
                },
            }
        )
    return {
        "schema": SCHEMA,
        "benchmark": "interference",
        "machine": dict(machine),
        "versions": {
            "pdconsole": importlib.metadata.version("pdconsole"),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "numba": importlib.metadata.version("numba"),
        },
        "profile": profile.name,
        "model": {
            "id": profile.model.id,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "kv_bytes_per_token": kv_bytes_per_token(config, dtype),
        },
        "dtype": dtype,
        "workers": {"prefill": cluster.prefill, "decode": cluster.decode, "cores": cores},
        "workload": {
            "streams": load.streams,
            "prompt_tokens": load.prompt_tokens,
            "max_tokens": load.max_tokens,
            "burst_every_s": load.burst_every_s,
            "burst_prompts": burst.prompts,
            "burst_prompt_tokens": burst.prompt_tokens,
            "burst_max_tokens": burst.max_tokens,
        },
        "link": profile.link.bandwidth,
        "codec": profile.kv.codec,
        "seconds": spec.seconds,
        "repeats": spec.repeats,
        "slo": format_slos(spec.slos),
        "limits": {"lag_ms": LAG_LIMIT_MS, "idle_share": IDLE_LIMIT, "stall_ms": STALL_MS},
        "arms": arms,
        "verdict": verdict(arms),
        "cost": cost(arms),
    }


def _round(found: Round, cores: int) -> dict[str, Any]:
    return {
        "repeat": found.repeat + 1,
        "run": found.run,
        "invalid": found.invalid,
        "alone": _phase(found.alone, cores) | _client(found.client_alone),
        "bursts": _phase(found.bursts, cores) | _client(found.client_bursts),
    }


def _phase(phase: PhaseFigures, cores: int) -> dict[str, Any]:
    """Milliseconds, rates per second of the phase; None where nothing was measured."""
    seconds, finished = phase.seconds, phase.finished.total()
    return {
        "seconds": seconds,
        "burst_seconds": phase.burst_seconds,
        "bursts": phase.bursts,
        "itl_ms": _latency(phase.itl_ms),
        "burst_itl_ms": _latency(phase.burst_itl_ms),
        "stalled_share": phase.stalled_share,
        "ttft_ms": _latency(phase.ttft_ms),
        "burst_ttft_ms": _latency(phase.burst_ttft_ms),
        "prompt_ttft_ms": _latency(phase.prompt_ttft_ms),
        "unanswered": phase.unanswered,
        "stream_tokens_per_s": phase.stream_tokens / seconds,
        "burst_stream_tokens_per_s": (
            phase.burst_stream_tokens / phase.burst_seconds if phase.burst_seconds else None
        ),
        "tokens_per_s": phase.tokens / seconds,
        "tokens_per_s_per_core": phase.tokens / seconds / cores,
        "finished": finished,
        "goodput_per_s": {label: phase.good[label] / seconds for label in (STEADY, BURST)},
        "good_share": {
            label: phase.good[label] / phase.finished[label] if phase.finished[label] else None
            for label in (STEADY, BURST)
        },
        "failed": dict(phase.failed),
        "fallbacks": phase.fallbacks,
        "kv": {"transfers": phase.transfers, "raw_bytes": phase.kv_bytes, "wire_bytes": phase.kv_wire_bytes},
        "kv_bytes_per_s": phase.kv_wire_bytes / seconds,
        "cpu": phase.cpu,
        "idle_share": phase.idle_share,
    }


def _client(client: ClientFigures) -> dict[str, Any]:
    return {
        "client": {
            "lag_ms": {"p99": client.lag_p99_ms, "max": client.lag_max_ms},
            "burst_lag_ms": client.burst_lag_ms,
            "cpu": client.cpu,
        }
    }


def _latency(values: Sequence[float]) -> dict[str, float | int | None]:
    p50, p99, largest = percentiles(values, 50, 99, 100)
    return {"p50": p50, "p99": p99, "max": largest, "count": len(values)}


def _summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {phase: _folded([each[phase] for each in rounds]) for phase in ("alone", "bursts")}


def _folded(values: Sequence[Any]) -> Any:
    """Mappings of the same shape into one whose leaves are median, min and max. A process that one round lacks and
    reasons of failures are summed up over those that have them."""
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], Mapping):
        keys = dict.fromkeys(key for value in known for key in value)
        return {key: _folded([value.get(key) for value in known]) for key in keys}
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def _curve(rounds: Sequence[Round], of: Callable[[Round], list[float]]) -> list[float]:
    """For each of ``CURVE_SHARES`` the gap (ms) such that the streams spent that share of their time in longer ones;
    over all rounds, [] without a gap. By time, because a stall of seconds is one gap among hundreds of short ones."""
    gaps = np.sort(np.array([gap for each in rounds for gap in of(each)]))
    if not gaps.size or not gaps[-1]:
        return []
    spent = np.cumsum(gaps)
    places = np.searchsorted(spent, (1 - np.array(CURVE_SHARES)) * spent[-1])
    return [float(gap) for gap in gaps[np.minimum(places, gaps.size - 1)]]
