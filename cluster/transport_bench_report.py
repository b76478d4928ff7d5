"""The transport's benchmark as one document: what was measured where, every raw sample, and what they come to. Pure."""

import importlib.metadata
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from cluster.samples import percentiles
from cluster.transport_bench_messages import (
    CONDITIONS,
    IPERF3,
    Case,
    Measured,
    Sample,
    StepsMeasured,
    TransportBenchResult,
    TransportBenchSpec,
)
from engine.config import ModelConfig

SCHEMA: Final = 1
GOAL_OF_IPERF3: Final = 0.9
GOAL_OF_ASKED: Final = 0.95
GOAL_DELAY: Final = 0.05


def transport_bench_document(
    spec: TransportBenchSpec, config: ModelConfig, machine: Mapping[str, Any], result: TransportBenchResult
) -> dict[str, Any]:
    """JSON-ready. ``machine`` is ``machine_facts()``.

    Rates are payload bytes over the time from the first frame handed to the socket to the acknowledgement.
    ``share_of_iperf3`` is the median over rounds of ours against iperf3's one stream in the same round, over the same
    path at the same rate. ``extra_bytes`` are the most by which a process grew. A step's ``delay`` is the median over
    repeats of how much longer a prompt's steps took than without a transfer, as a share.
    """
    iperf3 = {(m.case.place, m.case.bits_per_s): m.samples for m in result.measured if m.case.way == IPERF3}
    paths = [_path(m, spec, iperf3.get((m.case.place, m.case.bits_per_s))) for m in result.measured]
    steps = [_steps(measured, spec) for measured in result.steps]
    return {
        "schema": SCHEMA,
        "benchmark": "transport",
        "machine": {**machine, "ends": {role: list(cores) for role, cores in result.cores.items()}},
        "versions": {
            "pdconsole": importlib.metadata.version("pdconsole"),
            "python": platform.python_version(),
            "torch": result.torch_version,
            "xxhash": importlib.metadata.version("xxhash"),
            "iperf3": result.iperf3_version,
        },
        "model": {
            "id": spec.model,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "kv_bytes_per_token": spec.bytes_per_token,
            "block_size": spec.engine.block_size,
        },
        "dtype": spec.dtype,
        "repeats": spec.repeats,
        "congestion_control": result.congestion_control,
        "paths": paths,
        "steps": steps,
        "goals": [*_rate_goals(paths, spec), *_step_goals(steps)],
        "missing": list(result.missing),
    }


def _path(measured: Measured, spec: TransportBenchSpec, iperf3: Sequence[Sample] | None) -> dict[str, Any]:
    case, samples = measured.case, measured.samples
    rates = [_rate(sample) for sample in samples]
    of_iperf3 = None
    if iperf3 is not None and case.way != IPERF3:
        of_iperf3 = statistics.median(rate / _rate(other) for rate, other in zip(rates, iperf3, strict=True))
    return {
        "place": case.place,
        "way": case.way,
        "bytes": case.num_tokens * spec.bytes_per_token or None,
        "asked_bits_per_s": case.bits_per_s,
        "bytes_per_s": _spread(rates),
        "share_of_asked": _share_of_asked(case, rates),
        "share_of_iperf3": of_iperf3,
        "sender_cpu_s_per_gb": _per_gb(samples, lambda sample: sample.sender_cpu_s),
        "receiver_cpu_s_per_gb": _per_gb(samples, lambda sample: sample.receiver_cpu_s),
        "sender_extra_bytes": _most(sample.sender_extra_bytes for sample in samples),
        "receiver_extra_bytes": _most(sample.receiver_extra_bytes for sample in samples),
        "samples": [msgspec.to_builtins(sample) for sample in samples],
    }


def _share_of_asked(case: Case, rates: Sequence[float]) -> float | None:
    return statistics.median(rates) * 8 / case.bits_per_s if case.bits_per_s else None


def _steps(measured: StepsMeasured, spec: TransportBenchSpec) -> dict[str, Any]:
    assert spec.steps is not None
    stepped = measured.stepped
    alone = [sum(steps) for steps in stepped.step_s["alone"]]
    conditions = []
    for condition in CONDITIONS:
        took = [sum(steps) for steps in stepped.step_s[condition]]
        conditions.append(
            {
                "condition": condition,
                "prefill_ms": _spread([1e3 * seconds for seconds in took]),
                "delay": statistics.median(mine / base for mine, base in zip(took, alone, strict=True)) - 1,
                "sent_bytes": statistics.median(stepped.sent_bytes[condition]),
                "step_s": stepped.step_s[condition],
            }
        )
    return {
        "place": measured.place,
        "asked_bits_per_s": measured.bits_per_s,
        "prompt_tokens": spec.steps.prompt_tokens,
        "conditions": conditions,
    }


def _rate_goals(paths: Sequence[dict[str, Any]], spec: TransportBenchSpec) -> list[dict[str, Any]]:
    goals = []
    largest = max(spec.sizes) * spec.bytes_per_token
    for path in paths:
        if path["way"] != "v2":
            continue
        size = f"{path['bytes'] / 1e6:.0f} MB over {path['place']}"
        if path["asked_bits_per_s"]:
            rate = f"{path['asked_bits_per_s'] / 1e9:g} Gb/s"
            goals.append(_goal(f"v2 reaches {rate}, {size}", GOAL_OF_ASKED, path["share_of_asked"]))
        elif path["bytes"] == largest and path["share_of_iperf3"] is not None:
            goals.append(_goal(f"v2 beside iperf3, {size}", GOAL_OF_IPERF3, path["share_of_iperf3"]))
    return goals


def _step_goals(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        _goal(
            f"steps go on, {condition['condition']}, {measured['place']}",
            1 / (1 + GOAL_DELAY),
            1 / (1 + condition["delay"]),
        )
        for measured in steps
        for condition in measured["conditions"]
        if condition["condition"] != "alone"
    ]


def _goal(name: str, at_least: float, actual: float) -> dict[str, Any]:
    return {"goal": name, "at_least": at_least, "actual": actual, "ok": actual >= at_least}


def _rate(sample: Sample) -> float:
    return sample.num_bytes / sample.duration_s


def _per_gb(samples: Sequence[Sample], cpu_s: Callable[[Sample], float]) -> float:
    return statistics.median(cpu_s(sample) / sample.num_bytes * 1e9 for sample in samples)


def _most(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    p10, median, p90 = percentiles(values, 10, 50, 90)
    return {"p10": p10, "median": median, "p90": p90}
