"""The console on a cluster that somebody else started: it reads the same log and sends commands through the router.

Ending this console, however it ends, leaves the cluster as it is, unless the operator chose to stop it.
"""

import asyncio
import functools
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from cluster.attach import AttachedCluster, AttachError, RemoteClock
from cluster.control import StopCluster
from cluster.run_dir import RunInfo, RunRecord, is_alive, read_token
from cluster.run_log import EVENTS_FILE
from console.app import ConsoleApp
from console.console_options import ConsoleOptions
from console.errors import UserError
from console.interactive import export_to
from console.run_console import run_console_async
from console.running_run import stop_run

WATCH_S: Final = 0.5
STOP_REASON: Final = "operator, at an attached console"


def watch_here(record: RunRecord, info: RunInfo, options: ConsoleOptions) -> int:
    """The console's exit code; 1 when the supervisor died. Raises UserError."""
    return asyncio.run(_watch_here(record, info, options))


def watch_elsewhere(url: str, token: str, options: ConsoleOptions) -> int:
    """The same for a cluster that only HTTP reaches; without a token the console is read-only."""
    with tempfile.TemporaryDirectory(prefix="pdconsole-") as directory:
        return asyncio.run(_watch_elsewhere(url, token, options, Path(directory)))


async def _watch_here(record: RunRecord, info: RunInfo, options: ConsoleOptions) -> int:
    cluster = AttachedCluster(info.url, read_token(record.path))
    app = ConsoleApp(
        events_path=record.path / EVENTS_FILE,
        send_command=cluster.send_command,
        export=functools.partial(export_to, record.path, record.path),
        run_name=record.run,
        read_only=options.read_only,
        ascii_only=options.ascii_only,
        config=options.config,
        owns_cluster=False,
    )
    exit_code = await _run(app, cluster, _until_dead(app, record))
    if app.quit_choice == "stop" and record.is_alive:
        took_s = await asyncio.to_thread(stop_run, record, info, at_once=False)
        _tell(f"run {record.run} stopped in {took_s:.1f} s; see: pdconsole runs show {record.run}")
    elif record.is_alive:
        _tell(
            f"run {record.run} goes on; back: pdconsole attach {record.run}, end: pdconsole stop {record.run}"
        )
    return exit_code


async def _watch_elsewhere(url: str, token: str, options: ConsoleOptions, directory: Path) -> int:
    path = directory / EVENTS_FILE
    cluster = AttachedCluster(url, token)
    try:
        await cluster.check()
    except AttachError as error:
        await cluster.close()
        raise UserError(str(error)) from error
    app = ConsoleApp(
        events_path=path,
        send_command=cluster.send_command,
        export=functools.partial(export_to, directory, Path.cwd()),  # the copy goes with the console
        run_name=url,
        read_only=options.read_only or not token,
        ascii_only=options.ascii_only,
        config=options.config,
        owns_cluster=False,
        out_dir=Path.cwd(),
        clock=RemoteClock(lambda: app.state.last_at),
    )
    exit_code = await _run(app, cluster, _copy(app, cluster, path))
    if app.quit_choice == "stop":
        asking = AttachedCluster(url, token)
        try:
            done = await asking.send_command(StopCluster(reason=STOP_REASON))
        except OSError as error:
            raise UserError(f"{url} was not stopped: {error}", 1) from error
        finally:
            await asking.close()
        if not done.ok:
            raise UserError(f"{url} was not stopped: {done.message}", 1)
        _tell(f"{url} is stopping")
    return exit_code


async def _run(app: ConsoleApp, cluster: AttachedCluster, watching: Coroutine[Any, Any, None]) -> int:
    """The app beside what feeds or watches its log; an error of that is raised once the terminal is given back."""
    beside = asyncio.create_task(watching)
    try:
        exit_code = await run_console_async(app)
    finally:
        beside.cancel()
        await asyncio.wait({beside})
        await cluster.close()
    if not beside.cancelled() and exit_code in (0, 1):
        beside.result()
    return exit_code


async def _until_dead(app: ConsoleApp, record: RunRecord) -> None:
    """A cluster that was stopped in order stays on the screen; one whose supervisor died is told of."""
    alive = True
    while alive:
        await asyncio.sleep(WATCH_S)
        alive = is_alive(record.path)
    await app.feed.read_available()
    if not app.state.stopped:
        app.exit(return_code=1)
        raise UserError(f"the supervisor of run {record.run} died; see {record.path / 'logs'}", 1)


async def _copy(app: ConsoleApp, cluster: AttachedCluster, path: Path) -> None:
    try:
        await cluster.copy_log(path)
    except AttachError as error:
        if app.state.stopped:
            return  # it is what is to be expected now
        app.exit(return_code=1)
        raise UserError(str(error), 1) from error


def _tell(line: str) -> None:
    print(f"pdconsole: {line}", file=sys.stderr, flush=True)
