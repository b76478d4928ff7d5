"""An engine benchmark's document as a page for a person. Pure: a document in, text out."""

from collections.abc import Callable
from typing import Any, Final

from cluster.units import format_bytes
from console.run_page import number
from console.text_format import clean

_BUSY_BELOW: Final = 0.95
_PART_NAMES: Final = {
    "gate_up": "gate, up",
    "norms": "norms, residual",
    "rope_kv_write": "rope, write of KV",
    "silu": "SiLU",
    "model_rest": "rest of the model",
    "scheduler_sampler": "scheduler, sampler",
}


def engine_bench_text(document: dict[str, Any]) -> str:
    """Sections apart by a blank line. ``document``: see ``engine_bench_document``."""
    sections = [
        _head(document),
        _prefill(document["prefill"]),
        _decode(document["decode"]),
        *(_where(times) for times in document["where"]),
        _remarks(document),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(document: dict[str, Any]) -> list[str]:
    machine, engine, limits = document["machine"], document["engine"], document["limits"]
    flags = " ".join(machine["flags"])
    repeats = f"{document['repeats']} repeat{'' if document['repeats'] == 1 else 's'}"
    return [
        f"engine of {clean(document['model']['id'])} in {document['dtype']} on core {machine['core']}, "
        f"{document['kernels']} kernels, torch {document['versions']['torch']}",
        f"{clean(machine['cpu']) or 'unknown CPU'}: {flags}",
        f"this core's limits: {number(limits['matmul']['flops_per_s'] / 1e9)} GFLOP/s in matrix products, "
        f"{number(limits['memory_read']['bytes_per_s'] / 1e9)} GB/s from memory",
        f"{repeats}, cases in turns; median, and p10 to p90 in brackets; "
        f"{engine['max_num_batched_tokens']} tokens a step",
    ]


def _prefill(cases: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'PREFILL tokens':>14}{'tokens/s':>26}{'TTFT ms':>26}{'GFLOP/s':>10}{'of limit':>10}"]
    for case in cases:
        label = f"{case['prompt_tokens']:>14,}"
        lines.append(
            _row(
                label,
                case,
                lambda case: (
                    f"{_spread(case['tokens_per_s']):>26}{_spread(case['ttft_ms']):>26}"
                    f"{number(case['flops_per_s'] / 1e9):>10}{_percent(case['share_of_limit']):>10}"
                ),
            )
        )
    return lines


def _decode(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'DECODE batch':>14}{'context':>10}{'ms per step':>26}{'tokens/s':>16}{'GB/s':>10}{'of limit':>10}"
    ]
    for case in cases:
        label = f"{case['batch']:>14,}{case['context']:>10,}"
        lines.append(
            _row(
                label,
                case,
                lambda case: (
                    f"{_spread(case['step_ms']):>26}{number(case['tokens_per_s']['median']):>16}"
                    f"{number(case['bytes_per_s'] / 1e9):>10}{_percent(case['share_of_limit']):>10}"
                ),
            )
        )
    return lines


def _row(label: str, case: dict[str, Any], figures: Callable[[dict[str, Any]], str]) -> str:
    return f"{label}  not measured: {case['problem']}" if case["problem"] else label + figures(case)


def _where(times: dict[str, Any]) -> list[str]:
    is_prefill = times["work_unit"] == "flops"
    what = (
        f"prefill of {times['prefill_tokens']:,} tokens"
        if is_prefill
        else f"one decode step, batch {times['batch']}, context {times['context']:,}"
    )
    lines = [
        f"where the time goes: {what}, {number(times['total_ms'])} ms with timers",
        f"  {'part':20}{'ms':>10}{'share':>10}{'GFLOP/s' if is_prefill else 'GB/s':>10}{'of limit':>10}",
    ]
    for part in times["parts"]:
        name = _PART_NAMES.get(part["part"], part["part"])
        rate = None if part["work_per_s"] is None else part["work_per_s"] / 1e9
        lines.append(
            f"  {name:20}{number(part['ms']):>10}{_percent(part['share']):>10}{number(rate):>10}"
            f"{_percent(part['share_of_limit']):>10}"
        )
    return lines


def _remarks(document: dict[str, Any]) -> list[str]:
    """What a reader has to know to believe the figures."""
    cases = [case for case in (*document["prefill"], *document["decode"]) if not case["problem"]]
    lines = []
    least = min((case["cpu_share"] for case in cases), default=1.0)
    if least < _BUSY_BELOW:
        lines.append(
            f"the core was not free: in one case other processes had it {_percent(1 - least)} of the time"
        )
    caches = document["machine"]["caches"]
    if caches and any(share > 1.0 for share in _memory_shares(document)):
        name, size = max(caches.items(), key=lambda cache: cache[1])
        lines.append(f"above 100 %: part of the weights was read from a cache ({name}, {format_bytes(size)})")
    return lines


def _memory_shares(document: dict[str, Any]) -> list[float]:
    """Of every decode step and every part of one."""
    parts = [part for times in document["where"] if times["work_unit"] == "bytes" for part in times["parts"]]
    shares = [row["share_of_limit"] for row in (*document["decode"], *parts)]
    return [share for share in shares if share is not None]


def _spread(summary: dict[str, float]) -> str:
    return f"{number(summary['median'])} ({number(summary['p10'])} - {number(summary['p90'])})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %" if share >= 0.0995 else f"{share * 100:.1f} %"
