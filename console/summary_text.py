"""What a run left on disk: its ``summary.json``, and what of its log could not be read."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from cluster.run_dir import SUMMARY_FILE
from cluster.run_log import PassedOver
from console.text_format import clean

MIN_SERVED_TOKENS: Final = 1000
"""Prompt tokens of finished requests below which a run's prefill rate is that of its start-up probes, far too low."""


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that has stopped; None when it left none (or half of one)."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def prefill_figure(summary: dict[str, Any] | None, name: str) -> float | None:
    """A figure that follows from the prefill rate; None for a run that served too little to have measured it."""
    found = summary or {}
    per_s = (found.get("throughput") or {}).get("prompt_tokens_per_s") or 0.0
    served = per_s * (found.get("duration_s") or 0.0)
    value = found.get(name)
    return float(value) if value and served >= MIN_SERVED_TOKENS else None


def tell_passed(run: str, passed: PassedOver) -> None:
    """Say on stderr what of a run's log was left out; nothing when all was read."""
    if passed.numbers:
        print(f"pdconsole: run {clean(run)}: {passed}", file=sys.stderr)
