"""A process that measures, guarded and on cores of its own; what it says are JSON lines. Imports no torch."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from cluster.guarded_main import guarded_command
from engine.benchmark_result import Failed

_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Answer = TypeVar("Answer")


class BenchmarkFailed(Exception):
    """The measuring process gave no result; the message is one line."""


class BenchmarkRefused(BenchmarkFailed):
    """It was asked for something that it cannot do."""


class MeasuringProcess:
    """Runs ``module`` on ``cores``; gone when the context ends.

    Enter it in the main thread: the process dies with the thread that started it.
    """

    def __init__(self, module: str, cores: Sequence[int], pass_fds: Sequence[int] = ()) -> None:
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                guarded_command(module, os.getpid(), tuple(cores)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # Ctrl+C in the terminal comes to this process alone
                pass_fds=tuple(pass_fds),
            )
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> "MeasuringProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def say(self, message: msgspec.Struct, *, is_last: bool = False) -> None:
        """One line of JSON. ``is_last`` ends its standard input. A process that is gone is noticed by ``hear``."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
            if is_last:
                stdin.close()

    def hear(self, decode: Callable[[bytes], Answer]) -> Answer:
        """Its next line, never Failed. Raises BenchmarkRefused for that, BenchmarkFailed for another line or none."""
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise BenchmarkFailed(self._last_words())
        try:
            message = decode(line)
        except msgspec.DecodeError as error:
            raise BenchmarkFailed(f"the measuring process said {line[:80]!r}: {error}") from error
        if isinstance(message, Failed):
            raise BenchmarkRefused(message.message)
        return message

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}" + (
                " (out of memory?)" if code == -signal.SIGKILL else ""
            )
        return f"the measuring process ended by {how}: {last}"
