"""What the console's tests share: an app over a prepared log, what it was told to send, and its screen as text."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from textual.pilot import Pilot

from cluster.control import Command, CommandDone
from cluster.events import Event, encode_event
from cluster.run_log import EVENTS_FILE, write_events
from console.app import ConsoleApp
from console.config import Config
from console.panels.line_view import LineView
from tests.console.history import END_S

START = 1000.0
END_OF_STORY = START + END_S


@dataclass
class Recorder:
    """Takes the place of the cluster: keeps each command and answers it."""

    commands: list[Command] = field(default_factory=list)
    ok: bool = True
    message: str = "done"
    error: OSError | None = None

    async def send(self, command: Command) -> CommandDone:
        self.commands.append(command)
        if self.error is not None:
            raise self.error
        return CommandDone(command_id=len(self.commands), ok=self.ok, message=self.message)


@dataclass
class Console:
    app: ConsoleApp
    pilot: Pilot[None]
    cluster: Recorder
    path: Path
    exported: list[str]

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    async def press(self, *keys: str) -> None:
        """Press keys, then let everything that follows from them happen and be drawn."""
        for key in keys:
            await self.pilot.press(key)
        await self.settle()

    async def settle(self, *, charts: bool = False) -> None:
        for worker in list(self.app.workers):
            if worker.name != "feed" and not worker.is_finished:
                await worker.wait()
        await self.pilot.pause()
        self.app.draw(charts=charts)
        await self.pilot.pause()

    async def wait_for(self, text: str) -> None:
        """Until the text is on the screen; the test's timeout bounds it."""
        while text not in self.text:
            await self.pilot.pause(0.01)

    async def append(self, events: Iterable[Event]) -> None:
        """Grow the log and show it."""
        with self.path.open("ab") as file:
            file.writelines(encode_event(event) + b"\n" for event in events)
        await self.app.feed.read_available()
        await self.settle()

    def page(self) -> str:
        """All lines of the dialog's list, visible or not."""
        return self.app.screen.query_one(LineView).plain


@asynccontextmanager
async def console(
    tmp_path: Path,
    events: Iterable[Event],
    size: tuple[int, int] = (80, 24),
    *,
    read_only: bool = False,
    ascii_only: bool = False,
    now: float | Callable[[], float] = END_OF_STORY,
    owns_cluster: bool = True,
    config: Config | None = None,
) -> AsyncIterator[Console]:
    """The app, headless, with the whole log read and drawn."""
    path = tmp_path / EVENTS_FILE
    write_events(path, events)
    cluster, exported = Recorder(), list[str]()

    def export(wanted: str) -> Path:
        exported.append(wanted)
        return tmp_path / f"run.{wanted}"

    app = ConsoleApp(
        path, cluster.send, export, "the-run", read_only=read_only, ascii_only=ascii_only,
        clock=now if callable(now) else lambda: now, refresh_s=3600.0, owns_cluster=owns_cluster,
        config=config,
    )  # fmt: skip
    async with app.run_test(size=size, notifications=True) as pilot:
        while not app.feed.caught_up:
            await pilot.pause()
        shown = Console(app, pilot, cluster, path, exported)
        await shown.settle(charts=True)
        yield shown
