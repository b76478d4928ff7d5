"""Measurements of this machine that the doctor reports. Each takes well under a second, but for asking torch."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.python_program import NOTHING_FROM_HERE

PROCESS_MODULES: Final = (
    "cluster.supervisor_main",
    "cluster.nursery_main",
    "cluster.router_main",
    "cluster.worker_main",
)

_TORCH_QUESTION: Final = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'threads': torch.get_num_threads(), "
    "'devices': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
)
_TORCH_TIMEOUT_S: Final = 60.0


class ProbeError(Exception):
    """A measurement could not be made; the message is one line."""


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One row of the process table."""

    pid: int
    parent_pid: int
    command: tuple[str, ...]

    @property
    def module(self) -> str:
        """Which process of a cluster it is; "" for every other one."""
        return next((name for name in PROCESS_MODULES if name in self.command), "")


def ask_torch(python: str = sys.executable) -> dict[str, Any]:
    """Version, threads and devices, from a process of its own: torch is slow to import. Raises ProbeError."""
    try:
        done = subprocess.run(
            [python, NOTHING_FROM_HERE, "-c", _TORCH_QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"{python} cannot be asked: {error}") from error
    if done.returncode != 0:
        raise ProbeError((done.stderr.strip() or "python failed").splitlines()[-1])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def loopback_bits_per_s(tries: int = 3, seconds: float = 0.1) -> float:
    """The best of ``tries`` streams: what one TCP connection over loopback carries here. Raises ProbeError."""
    return max(_stream_bits_per_s(seconds) for _ in range(tries))


def _stream_bits_per_s(seconds: float, chunk_bytes: int = 2**20) -> float:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = socket.create_connection(listener.getsockname(), timeout=5.0)
            receiver, _ = listener.accept()
    except OSError as error:
        raise ProbeError(f"no TCP over 127.0.0.1: {error.strerror}") from error
    begin = time.monotonic()

    def send() -> None:
        chunk = bytes(chunk_bytes)
        with sender:
            while time.monotonic() < begin + seconds:
                sender.sendall(chunk)

    thread = threading.Thread(target=send)
    thread.start()
    received = 0
    buffer = bytearray(chunk_bytes)
    with receiver:
        while size := receiver.recv_into(buffer):
            received += size
    elapsed_s = time.monotonic() - begin
    thread.join()
    return received * 8 / elapsed_s


def directory_problem(directory: Path) -> str:
    """Why nothing can be written below ``directory`` (made if need be); "" = it can."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return ""


def process_table() -> list[ProcessLine]:
    """Every process that can be seen."""
    lines = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
        found = process.info
        lines.append(ProcessLine(found["pid"], found["ppid"] or 0, tuple(found["cmdline"] or ())))
    return lines


def find_leftovers(table: Iterable[ProcessLine], live_supervisors: Iterable[int]) -> list[ProcessLine]:
    """Processes of clusters that are gone.

    A router or worker is one when no supervisor is among its ancestors. A supervisor is one when it holds no run
    that is up (``live_supervisors``, pids) and the process that started it has died, so that init adopted it.
    """
    by_pid = {line.pid: line for line in table}
    living = set(live_supervisors)
    return [
        line
        for line in by_pid.values()
        if line.module and not _belongs(line, by_pid, living) and line.pid != os.getpid()
    ]


def _belongs(line: ProcessLine, by_pid: dict[int, ProcessLine], living: set[int]) -> bool:
    ancestor: ProcessLine | None = line
    for _ in range(len(by_pid)):  # no cycle can hold it
        if ancestor is None:
            return False
        if ancestor.module == "cluster.supervisor_main":
            return ancestor.pid in living or (ancestor.parent_pid > 1 and ancestor.parent_pid in by_pid)
        ancestor = by_pid.get(ancestor.parent_pid)
    return False
