"""docs/drills.md names every fault and every figure there is, and no other."""

import re
from pathlib import Path

from cluster.drill_figures import FIGURES
from cluster.fault_kinds import FAULT_KINDS

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "drills.md").read_text(encoding="utf-8")


def test_every_figure_is_explained() -> None:
    figures = TEXT.partition("## Figures")[2]
    named = set(re.findall(r"`([a-z0-9_]+)`", figures))
    assert named >= set(FIGURES)


def test_every_fault_is_explained() -> None:
    rows = re.findall(
        r"^\| `([a-z]+)` \|", TEXT.partition("## Faults")[2].partition("## Figures")[0], re.MULTILINE
    )
    assert rows == [kind.name for kind in FAULT_KINDS]
