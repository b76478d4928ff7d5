"""An engine's benchmark as one document: what was measured where, every raw sample, and what they come to. Pure."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cluster.samples import percentiles
from engine.benchmark_plan import BenchmarkSpec, PrefillCase
from engine.benchmark_result import (
    BenchmarkResult,
    DecodeSamples,
    LimitSamples,
    PartTimes,
    PrefillSamples,
)
from engine.config import ModelConfig
from engine.step_cost import decode_bytes, prefill_flops

SCHEMA: Final = 1


def engine_bench_document(
    spec: BenchmarkSpec, config: ModelConfig, core: int, machine: Mapping[str, Any], result: BenchmarkResult
) -> dict[str, Any]:
    """JSON-ready. ``machine`` is ``machine_facts()``.

    Times are seconds in samples and milliseconds in summaries. Every summary is ``{"p10", "median", "p90"}``. The
    ``share_of_limit`` of a prefill is FLOPs over median TTFT over the core's best product; that of a decode step is
    bytes over median time over the memory's best rate. FLOPs and bytes: see ``engine.step_cost``.
    """
    bytes_per_token = config.kv_bytes_per_token(result.dtype)
    limits = _limits(result.limits)
    flops_limit, bytes_limit = limits["matmul"]["flops_per_s"], limits["memory_read"]["bytes_per_s"]
    return {
        "schema": SCHEMA,
        "benchmark": "engine",
        "machine": {**machine, "core": core},
        "versions": {
            "pdconsole": importlib.metadata.version("pdconsole"),
            "python": platform.python_version(),
            "torch": result.torch_version,
            "numba": _version_of("numba"),
        },
        "model": {
            "id": result.model,
            "architecture": config.architecture,
            "parameters": config.num_parameters,
            "kv_bytes_per_token": bytes_per_token,
            "max_model_len": config.max_model_len,
        },
        "dtype": result.dtype,
        "kernels": result.kernels,
        "repeats": spec.repeats,
        "engine": dataclasses.asdict(spec.engine)
        | {
            "num_blocks": result.num_blocks,
            "kv_cache_bytes": result.num_blocks * spec.engine.block_size * bytes_per_token,
        },
        "limits": limits,
        "prefill": [_prefill(samples, config, flops_limit) for samples in result.prefill],
        "decode": [_decode(samples, config, result.dtype, bytes_limit) for samples in result.decode],
        "where": [_where(times, config, result.dtype, flops_limit, bytes_limit) for times in result.where],
    }


def _version_of(distribution: str) -> str | None:
    """None = not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _limits(limits: LimitSamples) -> dict[str, Any]:
    """Of each limit the best sample of all: what the core was seen to be able to do."""
    products = [
        {
            "name": product.name,
            "rows_in_out": list(product.shape),
            "flops_per_s": max(product.flops_per_s),
            "samples": product.flops_per_s,
        }
        for product in limits.matmul
    ]
    return {
        "matmul": {
            "flops_per_s": max(max(product.flops_per_s) for product in limits.matmul),
            "products": products,
        },
        "memory_read": {
            "bytes_per_s": max(limits.memory_bytes_per_s),
            "buffer_bytes": limits.memory_buffer_bytes,
            "samples": limits.memory_bytes_per_s,
        },
    }


def _prefill(samples: PrefillSamples, config: ModelConfig, flops_limit: float) -> dict[str, Any]:
    tokens = samples.case.prompt_tokens
    flops = sum(prefill_flops(config, tokens).values())
    ttft = _summary(samples.ttft_s, 1000.0)
    flops_per_s = _rate(flops, ttft)
    return {
        "prompt_tokens": tokens,
        "problem": samples.problem,
        "flops": flops,
        "ttft_s": list(samples.ttft_s),
        "ttft_ms": ttft,
        "tokens_per_s": _summary([tokens / seconds for seconds in samples.ttft_s]),
        "flops_per_s": flops_per_s,
        "share_of_limit": None if flops_per_s is None else flops_per_s / flops_limit,
        "cpu_share": samples.cpu_share,
    }


def _decode(samples: DecodeSamples, config: ModelConfig, dtype: str, bytes_limit: float) -> dict[str, Any]:
    case = samples.case
    num_bytes = sum(decode_bytes(config, dtype, [case.num_keys] * case.batch).values())
    steps_s = [seconds for repeat in samples.step_s for seconds in repeat]
    step = _summary(steps_s, 1000.0)
    bytes_per_s = _rate(num_bytes, step)
    return {
        "batch": case.batch,
        "context": case.context,
        "problem": samples.problem,
        "bytes": num_bytes,
        "step_s": [list(repeat) for repeat in samples.step_s],
        "step_ms": step,
        "tokens_per_s": _summary([case.batch / seconds for seconds in steps_s]),
        "bytes_per_s": bytes_per_s,
        "share_of_limit": None if bytes_per_s is None else bytes_per_s / bytes_limit,
        "cpu_share": samples.cpu_share,
    }


def _where(
    times: PartTimes, config: ModelConfig, dtype: str, flops_limit: float, bytes_limit: float
) -> dict[str, Any]:
    """Parts by falling time. ``work`` is FLOPs in a prefill and bytes in a decode step, None for a part without any."""
    case = times.case
    if isinstance(case, PrefillCase):
        what: dict[str, Any] = {"prefill_tokens": case.prompt_tokens}
        unit, limit, work = "flops", flops_limit, prefill_flops(config, case.prompt_tokens)
    else:
        what = {"batch": case.batch, "context": case.context}
        unit, limit = "bytes", bytes_limit
        work = decode_bytes(config, dtype, [case.num_keys] * case.batch)
    parts = []
    for name, seconds in sorted(times.parts_s.items(), key=lambda item: -item[1]):
        amount = work.get(name)
        parts.append(
            {
                "part": name,
                "ms": seconds * 1000.0,
                "share": seconds / times.total_s,
                "work": amount,
                "work_per_s": None if amount is None else amount / seconds,
                "share_of_limit": None if amount is None else amount / seconds / limit,
            }
        )
    return {**what, "total_ms": times.total_s * 1000.0, "work_unit": unit, "parts": parts}


def _summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """p10, median and p90 of ``values`` times ``scale``; None of nothing."""
    found: Iterable[float | None] = percentiles([value * scale for value in values], 10, 50, 90)
    return dict(zip(("p10", "median", "p90"), found, strict=True))


def _rate(work: int, summary_ms: Mapping[str, float | None]) -> float | None:
    median = summary_ms["median"]
    return None if median is None else work * 1000.0 / median
