"""Makes what the README shows of the console: pictures from a recorded run, and the key table from the action table.

    python -m docs.make_pictures          (or: make pictures)

The recorded run is ``docs/recorded-run.jsonl.gz``, the run log of a real cluster. It is shown as a live console showed
it at that moment, at sizes a terminal has.
"""

import asyncio
import gzip
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.control import Command, CommandDone
from cluster.events import RunReady, decode_event
from cluster.run_log import EVENTS_FILE
from console.actions import readme_key_table
from console.app import ConsoleApp
from console.own_cost import OwnCost

DOCS: Final = Path(__file__).parent
RECORDED: Final = DOCS / "recorded-run.jsonl.gz"
README: Final = DOCS.parent / "README.md"
_KEYS: Final = re.compile(r"(?<=## Keys\n\n)\| key \| does \|\n(?:\|.*\n)+")


@dataclass(frozen=True, slots=True)
class Picture:
    """The screen ``at_s`` seconds after the cluster was ready, after these keys."""

    name: str
    size: tuple[int, int]
    at_s: float
    keys: Sequence[str] = ()


PICTURES: Final = (
    Picture("console", (160, 45), 63.3),
    Picture("console-80x24", (80, 24), 63.3),
    Picture("request", (120, 36), 63.3, ("slash", *"FALLBACK", "enter", "enter")),
)


class PictureApp(ConsoleApp):
    """Shows no cost of its own: drawing a picture is not what a console costs."""

    def own_cost(self) -> OwnCost:
        return OwnCost(log_bytes=self.feed.log_bytes)


def main() -> None:
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines(keepends=True)
    for picture in PICTURES:
        text = asyncio.run(draw(picture, lines))
        (DOCS / f"{picture.name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/{picture.name}.svg")
    README.write_text(with_keys(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_keys(readme: str) -> str:
    """The README with the key table as the action table has it now."""
    return _KEYS.sub(lambda _: readme_key_table(), readme)


async def draw(picture: Picture, lines: Sequence[bytes]) -> str:
    """The picture as SVG."""
    events = [decode_event(line) for line in lines]
    now = next(event.at for event in events if isinstance(event, RunReady)) + picture.at_s
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / EVENTS_FILE
        shown = [line for line, event in zip(lines, events, strict=True) if event.at <= now]
        path.write_bytes(b"".join(shown))
        app = PictureApp(path, _send, lambda wanted: path, "recorded", clock=lambda: now, refresh_s=3600.0)
        async with app.run_test(size=picture.size) as pilot:
            while not app.feed.caught_up:
                await pilot.pause()
            for key in ("", *picture.keys):
                if key:
                    await pilot.press(key)
                app.draw()
                await pilot.pause()
            svg = app.export_screenshot(title=f"pdconsole {picture.size[0]}x{picture.size[1]}")
    return re.sub(r"terminal-\d+", f"terminal-{picture.name}", svg)


async def _send(command: Command) -> CommandDone:
    return CommandDone(command_id=0, ok=False, message="a picture sends nothing")


if __name__ == "__main__":
    main()
