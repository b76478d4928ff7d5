import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.child_process import ChildProcess, group_members
from cluster.control import AnyMessage, Events, Ping, Pong, WorkerUp
from cluster.log_lines import last_text
from cluster.restart_policy import ExitStatus
from cluster.spawner import ProgramSpawner, SpawnError
from tests.cluster.supervision import child_command, is_alive, until, until_now

HELLO = Ping(seq=0)


class Owner:
    """Keeps what a child said and how it ended."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = tmp_path / "child.log"
        self.said: list[AnyMessage] = []
        self.ends: list[ExitStatus] = []

    async def spawn(self, mode: str, command: tuple[str, ...] | None = None) -> ChildProcess:
        return await ChildProcess.spawn(
            "child",
            ProgramSpawner(command or child_command(mode)),
            self.log,
            first=HELLO,
            on_message=lambda child, message: self.said.append(message),
            on_exit=lambda child, status: self.ends.append(status),
        )

    @property
    def notes(self) -> list[str]:
        return [
            event.text for message in self.said if isinstance(message, Events) for event in message.events
        ]

    async def ready(self, child: ChildProcess) -> None:
        await until(lambda: any(isinstance(message, WorkerUp) for message in self.said), "WorkerUp")
        child.mark_ready()


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


async def test_child_answers_and_stops_when_asked(owner: Owner) -> None:
    child = await owner.spawn("plain")
    await owner.ready(child)
    child.send(Ping(seq=5))
    await until(lambda: Pong(seq=5) in owner.said, "Pong")
    await child.stop(grace_s=20)
    assert owner.ends == [ExitStatus(exit_code=0)]
    assert owner.notes == ["goodbye"]
    assert group_members(child.pid) == []


async def test_child_leads_its_own_session_and_writes_to_its_log(owner: Owner) -> None:
    child = await owner.spawn("plain")
    await owner.ready(child)
    assert os.getsid(child.pid) == child.pid
    assert last_text(owner.log, 1) == "to standard error"
    assert last_text(owner.log, 20).splitlines() == ["plain started", "to standard error"]
    assert owner.log.stat().st_mode & 0o777 == 0o600
    await child.stop(grace_s=20)


async def test_killed_child_is_reported_with_its_signal(owner: Owner) -> None:
    child = await owner.spawn("plain")
    await owner.ready(child)
    os.kill(child.pid, signal.SIGKILL)
    await child.exited.wait()
    assert owner.ends == [ExitStatus(signal=signal.SIGKILL)]
    assert not child.is_running
    child.send(HELLO)
    child.signal(signal.SIGTERM)
    child.signal_group(signal.SIGTERM)
    await child.stop(grace_s=1)  # nothing to do, nothing said


async def test_exit_code_is_reported(owner: Owner) -> None:
    child = await owner.spawn("crash")
    await child.exited.wait()
    assert owner.ends == [ExitStatus(exit_code=7)]


async def test_last_words_of_a_dying_child_are_heard_before_its_end(owner: Owner) -> None:
    heard_before_end: list[bool] = []
    child = await ChildProcess.spawn(
        "child",
        ProgramSpawner(child_command("last-words")),
        owner.log,
        first=HELLO,
        on_message=lambda child, message: owner.said.append(message),
        on_exit=lambda child, status: heard_before_end.append("last words" in owner.notes),
    )
    await child.exited.wait()
    assert heard_before_end == [True]


async def test_deaf_child_is_killed_after_its_grace(owner: Owner) -> None:
    child = await owner.spawn("deaf")
    await owner.ready(child)
    await child.stop(grace_s=0.2)
    assert owner.ends == [ExitStatus(signal=signal.SIGKILL)]


async def test_stopped_child_can_be_stopped(owner: Owner) -> None:
    child = await owner.spawn("plain")
    await owner.ready(child)
    child.signal(signal.SIGSTOP)
    await child.stop(grace_s=20)
    assert owner.ends == [ExitStatus(exit_code=0)]


@pytest.mark.parametrize("end", ["asked", "killed"])
async def test_grandchild_goes_with_the_child(owner: Owner, end: str) -> None:
    child = await owner.spawn("grandchild")
    await owner.ready(child)
    grandchild = int(owner.notes[0])
    assert set(group_members(child.pid)) == {child.pid, grandchild}
    if end == "asked":
        await child.stop(grace_s=20)
    else:
        os.kill(child.pid, signal.SIGKILL)
    await child.exited.wait()
    assert not is_alive(grandchild)
    assert child.leftover == []


async def test_child_that_talks_nonsense_is_killed(owner: Owner) -> None:
    child = await owner.spawn("garbage")
    await child.exited.wait()
    assert owner.ends == [ExitStatus(signal=signal.SIGKILL)]
    assert "not a control message" in child.fault


async def test_missing_program_is_a_clear_error(owner: Owner) -> None:
    with pytest.raises(SpawnError, match=r"child: /no/such/program cannot be run: No such file"):
        await owner.spawn("", ("/no/such/program",))


async def test_second_life_appends_to_the_log(owner: Owner) -> None:
    for _ in range(2):
        child = await owner.spawn("crash")
        await child.exited.wait()
    assert last_text(owner.log, 20).count("cannot go on") == 2
    assert last_text(owner.log, 1) in ("cannot go on", "to standard error")


PARENT = """
import asyncio, sys
from pathlib import Path
from cluster.child_process import ChildProcess
from cluster.control import Ping
from cluster.spawner import ProgramSpawner
from tests.cluster.supervision import child_command

async def main():
    def said(child, message):
        print(child.pid, flush=True)
    child = await ChildProcess.spawn("child", ProgramSpawner(child_command(sys.argv[1])), Path(sys.argv[2]),
                                     first=Ping(seq=0), on_message=said, on_exit=lambda child, status: None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["guarded", "lifeline"])
def test_child_dies_with_a_killed_parent(tmp_path: Path, mode: str) -> None:
    """``guarded`` never reads its link: the kernel's signal ends it. ``lifeline`` has no such signal: the link does."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, mode, str(tmp_path / "child.log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until_now(lambda: not is_alive(pid), "the child's end")


async def test_cancelled_owner_leaves_no_process(owner: Owner) -> None:
    """As when the supervisor itself breaks: ``asyncio.run`` cancels every task on the way out."""
    child = await owner.spawn("plain")
    await owner.ready(child)
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "child child"]
    assert len(tasks) == 1
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert not is_alive(child.pid)
    assert owner.ends == [ExitStatus(signal=signal.SIGKILL)]
