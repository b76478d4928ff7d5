"""iperf3 as a yardstick: one TCP stream between two processes, on the cores and in the namespace of who starts it."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import Final

from cluster.guarded_main import guarded_program

TIMEOUT_S: Final = 20.0
NOT_INSTALLED: Final = "iperf3 is not installed"


class Iperf3Error(Exception):
    """It gave no figure; the message is one line."""


@dataclass(frozen=True, slots=True)
class Iperf3Result:
    num_bytes: int
    duration_s: float
    sender_cpu_s: float
    receiver_cpu_s: float


def is_installed() -> bool:
    return shutil.which("iperf3") is not None


def version() -> str:
    """ "3.12"; "" = not installed."""
    if not is_installed():
        return ""
    said = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    return said.split()[1] if len(said.split()) > 1 else ""


class Iperf3Server:
    """Serves one test. Dies with the thread that made it. Raises Iperf3Error if it does not come up."""

    def __init__(self, host: str) -> None:
        with socket.create_server((host, 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process = subprocess.Popen(
            guarded_program(
                ["iperf3", "-s", "-1", "--forceflush", "-B", host, "-p", str(self.port)], os.getpid(), ()
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line.strip())
            if line.startswith("Server listening"):
                return
        self.close()
        raise Iperf3Error(f"iperf3 does not listen on {host}: {' '.join(said) or 'it said nothing'}")

    def close(self) -> None:
        """It ends by itself after its test; one that had none is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def run_iperf3(
    host: str, port: int, seconds: int, bits_per_s: float, congestion_control: str
) -> Iperf3Result:
    """One stream for so long; ``bits_per_s`` 0 = as fast as it goes, else paced by the same socket option as ours.

    Raises Iperf3Error.
    """
    command = ["iperf3", "-J", "-c", host, "-p", str(port), "-t", str(seconds)]
    if congestion_control:
        command += ["-C", congestion_control]
    if bits_per_s:
        command += ["--fq-rate", f"{bits_per_s:.0f}"]
    try:
        done = subprocess.run(
            guarded_program(command, os.getpid(), ()),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds + TIMEOUT_S,
        )
        return parse(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        raise Iperf3Error(f"iperf3 took longer than {seconds + TIMEOUT_S:g} s") from None
    except ValueError:
        raise Iperf3Error(f"iperf3 said {done.stdout[:80]!r}") from None


def parse(document: dict[str, object]) -> Iperf3Result:
    """What ``iperf3 -J`` prints. Raises Iperf3Error for its own complaint, or for fields that are not there."""
    if "error" in document:
        raise Iperf3Error(f"iperf3: {document['error']}")
    try:
        end: dict[str, dict[str, float]] = document["end"]  # type: ignore[assignment]
        received, cpu = end["sum_received"], end["cpu_utilization_percent"]
        duration_s = received["seconds"]
        return Iperf3Result(
            num_bytes=int(received["bytes"]),
            duration_s=duration_s,
            sender_cpu_s=cpu["host_total"] / 100 * duration_s,
            receiver_cpu_s=cpu["remote_total"] / 100 * duration_s,
        )
    except (KeyError, TypeError) as error:
        raise Iperf3Error(f"iperf3's report has no {error}") from error
