"""What every benchmark does with its result and its progress: stdout, files, stderr."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

from cluster.atomic_file import write_atomically
from cluster.machine_probes import directory_problem
from cluster.measuring_process import BenchmarkFailed, BenchmarkRefused
from console.errors import UserError
from engine.benchmark_result import Progress

EXIT_FAILED = 1
Result = TypeVar("Result")


class ProgressLine:
    """On a terminal one line that changes; elsewhere one line a stage. ``clear`` it before anything else is printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._stage = ""

    def show(self, stage: str, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` things are measured; ``what`` is next."""
        if self._is_terminal:
            print(
                f"\r\x1b[K{done * 100 // total:3} %  {stage}: {what}", end="", file=self._stream, flush=True
            )
        elif stage != self._stage:
            print(stage, file=self._stream, flush=True)
        self._stage = stage

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def with_progress(run: Callable[[Callable[[Progress], None]], Result]) -> Result:
    """Run a benchmark that reports how far it is, and show that on stderr. Raises UserError when it fails."""
    progress = ProgressLine(sys.stderr)
    try:
        return run(lambda next_: progress.show(next_.stage, next_.what, next_.done, next_.total))
    except BenchmarkRefused as error:
        raise UserError(str(error)) from error
    except BenchmarkFailed as error:
        raise UserError(str(error), EXIT_FAILED) from error
    finally:
        progress.clear()


def check_out_dir(out_dir: Path | None) -> None:
    """Before minutes of measuring. Raises UserError when no file can be written there; makes the directory."""
    if out_dir is not None and (problem := directory_problem(out_dir)):
        raise UserError(f"--out: nothing can be written to {problem}")


def print_result(
    name: str, document: dict[str, Any], text: str, *, as_json: bool, out_dir: Path | None
) -> None:
    """The document or the text on stdout, and both into ``out_dir`` as NAME.json and NAME.txt, older ones replaced.

    Raises UserError when a file cannot be written; stdout has the result then.
    """
    as_text = json.dumps(document, indent=2)
    print(as_text if as_json else text, flush=True)
    if out_dir is None:
        return
    for file, content in ((f"{name}.json", as_text), (f"{name}.txt", text)):
        try:
            write_atomically(out_dir / file, f"{content}\n".encode())
        except OSError as error:
            raise UserError(
                f"--out: {out_dir / file} cannot be written: {error.strerror}", EXIT_FAILED
            ) from error
