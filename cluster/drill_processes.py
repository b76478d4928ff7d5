"""The processes of a cluster as its drill sees them from outside: how much memory they hold, and which outlive it."""

import contextlib
from collections.abc import Mapping

import psutil

SUPERVISOR = "supervisor"
NURSERY = "nursery"


class ClusterProcesses:
    """Everything that descends from one supervisor. ``look`` often: what was never seen cannot be missed later."""

    def __init__(self, supervisor_pid: int) -> None:
        self._supervisor_pid = supervisor_pid
        self._seen: dict[tuple[int, float], str] = {}  # (pid, when it was created) -> name

    def look(self, names: Mapping[int, str]) -> dict[str, int]:
        """Resident bytes of each living process by name; ``names``: pid -> worker id, of those that have one."""
        found: dict[str, int] = {}
        with contextlib.suppress(psutil.Error):
            supervisor = psutil.Process(self._supervisor_pid)
            for process in (supervisor, *supervisor.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    name = names.get(process.pid, SUPERVISOR if process is supervisor else NURSERY)
                    self._seen[process.pid, process.create_time()] = name
                    found[name] = process.memory_info().rss
        return found

    def living(self) -> tuple[str, ...]:
        """Those of the processes seen that live now, in words; a process that only waits to be reaped is dead."""
        alive = []
        for (pid, created_at), name in self._seen.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created_at and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"pid {pid} ({name}) is {process.status()}")
        return tuple(alive)
