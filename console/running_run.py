"""Which running cluster is meant, and how it is ended from outside."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

from cluster.run_dir import RunInfo, RunRecord, find_run, list_runs
from console.errors import UserError

EXIT_FAILED: Final = 1
POLL_S: Final = 0.05
STOP_MARGIN_S: Final = 15.0
"""Beyond the profile's own grace: writing the summary, removing the links."""


def find_running(name: str | None) -> tuple[RunRecord, RunInfo]:
    """The run of that name, directory or URL, which must be up; None: the only one that is. Raises UserError."""
    running = [record for record in list_runs() if record.is_alive]
    if name is None:
        if len(running) > 1:
            raise UserError(
                f"{len(running)} clusters are running; name one: {', '.join(run.run for run in running)}"
            )
        if not running:
            raise UserError("no cluster is running; start one with: pdconsole up")
        record = running[0]
    elif "://" in name:
        record = next(
            (run for run in running if run.info and run.info.url == name.rstrip("/")), None
        ) or _no_url(name)
    else:
        record = find_run(name)
        if not record.is_alive:
            others = ", ".join(run.run for run in running) or "none"
            raise UserError(
                f"run {record.run} has ended (running: {others}); see: pdconsole replay {record.run}"
            )
    if record.info is None:
        raise UserError(f"run {record.run} is still starting; try again in a second")
    return record, record.info


def _no_url(name: str) -> RunRecord:
    raise UserError(f"{name} is no cluster that runs here")


def stop_run(record: RunRecord, info: RunInfo, *, at_once: bool) -> float:
    """End it and wait until it has ended; returns how long that took, in seconds.

    ``at_once``: nobody is waited for inside. Raises UserError when it does not end.
    """
    began_at = time.monotonic()
    limit_s = info.profile.supervisor.stop_grace_s + STOP_MARGIN_S
    for _ in range(2 if at_once else 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.supervisor_pid, signal.SIGTERM)
        time.sleep(POLL_S)  # two that come together are taken for one
    while record.is_alive:
        if time.monotonic() - began_at > limit_s:
            raise UserError(
                f"run {record.run} (supervisor pid {info.supervisor_pid}) has not ended within {limit_s:g} s; "
                f"see {Path(record.path, 'logs')}",
                EXIT_FAILED,
            )
        time.sleep(POLL_S)
    return time.monotonic() - began_at
