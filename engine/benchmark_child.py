"""The child's side of a benchmark: a spec on standard input, messages as JSON lines on standard output."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from engine.benchmark_result import Failed
from engine.model_ids import ModelError

EXIT_FAILED = 2
_Spec = TypeVar("_Spec")


class Benchmark(Protocol):
    """Something that measures; ``run`` may say how far it is and returns the result."""

    def run(self, say: Callable[[Any], None], /) -> msgspec.Struct: ...


@contextlib.contextmanager
def answers() -> Iterator[Callable[[msgspec.Struct], None]]:
    """What is called writes a message to standard output; all else that is printed goes to standard error."""
    with open(os.dup(sys.stdout.fileno()), "wb", buffering=0) as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(message: msgspec.Struct) -> None:
            out.write(msgspec.json.encode(message) + b"\n")

        yield say


def run_child(spec_type: type[_Spec], make: Callable[[_Spec], Benchmark]) -> int:
    """Measure what the spec asks for. Returns the exit code: 0, or 2 after Failed."""
    with answers() as say:
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=spec_type)
        try:
            benchmark = make(spec)
        except (ModelError, ValueError) as error:
            say(Failed(str(error)))
            return EXIT_FAILED
        say(benchmark.run(say))
    return 0
