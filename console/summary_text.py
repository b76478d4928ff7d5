"""A run's ``summary.json`` as it lies on disk."""

import json
from pathlib import Path
from typing import Any

from cluster.run_dir import SUMMARY_FILE


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that has stopped; None when it left none (or half of one)."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None
