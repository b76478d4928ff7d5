"""Screens as text, kept as files beside the tests: what a change does to the screen is read in its diff.

python -m tests.console.snapshots        writes them anew
"""

import asyncio
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from console.own_cost import OwnCost
from tests.console.harness import END_OF_STORY, console
from tests.console.history import story

DIRECTORY: Final = Path(__file__).with_name("snapshots")
_PATH: Final = re.compile(r"(?<=held by ).*")


@dataclass(frozen=True, slots=True)
class Snapshot:
    name: str
    size: tuple[int, int]
    keys: Sequence[str] = ()
    ascii_only: bool = False


SNAPSHOTS: Final = (
    Snapshot("main-80x24", (80, 24)),
    Snapshot("main-120x36", (120, 36)),
    Snapshot("main-160x45", (160, 45)),
    Snapshot("main-80x24-ascii", (80, 24), ascii_only=True),
    Snapshot("verdict-80x24", (80, 24), ("5", "z")),
    Snapshot("request-120x36", (120, 36), ("slash", *"FALLB", "enter", "enter")),
    Snapshot("worker-120x36", (120, 36), ("1", "down", "enter")),
    Snapshot("kill-80x24", (80, 24), ("k",)),
    Snapshot("help-80x24", (80, 24), ("question_mark",)),
)


async def draw(snapshot: Snapshot) -> str:
    """The screen as text; what this machine puts into it is masked."""
    with tempfile.TemporaryDirectory() as directory:
        events = story()
        async with console(
            Path(directory), events, snapshot.size, ascii_only=snapshot.ascii_only, now=END_OF_STORY
        ) as shown:
            shown.app.own_cost = OwnCost  # type: ignore[method-assign]  # all zero
            await shown.press(*snapshot.keys)
            await shown.settle(charts=True)
            text = shown.text
    masked = _PATH.sub("", text)
    return "".join(line.rstrip() + "\n" for line in masked.split("\n"))


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for snapshot in SNAPSHOTS:
        (DIRECTORY / f"{snapshot.name}.txt").write_text(asyncio.run(draw(snapshot)), encoding="utf-8")


if __name__ == "__main__":
    main()
