"""``pdconsole up`` without the console: progress on stderr, the summary on stdout.

After ready the load runs for ``--duration`` seconds, or until SIGINT, SIGTERM or SIGHUP. Then it is stopped, what is in
flight gets up to ``DRAIN_S`` to finish, and the cluster is stopped. A second signal skips the wait, a third kills.

Exit code: 0 when the cluster ran and stopped as asked, also when requests failed (the summary counts them); 130 after
a signal; 1 when the supervisor died, wrote no summary or had to leave a process behind; 2 or 3 when the cluster
refused to start.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from cluster.control import SetLoad
from cluster.events import (
    Event,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WorkerExited,
)
from cluster.run_log import EVENTS_FILE, LogTail
from console.feed_text import feed_line
from console.launch import LaunchError, SupervisorClient, stop_supervisor
from console.run_page import render_page
from console.signals import Outcome, Signals
from console.summary_text import read_summary
from console.text_format import clean
from console.up_plan import UpPlan

DRAIN_S: Final = 10.0
POLL_S: Final = 0.1
SETTLE_S: Final = 0.3
"""A request may be on its way to the log for this long: the router batches its events, the supervisor its writes."""


class Progress:
    """Follows the run's log: prints what matters and knows which requests are open."""

    def __init__(self, run_dir: Path, *, quiet: bool) -> None:
        self._tail = LogTail(run_dir / EVENTS_FILE)
        self._quiet = quiet
        self._began_at = time.monotonic()
        self._open: set[str] = set()

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def say(self, text: str, at: float | None = None) -> None:
        """One line, stamped with seconds since this command began."""
        if not self._quiet:
            since_s = (time.monotonic() if at is None else at) - self._began_at
            print(f"{since_s:7.2f} s  {text}", file=sys.stderr, flush=True)

    def read(self) -> None:
        """Take in what the log has grown by."""
        while events := self._tail.read_new():
            for event in events:
                self._take(event)

    async def follow(self) -> None:
        """Read until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(POLL_S)

    async def idle(self) -> None:
        """Return when no request has been open for ``SETTLE_S``. ``follow`` does the reading."""
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < SETTLE_S:
            await asyncio.sleep(POLL_S)
            if self._open:
                idle_since = time.monotonic()

    def _take(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._open.add(event.request_id)
        elif isinstance(event, RequestFinished | RequestFailed | RequestCancelled | RequestRejected):
            self._open.discard(event.request_id)
        elif isinstance(event, WorkerExited) and event.role == "router":
            self._open.clear()  # their streams broke with it
        line = feed_line(event)
        if line is not None and not line.routine:
            self.say(clean(line.text), event.at)


def run(plan: UpPlan) -> int:
    """Bring the cluster up, run it, stop it, print its summary; the exit code. Raises LaunchError."""
    return asyncio.run(_run(plan))


async def _run(plan: UpPlan) -> int:
    signals = Signals()
    progress = Progress(plan.run_dir, quiet=plan.quiet)
    progress.say(f"run {plan.spec.run} in {plan.run_dir}")
    client = await SupervisorClient.launch(plan.spec)
    following = asyncio.create_task(progress.follow())
    reason = "it did not start"
    try:
        reason = await _serve(plan, client, signals, progress)
    finally:
        await stop_supervisor(client, signals, reason)
        following.cancel()
        await asyncio.wait({following})
        progress.read()
    return _report(plan, client, interrupted=signals.count > 0)


async def _serve(plan: UpPlan, client: SupervisorClient, signals: Signals, progress: Progress) -> str:
    """From spawn until all is served and there is a reason to stop, which is returned.

    Raises LaunchError when the cluster refuses to start or breaks.
    """
    if await signals.race(client.wait_up()) is Outcome.SIGNAL:
        return "interrupted"
    for_s = "until it is interrupted" if plan.duration_s is None else f"for {plan.duration_s:g} s"
    progress.read()  # what led to this comes first
    progress.say(f"serving {for_s}")
    outcome = await signals.race(client.wait_gone(), plan.duration_s)
    if outcome is Outcome.DONE and client.stopped is None:
        raise LaunchError(await client.death_report(), exit_code=1)
    await _drain(plan, client, signals, progress)
    return {Outcome.DONE: "stopped", Outcome.SIGNAL: "interrupted", Outcome.TIMEOUT: "duration is over"}[
        outcome
    ]


async def _drain(plan: UpPlan, client: SupervisorClient, signals: Signals, progress: Progress) -> None:
    """No new requests of ours, and time for the open ones. A signal ends the wait."""
    if client.is_gone:
        return
    if plan.spec.load:
        command = SetLoad(name="", cause="end of the run")
        if await signals.race(client.send_command(command), DRAIN_S) is Outcome.SIGNAL:
            return
    if progress.in_flight:
        progress.say(f"stopping; waiting up to {DRAIN_S:g} s for {progress.in_flight} open requests")
    if await signals.race(progress.idle(), DRAIN_S) is Outcome.TIMEOUT:
        progress.say(f"{progress.in_flight} requests are still open; they are cut off")


def _report(plan: UpPlan, client: SupervisorClient, *, interrupted: bool) -> int:
    summary = read_summary(plan.run_dir)
    if summary is not None:
        print(json.dumps(summary, indent=2) if plan.json else _page(plan, summary))
    elif not interrupted and not (client.stopped is not None and client.stopped.problem):
        raise LaunchError(f"run {plan.spec.run} has no summary; see {plan.run_dir}/logs", exit_code=1)
    if client.stopped is not None and client.stopped.problem:
        raise LaunchError(client.stopped.problem, exit_code=3)
    if client.stopped is not None and client.stopped.orphans:
        raise LaunchError(
            f"{client.stopped.orphans} processes of run {plan.spec.run} did not end", exit_code=1
        )
    return 130 if interrupted else 0


def _page(plan: UpPlan, summary: dict[str, Any]) -> str:
    return render_page(summary, alive=False, path=str(plan.run_dir), event_lines=[])
