"""The child's side of a benchmark: a spec on standard input, messages as JSON lines on standard output."""

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from engine.benchmark_result import Failed
from engine.model_ids import ModelError

_EXIT_FAILED = 2
_Spec = TypeVar("_Spec")


class Benchmark(Protocol):
    """Something that measures; ``run`` may say how far it is and returns the result."""

    def run(self, say: Callable[[Any], None], /) -> msgspec.Struct: ...


def run_child(spec_type: type[_Spec], make: Callable[[_Spec], Benchmark]) -> int:
    """Measure what the spec asks for. Returns the exit code: 0, or 2 after Failed."""
    # A library that prints must not break the messages.
    with open(os.dup(sys.stdout.fileno()), "wb", buffering=0) as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(message: msgspec.Struct) -> None:
            out.write(msgspec.json.encode(message) + b"\n")

        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=spec_type)
        try:
            benchmark = make(spec)
        except (ModelError, ValueError) as error:
            say(Failed(str(error)))
            return _EXIT_FAILED
        say(benchmark.run(say))
    return 0
