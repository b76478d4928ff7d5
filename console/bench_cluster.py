"""A cluster brought up for a benchmark: started, watched, commanded, its log read, and stopped whatever happens."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.control import Command, SupervisorSpec, SupervisorUp
from cluster.events import Event, RunReady, WorkerExited
from cluster.measuring_process import BenchmarkFailed
from cluster.profile import Profile
from cluster.run_dir import make_run_dir
from cluster.run_log import EVENTS_FILE, LogTail
from console.launch import LaunchError, SupervisorClient, stop_supervisor
from console.signals import Outcome, Signals

_POLL_S: Final = 0.02
_LOG_WAIT_S: Final = 30.0
"""The log is behind what it tells of by fractions of a second; a fact that is missing for so long will not come."""

_Result = TypeVar("_Result")


def new_run(profile: Profile) -> SupervisorSpec:
    """A run directory of its own, and what a supervisor is to do there."""
    name, run_dir = make_run_dir()
    return SupervisorSpec(run=name, run_dir=str(run_dir), profile=profile)


async def run_on_cluster(
    spec: SupervisorSpec, signals: Signals, work: Callable[["BenchCluster"], Coroutine[Any, Any, None]]
) -> None:
    """Start the cluster, wait until it is ready, do ``work``, stop it. Nothing of it is alive when this returns or
    raises.

    Raises KeyboardInterrupt after a signal, LaunchError when the cluster does not come up, and what ``work`` raises.
    """
    client = await SupervisorClient.launch(spec)
    cluster = BenchCluster(client, Path(spec.run_dir))
    reason = "interrupted"
    try:
        if await signals.race(cluster.measured(work)) is Outcome.SIGNAL:
            raise KeyboardInterrupt
        reason = "measured"
    finally:
        await stop_supervisor(client, signals, reason)


class BenchCluster:
    """A cluster as a benchmark uses it. ``up`` once it is ready."""

    def __init__(self, client: SupervisorClient, run_dir: Path) -> None:
        self._client = client
        self._run_dir = run_dir
        self._is_ready = False  # the log was read up to there: what ended before has been replaced
        self._tail = LogTail(run_dir / EVENTS_FILE)
        self.up: SupervisorUp

    async def measured(self, work: Callable[["BenchCluster"], Coroutine[Any, Any, None]]) -> None:
        self.up = await self._client.wait_up()
        await work(self)

    async def command(self, command: Command, is_done: Callable[[Event], bool]) -> None:
        """Have it carried out, and wait for the event that says so. Raises BenchmarkFailed and LaunchError."""
        done = await self._client.send_command(command)
        what = type(command).__name__
        if not done.ok:
            raise BenchmarkFailed(f"{what}: {done.message}")
        await self.read_until(is_done, f"{what}: nothing in the log says that it was done")

    async def read_until(self, is_last: Callable[[Event], bool], problem: str) -> None:
        """Feed ``is_last`` with new events until it is true. Raises BenchmarkFailed when that takes too long or a
        worker ended, LaunchError when the cluster did."""
        deadline = time.monotonic() + _LOG_WAIT_S
        while True:
            is_done = False
            for event in self._tail.read_new():
                self._is_ready = self._is_ready or isinstance(event, RunReady)
                if self._is_ready and isinstance(event, WorkerExited) and event.cause != "stop":
                    raise BenchmarkFailed(f"{event.worker_id} ended while it was measured: {event.cause}")
                is_done = is_last(event) or is_done
            if is_done:
                return
            if self._client.is_gone:
                raise LaunchError(await self._client.death_report(), exit_code=1)
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{problem}; see {self._run_dir}")
            await asyncio.sleep(_POLL_S)

    async def unless_gone(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for ``work``, but not longer than the cluster lives. Raises LaunchError."""
        working = asyncio.create_task(work)
        gone = asyncio.create_task(self._client.wait_gone())
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise LaunchError(await self._client.death_report(), exit_code=1)
            return working.result()
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.wait({working, gone})
