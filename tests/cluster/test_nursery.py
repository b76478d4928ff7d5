"""A real nursery and what it forks: descriptors, ends, and what happens when the nursery itself dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.log_lines import last_text
from cluster.nursery import MAX_RESTARTS, Nursery
from cluster.nursery_messages import (
    Fork,
    Forked,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from cluster.spawner import ProgramSpawner
from tests.cluster.supervision import is_alive, until, until_now

# The nursery's own loop with a child that needs no torch: it says on its link what it is and what it was given.
NURSERY = """
import os, socket, sys, time
from cluster.nursery_main import serve
def child(link_fd):
    link = socket.socket(fileno=link_fd)
    print("in the log", flush=True)
    link.send(f"{os.getpid()} {os.getsid(0)} {sorted(map(int, os.listdir('/proc/self/fd')))}".encode())
    word = link.recv(100)
    if word == b"break": raise RuntimeError("broken on purpose")
    return int(word or 0)
serve(socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])), child)
"""
FALLBACK = ProgramSpawner((sys.executable, "-c", "import sys; sys.exit(9)"))


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    made = Nursery.start(FALLBACK, (sys.executable, "-c", NURSERY))
    made.listen()
    await until(lambda: not made.is_pending, "the nursery")
    yield made
    await made.close()
    assert not is_alive(made.pid)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def hear(link: socket.socket) -> str:
    link.setblocking(False)
    return (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(link, 1000), 20)).decode()


async def test_a_fork_is_a_fresh_session_with_its_descriptors_only(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    extra = os.open(os.devnull, os.O_RDONLY)
    for _ in range(2):  # the second must not see anything of the first
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                spawned = await nursery.spawn("child", log, theirs.fileno(), (extra,))
                numbers = {theirs.fileno(), extra}
            pid, session, fds = (await hear(ours)).split(" ", 2)
            assert int(pid) == int(session) == spawned.pid
            seen = set(map(int, fds.strip("[]").split(", ")))
            assert numbers | {0, 1, 2} <= seen
            assert len(seen) <= len(numbers) + 4  # and the directory it lists
            assert name_of(int(pid)) == "pd-child"
            ours.send(b"5")
            assert await spawned.reap() == 5
    os.close(extra)
    assert last_text(log, 5).splitlines() == ["in the log", "in the log"]
    assert log.stat().st_mode & 0o777 == 0o600


async def test_ends_are_told_apart(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spawned = await nursery.spawn("child", log, theirs.fileno(), ())
        await hear(ours)
        os.kill(spawned.pid, signal.SIGKILL)
        assert await spawned.reap() == -signal.SIGKILL
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spawned = await nursery.spawn("child", log, theirs.fileno(), ())
        await hear(ours)
        ours.send(b"break")
        assert await spawned.reap() == 1
    assert last_text(log, 1) == "RuntimeError: broken on purpose"


async def test_a_dead_nursery_takes_its_children_along_and_comes_back(
    nursery: Nursery, tmp_path: Path
) -> None:
    told: list[str] = []
    nursery.on_death = told.append
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spawned = await nursery.spawn("child", tmp_path / "log", theirs.fileno(), ())
        await hear(ours)
        os.kill(nursery.pid, signal.SIGKILL)
        await until(lambda: not is_alive(spawned.pid), "the child's end")
        assert await spawned.reap() == -signal.SIGKILL
        await until(lambda: bool(told) and not nursery.is_pending, "the next nursery")
    assert "died and its workers with it" in told[0]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spawned = await nursery.spawn("next", tmp_path / "log", theirs.fileno(), ())
        await hear(ours)
        ours.send(b"3")
        assert await spawned.reap() == 3


async def test_a_nursery_that_never_comes_up_is_not_waited_for(tmp_path: Path) -> None:
    made = Nursery.start(FALLBACK, (sys.executable, "-c", "import sys; sys.exit(1)"))
    told: list[str] = []
    made.on_death = told.append
    assert made.is_pending
    made.listen()
    await until(lambda: len(told) == MAX_RESTARTS + 1, "the last nursery's end")
    assert "run as programs" in told[-1]
    assert not made.is_pending
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert await (await made.spawn("child", tmp_path / "log", theirs.fileno(), ())).reap() == 9
    await made.close()


async def test_a_nursery_that_hangs_is_killed_when_it_is_asked(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of no worker would ever be told, and none would be started again."""
    monkeypatch.setattr("cluster.nursery.ANSWER_TIMEOUT_S", 0.3)
    told: list[str] = []
    nursery.on_death = told.append
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = await nursery.spawn("child", tmp_path / "log", theirs.fileno(), ())
        hung = nursery.pid
        os.kill(hung, signal.SIGSTOP)
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.reap(), 20) == -signal.SIGKILL
    await until(lambda: bool(told), "the nursery's end")
    assert f"pid {hung}, exit code -9" in told[0]
    await until(lambda: not nursery.is_pending, "the next nursery")


async def test_a_nursery_that_is_still_importing_is_not_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hears nothing before its imports are done: a cluster stopped in its first second would last that long."""
    waited: list[float | None] = []
    wait = subprocess.Popen.wait

    def record(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waited.append(timeout)
        return wait(process, timeout)

    made = Nursery.start(FALLBACK, (sys.executable, "-c", "import time; time.sleep(1000)"))
    monkeypatch.setattr(subprocess.Popen, "wait", record)
    await made.close()
    assert waited == [None]  # for one that was killed
    assert not is_alive(made.pid)


def test_a_nursery_and_its_children_die_with_their_supervisor(tmp_path: Path) -> None:
    """The real one, up to the torch import: nothing of it outlives a SIGKILL of its parent."""
    code = (
        "import sys, time\n"
        "from cluster.nursery import Nursery\n"
        "from cluster.spawner import ProgramSpawner\n"
        "print(Nursery.start(ProgramSpawner(('false',))).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = os.pipe()
    with os.fdopen(parent[0]) as reader:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", code],
            dict(os.environ),
            file_actions=[(os.POSIX_SPAWN_DUP2, parent[1], 1)],
        )
        os.close(parent[1])
        nursery_pid = int(reader.readline())
        assert is_alive(nursery_pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    until_now(lambda: not is_alive(nursery_pid), "the nursery's end")


def test_messages_round_trip() -> None:
    fork = Fork(child_id="prefill-0", log_path="/x", numbers=(3, 7))
    assert decode_request(encode_request(fork)) == fork
    assert decode_answer(encode_answer(Forked(pid=4))) == Forked(pid=4)
