"""``pdconsole up`` in a real terminal: the console comes up, and however it ends, terminal and machine are clean."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.events import CodecChanged, RunReady, RunStopped
from cluster.run_dir import is_alive
from tests.e2e.conftest import (
    PDCONSOLE,
    POLL_S,
    ROOT,
    RunningCluster,
    processes_of,
    run_pdconsole,
    wait_until_none,
)

pytestmark = pytest.mark.slow

ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A pseudo terminal of 80x24 with the command in it; everything that was drawn is kept."""

    def __init__(self, *command: str) -> None:
        self.screen = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [*PDCONSOLE, *command],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._master, 65536):
                self.screen += chunk

    @property
    def text(self) -> str:
        return self.screen.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_text(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, f"no {text!r} in {self.text[-2000:]}"
            time.sleep(POLL_S)

    def hang_up(self) -> None:
        os.close(self.slave)
        os.close(self._master)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30.0)
        for fd in (self.slave, self._master):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def terminal(pdconsole_home: Path, run_dir: Path) -> Iterator[Terminal]:
    made = Terminal("up", "--port", "0", "--model", "synthetic:nano", "--run-dir", str(run_dir))
    yield made
    made.close()


@pytest.fixture
def cluster(terminal: Terminal, run_dir: Path, tmp_path: Path) -> RunningCluster:
    """The cluster in the terminal, ready."""
    output = tmp_path / "unused.out"
    output.with_suffix(".err").touch()
    found = RunningCluster(terminal.process, run_dir, output)  # type: ignore[arg-type]
    found.wait_for(RunReady)
    return found


def test_q_stops_the_cluster_and_gives_the_terminal_back(
    terminal: Terminal, cluster: RunningCluster, pdconsole_home: Path
) -> None:
    terminal.wait_text("prefill-0")
    assert ENTER_SCREEN in terminal.text
    terminal.type("q")
    terminal.wait_text("stop the cluster")
    terminal.type("q")
    assert terminal.process.wait(30.0) == 0
    assert [event.orphans for event in cluster.events() if isinstance(event, RunStopped)] == [0]
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []
    assert terminal.text.rindex(LEAVE_SCREEN) > terminal.text.rindex(ENTER_SCREEN)
    assert SHOW_CURSOR in terminal.text
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert f"pdconsole runs show {cluster.info.run}" in terminal.text


def test_a_signal_stops_the_cluster_and_gives_the_terminal_back(
    terminal: Terminal, cluster: RunningCluster, pdconsole_home: Path
) -> None:
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(30.0) == 128 + signal.SIGTERM
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []
    assert terminal.text.rindex(LEAVE_SCREEN) > terminal.text.rindex(ENTER_SCREEN)
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert [event.orphans for event in cluster.events() if isinstance(event, RunStopped)] == [0]


def test_a_terminal_that_is_closed_stops_the_cluster(
    terminal: Terminal, cluster: RunningCluster, pdconsole_home: Path
) -> None:
    terminal.hang_up()
    terminal.process.wait(30.0)
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []
    assert [event.orphans for event in cluster.events() if isinstance(event, RunStopped)] == [0]


def test_a_supervisor_that_dies_closes_the_console_and_is_told(
    terminal: Terminal, cluster: RunningCluster, pdconsole_home: Path
) -> None:
    os.kill(cluster.info.supervisor_pid, signal.SIGKILL)
    assert terminal.process.wait(30.0) == 1
    assert "pdconsole: error: the supervisor ended unexpectedly (signal 9)" in terminal.text
    assert terminal.text.rindex("pdconsole: error") > terminal.text.rindex(LEAVE_SCREEN)
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []


def test_a_detached_cluster_outlives_its_consoles_which_agree(
    terminal: Terminal, cluster: RunningCluster, run_dir: Path, pdconsole_home: Path
) -> None:
    second = Terminal("attach", str(run_dir))
    try:
        second.wait_text("prefill-0")
        terminal.type("m")
        second.wait_text("mode is now colocated (operator, key m)")
        second.type("i")
        changed = cluster.wait_for(CodecChanged)
        terminal.wait_text(f"codec is now {changed.codec} (operator, key i)")
        terminal.type("q")
        terminal.wait_text("detach")
        terminal.type("d")
        assert terminal.process.wait(30.0) == 0
        assert f"pdconsole stop {run_dir}" in terminal.text
        second.wait_text("the console detached")
        second.process.kill()
        second.process.wait(30.0)
    finally:
        second.close()
    third = Terminal("attach", str(run_dir))
    try:
        third.wait_text("prefill-0")
        third.type("q")
        third.wait_text("the cluster goes on")
        third.type("\r")
        assert third.process.wait(30.0) == 0
        assert third.text.rindex(LEAVE_SCREEN) > third.text.rindex(ENTER_SCREEN)
    finally:
        third.close()
    assert is_alive(run_dir)
    ended = run_pdconsole("stop", str(run_dir))
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert not is_alive(run_dir)
    assert [event.orphans for event in cluster.events() if isinstance(event, RunStopped)] == [0]
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []
