"""A drill's verdict, and the list of drills, for people. Pure: text out."""

import textwrap
from collections.abc import Sequence
from typing import Final

from cluster.drill import Drill
from cluster.drill_judge import Judged, Verdict
from console.text_format import clean

_WIDTH: Final = 100


def list_text(drills: Sequence[Drill]) -> str:
    """Name and title of each, its promise below."""
    width = max(len(drill.name) for drill in drills)
    lines = []
    for drill in drills:
        lines.append(f"{drill.name:{width}}  {drill.title}")
        lines += textwrap.wrap(
            drill.promise,
            _WIDTH,
            initial_indent=" " * (width + 4),
            subsequent_indent=" " * (width + 4),
        )
    return "\n".join(lines)


def verdict_text(drill: Drill, verdict: Verdict, run: str, run_dir: str) -> str:
    """One line for each expectation; below one that is not met, what to look at."""
    lines = [
        f"drill {clean(drill.name)}: {'PASS' if verdict.is_pass else 'FAIL'}",
        clean(verdict.headline),
        f"run {run} in {clean(run_dir)}",
        "",
    ]
    width = max(len(judged.name) for judged in verdict.expectations)
    lines += [line for judged in verdict.expectations for line in _lines(judged, width)]
    return "\n".join(lines)


def _lines(judged: Judged, width: int) -> list[str]:
    mark = "ok  " if judged.ok else "FAIL"
    lines = [f"{mark}  {judged.name:{width}}  {clean(judged.text)} (expected {judged.expected})"]
    if not judged.ok:
        lines += [f"        look at {clean(where)}" for where in judged.look_at]
    return lines
