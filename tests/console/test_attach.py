"""A running cluster from outside: its log over HTTP, commands through the router, and how it is found and ended."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from cluster.attach import AttachedCluster, AttachError, RemoteClock
from cluster.control import AddNote, SetMode
from cluster.events import NoteAdded, encode_event
from cluster.profile import load_profile
from cluster.run_dir import ClockAnchor, RunInfo, RunLock, make_run_dir, write_run_info
from console.cli import main
from console.errors import UserError
from console.running_run import find_running, stop_run

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LINES = [encode_event(NoteAdded(at=float(n), index=n, text=f"note {n}")) + b"\n" for n in range(6)]


@asynccontextmanager
async def served(**handlers: Handler) -> AsyncIterator[str]:
    """The URL of a server with ``events`` (GET /events) and ``command`` (POST /admin/command)."""
    app = web.Application()
    if "events" in handlers:
        app.router.add_get("/events", handlers["events"])
    if "command" in handlers:
        app.router.add_post("/admin/command", handlers["command"])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_command_goes_with_the_token_and_its_answer_comes_back() -> None:
    seen = []

    async def command(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.read()))
        return web.json_response({"ok": True, "message": "mode colocated"})

    async with served(command=command) as url:
        cluster = AttachedCluster(url + "/", "secret")
        done = await cluster.send_command(SetMode(mode="colocated", cause="operator, key m"))
        await cluster.close()
    assert (done.ok, done.message) == (True, "mode colocated")
    assert seen == [("Bearer secret", b'{"msg":"set_mode","mode":"colocated","cause":"operator, key m"}')]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (409, '{"ok": false, "message": "the cluster is stopping"}', "the cluster is stopping"),
        (
            401,
            '{"error": {"message": "operator commands need the token", "code": 401}}',
            "operator commands need the token",
        ),
        (500, "{}", "HTTP 500"),
    ],
)
async def test_a_refusal_is_an_answer(status: int, body: str, message: str) -> None:
    async def command(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with served(command=command) as url:
        cluster = AttachedCluster(url, "")
        done = await cluster.send_command(AddNote(text="x"))
        await cluster.close()
    assert (done.ok, done.message) == (False, message)


async def test_no_answer_and_nonsense_are_errors_of_one_line() -> None:
    async def command(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with served(command=command) as url:
        cluster = AttachedCluster(url, "")
        with pytest.raises(OSError, match="HTTP 200, not an operator's answer"):
            await cluster.send_command(AddNote(text="x"))
        await cluster.close()
    cluster = AttachedCluster(url, "")
    with pytest.raises(OSError, match="the router does not answer"):
        await cluster.send_command(AddNote(text="x"))
    await cluster.close()


async def test_the_log_goes_on_where_a_router_that_died_left_off(tmp_path: Path) -> None:
    """It dies in the middle of a line; the next connection asks from the first line that did not come whole."""
    asked, enough = [], asyncio.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        first = int(request.query["from"])
        asked.append(first)
        if len(asked) == 4:
            enough.set()
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(b"".join(LINES[first : first + 2]) + LINES[-1][:10])
        return response

    path = tmp_path / "events.jsonl"
    async with served(events=events) as url:
        cluster = AttachedCluster(url, "")
        copying = asyncio.create_task(cluster.copy_log(path))
        await enough.wait()
        copying.cancel()
        with suppress(asyncio.CancelledError):
            await copying
        await cluster.close()
    assert asked[:4] == [0, 2, 4, 6]
    assert path.read_bytes() == b"".join(LINES)


async def test_what_is_no_cluster_is_named(tmp_path: Path) -> None:
    async def events(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    async with served(events=events) as url:
        cluster = AttachedCluster(url, "")
        for look in (cluster.copy_log(tmp_path / "events.jsonl"), cluster.check()):
            with pytest.raises(
                AttachError, match=f"{url} is not a cluster of pdconsole: HTTP 200 text/plain"
            ):
                await look
        await cluster.close()
    for nowhere in (url, "http://[::bad", "http://"):
        cluster = AttachedCluster(nowhere, "")
        with pytest.raises(AttachError, match="does not answer"):
            await cluster.check()
        await cluster.close()


def test_the_clock_of_another_host_is_told_by_its_log() -> None:
    here, newest = 100.0, 0.0
    clock = RemoteClock(lambda: newest, lambda: here)
    assert clock() == 0.0
    newest = 5000.0  # came 3 s late
    assert clock() == 5000.0
    here = 101.0
    assert clock() == 5001.0
    newest = 5003.5  # came 0.5 s late
    assert clock() == 5003.5
    here, newest = 103.0, 5004.0
    assert clock() == 5005.5


# --- runs of this machine -------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path


def a_run(url: str = "http://127.0.0.1:1") -> tuple[str, Path]:
    name, path = make_run_dir()
    describe(path, os.getpid(), url)
    return name, path


def describe(path: Path, pid: int, url: str = "http://127.0.0.1:1") -> None:
    info = RunInfo(
        run=path.name, profile=load_profile("10gbe"), versions={}, clock=ClockAnchor(monotonic=0.0, wall=0.0),
        supervisor_pid=pid, url=url, token_path="",
    )  # fmt: skip
    write_run_info(path, info)


def test_the_only_one_that_runs_needs_no_name(home: Path) -> None:
    with pytest.raises(UserError, match="no cluster is running; start one with: pdconsole up"):
        find_running(None)
    ended, _ = a_run()
    running, path = a_run("http://127.0.0.1:4711")
    lock = RunLock.acquire(path)
    assert find_running(None)[0].run == running
    assert find_running(running)[1].run == running
    assert find_running(str(path))[0].run == running
    assert find_running("http://127.0.0.1:4711/")[0].run == running
    with pytest.raises(
        UserError, match=f"run {ended} has ended .running: {running}.; see: pdconsole replay {ended}"
    ):
        find_running(ended)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:4712 is no cluster that runs here"):
        find_running("http://127.0.0.1:4712")
    second, path = a_run()
    other = RunLock.acquire(path)
    with pytest.raises(UserError, match="2 clusters are running; name one: "):
        find_running(None)
    (path / "run.json").unlink()
    with pytest.raises(UserError, match=f"run {second} is still starting"):
        find_running(second)
    lock.release()
    other.release()


HOLDER = """
import signal, sys, time
from pathlib import Path
from cluster.run_dir import RunLock
times = int(sys.argv[2])
def stop(*_):
    global times
    times -= 1
    if times == 0:
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
lock = RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(("options", "signals"), [((), 1), (("--now",), 2)])
def test_stop_ends_the_supervisor_and_waits_for_it(
    home: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], signals: int
) -> None:
    _, path = make_run_dir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(signals)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    describe(path, holder.pid)
    assert main(["stop", *options]) == 0
    assert f"run {path.name} stopped in" in capsys.readouterr().out
    assert holder.wait(10.0) == 0
    holder.stdout.close()


def test_a_supervisor_that_does_not_end_is_told_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = a_run()
    lock = RunLock.acquire(path)
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    monkeypatch.setattr("console.running_run.STOP_MARGIN_S", -60.0)
    try:
        with pytest.raises(
            UserError, match=f"run {name} .supervisor pid {os.getpid()}. has not ended"
        ) as refused:
            stop_run(*find_running(name), at_once=False)
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    assert came == [signal.SIGTERM]
    assert refused.value.exit_code == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["attach"], "no cluster is running"),
        (["attach", "nothing"], "no runs in"),
        (["attach", "ftp://x"], "'ftp://x' is not a URL of a router; allowed: http://HOST:PORT"),
        (["attach", "--token-file", "x"], "--token-file is for the URL of a cluster elsewhere"),
        (["attach", "http://127.0.0.1:1", "--token-file", "/nowhere"], "attach needs a terminal"),
        (["stop", "http://127.0.0.1:1"], "http://127.0.0.1:1 is no cluster that runs here"),
        (["up", "--detach", "--headless"], "--detach goes without --headless"),
        (["up", "--detach", "--duration", "3"], "--detach goes without"),
    ],
)
def test_what_cannot_be_attached_to_is_refused_in_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    assert main(argv) in (2, 3)
    told = capsys.readouterr().err
    assert complaint in told
    assert told.count("\n") == 1
    assert not list(home.glob("runs/*"))
