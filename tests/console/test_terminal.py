"""The real terminal: whatever ends the console, the terminal is given back and the exit code says why."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.terminal import TerminalWriter
from console.tty import why_no_screen

ENTERED = b"\x1b[?1049h"
LEFT = b"\x1b[?1049l"
CURSOR = b"\x1b[?25h"
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


class Shown:
    """The console as a child with a pseudo-terminal of its own as its controlling terminal."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.console.show", str(tmp_path), "--seconds", "5", *options],
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, close_fds=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
            env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        self.slave = slave
        self.output = b""

    def read_until(self, *wanted: bytes) -> None:
        """Until each of the byte strings was written, or the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(text in self.output for text in wanted):
            assert time.monotonic() < deadline, f"{wanted} not in {self.output[-2000:]!r}"
            self.read_some(0.2)

    def read_some(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], timeout_s)
        if ready:
            self.output += os.read(self.master, 65536)
        return bool(ready)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    @property
    def unread_bytes(self) -> int:
        """What the console wrote and nobody read."""
        size: int = struct.unpack("i", fcntl.ioctl(self.master, termios.FIONREAD, b"\0" * 4))[0]
        return size

    def wait(self) -> int:
        """The exit code; what is written meanwhile is read."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the console did not end"
            self.read_some(0.1)
        while self.read_some(0.0):
            pass
        return self.process.returncode

    @property
    def restored(self) -> bool:
        """Left the alternate screen, cursor shown, and the line discipline is what it was."""
        after = termios.tcgetattr(self.slave)
        return (
            LEFT in self.output
            and self.output.rindex(CURSOR) > self.output.rindex(LEFT)
            and after == self.before
        )

    @property
    def afterwards(self) -> str:
        """What was written after the terminal was given back, without escape sequences that draw nothing."""
        rest = self.output[self.output.rindex(CURSOR) + len(CURSOR) :]
        return re.sub(rb"\x1b\[\?\d+l", b"", rest).decode().strip()


@pytest.fixture
def shown(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shown]:
    console = Shown(tmp_path, *getattr(request, "param", ()))
    yield console
    if console.process.poll() is None:
        console.process.kill()
        console.process.wait()
    for fd in (console.master, console.slave):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_the_terminal(shown: Shown, number: signal.Signals) -> None:
    shown.read_until(ENTERED, b"requests", b"quit")
    shown.process.send_signal(number)
    assert shown.wait() == 128 + number
    assert shown.restored
    assert shown.afterwards == ""


@pytest.mark.parametrize("keys", [b"qq", b"\x03\x03"])
def test_leaving_by_key_restores_the_terminal(shown: Shown, keys: bytes) -> None:
    shown.read_until(ENTERED, b"requests", b"quit")
    shown.type(keys[:1])
    shown.read_until(b"Stop")
    shown.type(keys[1:])
    assert shown.wait() == 0
    assert shown.restored
    assert shown.afterwards == ""


@pytest.mark.parametrize("shown", [("--crash",)], indirect=True)
def test_an_error_in_a_widget_is_one_line(shown: Shown, tmp_path: Path) -> None:
    shown.read_until(ENTERED)
    assert shown.wait() == 1
    assert shown.restored
    log = tmp_path / "logs" / "console.log"
    assert shown.afterwards == (
        f"pdconsole: the console failed: ValueError: a widget broke [/x] (traceback in {log})"
    )
    assert "Traceback" in log.read_text()
    assert b"value of a local" not in shown.output


def test_a_closed_terminal_ends_the_console(shown: Shown) -> None:
    shown.read_until(ENTERED, b"quit")
    os.close(shown.slave)
    os.close(shown.master)
    shown.master = shown.slave = -1
    assert shown.process.wait(DEADLINE_S) == 128 + signal.SIGHUP


@pytest.mark.parametrize("shown", [("--ignore-hangup",)], indirect=True)
def test_a_closed_terminal_is_noticed_without_the_signal(shown: Shown) -> None:
    shown.read_until(ENTERED, b"quit")
    os.close(shown.slave)
    os.close(shown.master)
    shown.master = shown.slave = -1
    assert shown.process.wait(DEADLINE_S) == 128 + signal.SIGHUP


def test_a_terminal_that_takes_nothing_does_not_stop_the_console(shown: Shown) -> None:
    """Nobody reads the terminal any more, as in a stalled session: a signal must still end the console."""
    shown.read_until(ENTERED, b"quit")
    waiting, full_for = 0, 0
    while full_for < 60:  # more redraws than Textual's own queue holds, after the terminal took the last byte
        shown.resize(160, 45)
        shown.resize(80, 24)
        select.select([], [], [], 0.05)
        before, waiting = waiting, shown.unread_bytes
        full_for = full_for + 1 if waiting == before > 1000 else 0
    shown.process.send_signal(signal.SIGTERM)
    assert shown.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("shown", [("--replay",)], indirect=True)
def test_a_replay_gives_the_terminal_back(shown: Shown) -> None:
    shown.read_until(ENTERED, b"PAUSED")
    shown.type(b"q")
    assert shown.wait() == 0
    assert shown.restored
    assert shown.afterwards == ""


def test_a_screen_needs_all_three_and_a_terminal_that_can_place_text(tmp_path: Path) -> None:
    assert why_no_screen() or sys.__stdin__ is not None
    code = "from console.tty import why_no_screen; import sys; sys.exit(not why_no_screen())"
    master, slave = pty.openpty()
    try:
        for streams, term, expected in (
            ((slave, slave, slave), "xterm", 1),
            ((slave, slave, slave), "dumb", 0),
            ((slave, slave, None), "xterm", 0),
            ((None, slave, slave), "xterm", 0),
        ):
            stdin, stdout, stderr = (subprocess.DEVNULL if s is None else s for s in streams)
            done = subprocess.run(
                [sys.executable, "-c", code], stdin=stdin, stdout=stdout, stderr=stderr, cwd=ROOT,
                env=os.environ | {"TERM": term},
            )  # fmt: skip
            assert done.returncode == expected
    finally:
        os.close(master)
        os.close(slave)


def test_a_writer_drops_what_a_stalled_terminal_does_not_take_and_recovers() -> None:
    master, slave = pty.openpty()
    try:
        writer = TerminalWriter(slave, stall_ms=10)
        writer.write("x" * 1_000_000)  # more than the terminal holds: returns all the same
        assert not writer.take_recovered()
        while select.select([master], [], [], 0)[0]:
            os.read(master, 65536)
        writer.write("fresh")
        assert os.read(master, 100).endswith(b"\x18fresh")
        assert writer.take_recovered()
        assert not writer.take_recovered()
        os.close(master)
        master = -1
        writer.write("gone")
        assert writer.gone
    finally:
        os.close(slave)
        if master >= 0:
            os.close(master)
