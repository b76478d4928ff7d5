"""Supervisors for the tests of this package, each ended with all it started."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cluster.events import WorkerStarting
from cluster.profile import Profile
from tests.cluster.supervised_run import PROFILE, Run
from tests.cluster.supervision import is_alive


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(
        profile: Profile = PROFILE, worker: str | None = "plain", router: str | None = "plain", load: str = ""
    ) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", profile, worker, router, load))
        return runs[-1]

    yield begin
    for run in runs:
        run.supervisor.kill_now()
        await run.task
        for starting in run.events(WorkerStarting):
            assert not is_alive(starting.pid)
