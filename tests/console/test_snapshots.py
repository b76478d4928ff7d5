"""The screen at its sizes, letter by letter, from a fixed log and a clock that stands."""

import pytest

from tests.console.snapshots import DIRECTORY, SNAPSHOTS, Snapshot, draw


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda snapshot: snapshot.name)
async def test_the_screen_is_as_kept(snapshot: Snapshot) -> None:
    """After a wanted change: python -m tests.console.snapshots, and read the diff."""
    kept = (DIRECTORY / f"{snapshot.name}.txt").read_text(encoding="utf-8")
    assert (await draw(snapshot)).split("\n") == kept.split("\n")
