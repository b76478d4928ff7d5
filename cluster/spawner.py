"""Ways to get a process: run a program, or fork one from the nursery. A ChildProcess is made from either."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

KERNEL_CACHE_ENTRIES: Final = 128
LIBRARY_SETTINGS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_PROC_BIND": "false",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNEL_CACHE_ENTRIES),
    "LRU_CACHE_CAPACITY": str(KERNEL_CACHE_ENTRIES),
}
"""Environment of every process made here, whatever the user's own says.

Libraries start no pools of theirs at import (a fork copies one thread), and no thread leaves the cores that its process
is given later. How many threads compute is said by the profile, to torch. The last two bound what torch and oneDNN keep
for every number of rows that a matrix product ever had: 1,024 entries of half a megabyte are their default.
"""


class SpawnError(Exception):
    """The process cannot be had at all; the message says why."""


class Spawned(Protocol):
    """A process that exists and is not reaped."""

    @property
    def pid(self) -> int: ...

    async def reap(self) -> int:
        """Wait for one that has ended; the exit code, negative for a signal. Call it once."""
        ...


class Spawner(Protocol):
    @property
    def is_pending(self) -> bool:
        """It will soon be able to spawn faster than now: better to wait a little."""
        ...

    async def spawn(self, child_id: str, log_path: Path, link_fd: int, fds: Sequence[int]) -> Spawned:
        """A process that leads its own session, reads its parent link from ``link_fd`` and writes to ``log_path``.

        It inherits ``link_fd`` and ``fds`` under the same numbers. Call it in the main thread. Raises SpawnError.
        """
        ...

    async def close(self) -> None:
        """Nothing is to be spawned any more."""
        ...


class ProgramSpawner:
    """Runs ``command --fd N``."""

    is_pending = False

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def spawn(self, child_id: str, log_path: Path, link_fd: int, fds: Sequence[int]) -> "_Program":
        """See Spawner. Nothing is awaited: a cancelled caller loses no process."""
        try:
            process = _popen([*self._command, "--fd", str(link_fd)], log_path, (link_fd, *fds))
        except OSError as error:
            raise SpawnError(f"{child_id}: {self._command[0]} cannot be run: {error.strerror}") from error
        return _Program(process)

    async def close(self) -> None:
        """Nothing to give back."""


class _Program:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    async def reap(self) -> int:
        return self._process.wait()


def _popen(command: Sequence[str], log_path: Path, pass_fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    with open(log_path, "ab", opener=_open_private) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**os.environ, **LIBRARY_SETTINGS},
        )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
