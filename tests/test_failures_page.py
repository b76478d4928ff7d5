"""``docs/failures.md`` names tests, events, settings and drills: all of them exist."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from cluster.events import Event
from cluster.profile import Profile

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
SECTIONS: Final[dict[str, Any]] = msgspec.to_builtins(Profile())


def table_cells(column: int) -> list[str]:
    """One column of the tables of failures (not of the table of commands)."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    return [row[column] for row in rows if len(row) == 6 and row[0].strip() != "what"]


def test_every_named_test_exists() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    files = {path.name for path in sources}
    functions = set(re.findall(r"def (test_\w+)\(", "".join(sources.values())))
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", PAGE))
    assert len(named) > 50
    assert named - functions - files == set()


def test_every_named_event_exists() -> None:
    tags = {kind.__struct_config__.tag for kind in Event.__args__}
    named = {name for cell in table_cells(3) for name in re.findall(r"`([a-z_]+)`", cell)}
    assert named - tags == {"late_frames", "codec_reason"} & named, "the rest are fields of events"


def test_every_named_setting_exists() -> None:
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)`", PAGE):
        if section in SECTIONS:
            assert key in SECTIONS[section], f"{section}.{key}"


@pytest.mark.parametrize("drill", sorted(set(re.findall(r"; ([a-z]+-[a-z-]+)", "|".join(table_cells(5))))))
def test_every_named_drill_exists(drill: str) -> None:
    assert (ROOT / "profiles" / "drills" / f"{drill}.toml").is_file()
