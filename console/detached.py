"""``pdconsole up --detach``: bring the cluster up, show how that goes, and leave it to itself once it serves.

Until then a signal, or the end of this process, ends the cluster too. Exit code: 0 when it serves; 130 after a signal;
otherwise that of a cluster that refused to start.
"""

import asyncio

from console.headless import Progress
from console.launch import LaunchError, SupervisorClient, stop_supervisor
from console.signals import Outcome, Signals
from console.up_plan import UpPlan

EXIT_INTERRUPTED = 130


def run(plan: UpPlan) -> int:
    """Raises LaunchError when the cluster does not start."""
    return asyncio.run(_run(plan))


async def _run(plan: UpPlan) -> int:
    signals = Signals()
    progress = Progress(plan.run_dir, quiet=plan.quiet)
    progress.say(f"run {plan.spec.run} in {plan.run_dir}")
    client = await SupervisorClient.launch(plan.spec)
    following = asyncio.create_task(progress.follow())
    try:
        if await signals.race(client.wait_up()) is Outcome.SIGNAL:
            return EXIT_INTERRUPTED
        up = await client.wait_up()
        if not await client.detach():
            raise LaunchError(await client.death_report(), exit_code=1)
        print(f"{up.url}\n{plan.detached_line}")
        return 0
    finally:
        following.cancel()
        await asyncio.wait({following})
        if not client.detached:
            await stop_supervisor(client, signals, "it was not left to itself")
