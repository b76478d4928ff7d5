"""``pdconsole up`` with the console: launch, draw from the first event on, and stop the cluster when the console ends.

The cluster is stopped here, outside the app: whatever ends the app (a key, a signal, an error in it, a terminal that
was closed), the terminal is given back first and then everything that was started is stopped. Should this process
die, the supervisor reads the end of its lifeline and does the same.

Exit code: the console's own (0; 1 after an error in it; 128 + n after a signal), or that of a cluster that refused to
start or broke.
"""

import asyncio
import contextlib
import functools
import sys
from pathlib import Path

from cluster.export import ExportError, export_run, write_export
from cluster.run_log import EVENTS_FILE, RunLogError
from console.app import ConsoleApp
from console.launch import LaunchError, SupervisorClient, stop_supervisor
from console.run_console import run_console_async
from console.signals import Signals
from console.up_plan import UpPlan


def run(plan: UpPlan) -> int:
    """From launch to the end of the cluster; the exit code. Raises LaunchError."""
    return asyncio.run(_run(plan))


async def _run(plan: UpPlan) -> int:
    client = await SupervisorClient.launch(plan.spec)
    app = ConsoleApp(
        events_path=plan.run_dir / EVENTS_FILE,
        send_command=client.send_command,
        export=functools.partial(export_to, plan.run_dir, plan.run_dir),
        run_name=plan.spec.run,
        read_only=plan.console.read_only,
        ascii_only=plan.console.ascii_only,
        config=plan.console.config,
    )
    watching = asyncio.create_task(_close_when_broken(client, app))
    exit_code = 1
    try:
        exit_code = await run_console_async(app)
    finally:
        signals = Signals()
        detached = exit_code == 0 and app.quit_choice == "detach" and await _detach(client, watching)
        if not detached:
            if not client.is_gone:
                _tell("stopping the cluster")
            await stop_supervisor(client, signals, "the console was closed")
        watching.cancel()
        await asyncio.wait({watching})
    if not watching.cancelled():
        watching.result()
    if detached:
        _tell(plan.detached_line)
        return exit_code
    _tell(f"run {plan.spec.run} is in {plan.run_dir}; see: pdconsole runs show {plan.spec.run}")
    return exit_code


async def _detach(client: SupervisorClient, watching: asyncio.Task[None]) -> bool:
    """False, and the cluster is to be stopped, when the supervisor does not confirm it."""
    watching.cancel()  # the end of the link is no news then
    await asyncio.wait({watching})
    if client.is_gone or await client.detach():
        return not client.is_gone or client.detached
    _tell("the supervisor does not answer; the cluster cannot be left alone")
    return False


def _tell(line: str) -> None:
    """A terminal that has vanished must not keep the cluster from being stopped."""
    with contextlib.suppress(OSError):
        print(f"pdconsole: {line}", file=sys.stderr, flush=True)


async def _close_when_broken(client: SupervisorClient, app: ConsoleApp) -> None:
    """Close the console when there is no cluster to show, then raise LaunchError saying why.

    A cluster that was stopped in order (by an operator elsewhere) stays on the screen until the operator here quits.
    """
    try:
        await client.wait_up()
        await client.wait_gone()
        if client.stopped is None:
            raise LaunchError(await client.death_report(), exit_code=1)
    except LaunchError as error:
        app.exit(return_code=error.exit_code)
        raise


def export_to(run_dir: Path, directory: Path, fmt: str) -> Path:
    """Write the run so far into ``directory``; the file. Raises OSError, the one error the app reports."""
    file = directory / f"export.{fmt}"
    try:
        write_export(file, export_run(run_dir, fmt))
    except (ExportError, RunLogError) as error:
        raise OSError(str(error)) from error
    return file
