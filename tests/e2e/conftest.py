"""Real clusters for the tests: ``pdconsole up --headless`` as a user runs it, and proof that it left nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import psutil
import pytest

from cluster.events import Event, RunReady, WorkerStarting
from cluster.run_dir import RunInfo, read_run_info
from cluster.run_log import EVENTS_FILE, LogTail

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PDCONSOLE: Final = (sys.executable, "-m", "console")
START_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.02

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass
class RunningCluster:
    """One ``pdconsole up --headless`` in a process of its own, started but not necessarily ready."""

    process: "subprocess.Popen[str]"
    run_dir: Path
    output: Path
    _tail: LogTail = field(init=False)
    _seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = LogTail(self.run_dir / EVENTS_FILE)

    @property
    def info(self) -> RunInfo:
        """``run.json``; there once the cluster is ready, and a little before."""
        return read_run_info(self.run_dir)

    @property
    def url(self) -> str:
        return self.info.url

    @property
    def worker_pids(self) -> set[int]:
        """Every worker and router that was ever started."""
        return {event.pid for event in self.events() if isinstance(event, WorkerStarting)}

    def events(self) -> list[Event]:
        """The run's log up to now."""
        while new := self._tail.read_new():
            self._seen += new
        return self._seen

    def wait_for(
        self, kind: type[E], matches: Callable[[E], bool] = lambda _: True, timeout_s: float = START_TIMEOUT_S
    ) -> E:
        """The first event of this kind that matches, waited for. Fails when the command ends without it."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            for event in self.events():
                if isinstance(event, kind) and matches(event):
                    return event
            assert not ended, f"no {kind.__name__}: exit code {self.process.returncode}\n{self.stderr()}"
            assert time.monotonic() < deadline, f"no {kind.__name__} within {timeout_s} s\n{self.stderr()}"
            time.sleep(POLL_S)

    def wait_ready(self) -> "RunningCluster":
        self.wait_for(RunReady)
        return self

    def stderr(self) -> str:
        return self.output.with_suffix(".err").read_text(encoding="utf-8")

    def end(self, number: int | None = None, timeout_s: float = 60.0) -> Ended:
        """Send a signal (None: it ends by itself) and wait for the command's end."""
        if number is not None:
            self.process.send_signal(number)
        exit_code = self.process.wait(timeout_s)
        return Ended(exit_code, self.output.read_text(encoding="utf-8"), self.stderr())


EXACT = ("--set", "model.dtype=float32")
"""Tokens that another worker goes on with are promised to be the same in float32; auto may be bfloat16."""


@pytest.fixture
def pdconsole_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory of this test's own; it is also the mark by which every process of the test is known."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("PDCONSOLE_HOME", str(home))
    before = _network_leftovers()
    yield home
    left = wait_until_none(lambda: processes_of(home))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert left == [], f"processes of the test are still alive: {left}"
    assert wait_until_none(lambda: sorted(_network_leftovers() - before)) == []
    assert [path for path in home.rglob("*") if path.is_socket()] == []


@pytest.fixture
def running_cluster(pdconsole_home: Path, tmp_path: Path) -> Iterator[Callable[..., RunningCluster]]:
    """``start(*options)`` runs ``pdconsole up --headless`` on a free port with a small model of random weights.

    Options given later win over these. What still runs at the test's end is interrupted; whatever happens then, the
    test fails if a process, a namespace or an interface is left.
    """
    started: list[RunningCluster] = []

    def start(*options: str, model: str = "synthetic:nano") -> RunningCluster:
        run_dir = tmp_path / f"run-{len(started)}"
        output = tmp_path / f"run-{len(started)}.out"
        with output.open("w") as out, output.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                [
                    *PDCONSOLE,
                    "up",
                    "--headless",
                    "--port",
                    "0",
                    "--model",
                    model,
                    "--run-dir",
                    str(run_dir),
                    *EXACT,
                    *options,
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        cluster = RunningCluster(process, run_dir, output)
        started.append(cluster)
        return cluster

    yield start
    for cluster in started:
        if cluster.process.poll() is None:
            cluster.process.send_signal(signal.SIGINT)
    for cluster in started:
        try:
            cluster.process.wait(30.0)
        except subprocess.TimeoutExpired:
            cluster.process.kill()
            cluster.process.wait()
            raise


def run_pdconsole(*argv: str, timeout_s: float = 60.0, cwd: Path = ROOT) -> Ended:
    """One ``pdconsole`` command from start to end."""
    ran = subprocess.run(
        [*PDCONSOLE, *argv],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)


def processes_of(home: Path) -> list[psutil.Process]:
    """Living processes that were started under this data directory, whatever became of their parents."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get("PDCONSOLE_HOME") == str(home):
                found.append(process)
    return found


T = TypeVar("T")


def wait_until_none(look: Callable[[], list[T]], timeout_s: float = 5.0) -> list[T]:
    """What ``look`` still finds after at most ``timeout_s``; [] as soon as it finds nothing."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def _network_leftovers() -> set[str]:
    """What outlives processes: named namespaces and network interfaces. A namespace without a name, a process or an
    open descriptor does not exist any more."""
    names: set[str] = set()
    for directory in ("/run/netns", "/var/run/netns", "/sys/class/net"):
        with contextlib.suppress(FileNotFoundError):
            names.update(f"{directory}/{name}" for name in os.listdir(directory))
    return names
