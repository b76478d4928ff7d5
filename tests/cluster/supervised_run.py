"""One supervisor in the test's own process, with real children: what it told its parent and what it wrote."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from cluster.control import (
    AnyMessage,
    Command,
    CommandDone,
    CommandSent,
    SupervisorSpec,
    SupervisorUp,
)
from cluster.events import Event, NoteAdded
from cluster.profile import (
    ClusterSection,
    LinkSection,
    LoadSection,
    ModelSection,
    Profile,
    RouterSection,
    SupervisorSection,
)
from cluster.run_log import read_events
from cluster.spawner import ProgramSpawner
from cluster.summary import write_summary
from cluster.supervisor import Supervisor
from cluster.supervisor_main import WORKER_COMMAND
from cluster.supervisor_run import ROUTER_COMMAND
from tests.cluster.supervision import child_command, until

PROFILE = Profile(
    name="test",
    cluster=ClusterSection(prefill=1, decode=1),
    model=ModelSection(id="synthetic:nano"),
    link=LinkSection(backend="pacing", bandwidth="1gbit"),
    router=RouterSection(port=0),
    supervisor=SupervisorSection(backoff_first_s=0.02, stop_grace_s=6.0),
    load={"steady": LoadSection()},
)


def make_supervisor(
    spec: SupervisorSpec, told: list[AnyMessage], worker: str | None = None, router: str | None = None
) -> Supervisor:
    """With real programs where no mode of the link child is named."""
    return Supervisor(
        spec,
        told.append,
        write_summary,
        worker_spawner=ProgramSpawner(WORKER_COMMAND if worker is None else child_command(worker)),
        router_spawner=ProgramSpawner(ROUTER_COMMAND if router is None else child_command(router)),
    )


class Run:
    """One supervisor in this process; what it told its parent and what it wrote."""

    def __init__(
        self, run_dir: Path, profile: Profile, worker: str | None, router: str | None, load: str
    ) -> None:
        (run_dir / "logs").mkdir(parents=True)
        self.dir = run_dir
        self.told: list[AnyMessage] = []
        spec = SupervisorSpec(run="a-run", run_dir=str(run_dir), profile=profile, load=load)
        self.supervisor = make_supervisor(spec, self.told, worker, router)
        self.task = asyncio.create_task(self.supervisor.run())
        self._last_id = 0

    def of(self, kind: type[AnyMessage]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def events(self, kind: type[Event] | None = None) -> list[Any]:
        path = self.dir / "events.jsonl"
        events = list(read_events(path)) if path.exists() else []
        return [event for event in events if kind is None or isinstance(event, kind)]

    def notes(self) -> list[str]:
        return [event.text for event in self.events(NoteAdded)]

    async def up(self) -> str:
        await until(lambda: bool(self.of(SupervisorUp)) or self.task.done(), "SupervisorUp")
        assert not self.task.done(), self.told
        url: str = self.of(SupervisorUp)[0].url
        return url

    async def command(self, command: Command) -> CommandDone:
        self._last_id += 1
        command_id = self._last_id
        self.supervisor.take(CommandSent(command_id=command_id, command=command))

        def answers() -> list[Any]:
            return [done for done in self.of(CommandDone) if done.command_id == command_id]

        await until(lambda: bool(answers()), f"answer to {command}")
        done: CommandDone = answers()[0]
        return done

    async def logged(self, kind: type[Event], count: int = 1) -> list[Any]:
        await until(lambda: len(self.events(kind)) >= count, f"{count} x {kind.__name__}")
        return self.events(kind)


def changed(profile: Profile = PROFILE, **sections: Any) -> Profile:
    """A profile with some sections' fields replaced: ``cluster={"decode": 2}``."""
    return msgspec.structs.replace(
        profile,
        **{
            name: msgspec.structs.replace(getattr(profile, name), **fields)
            for name, fields in sections.items()
        },
    )
