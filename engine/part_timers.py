"""Where an engine's time goes, by timers around the parts of its model. Costs about a microsecond a part.

The model's forward and its matrices are timed by methods that replace theirs for as long as the timers are open, its
operations by something that stands before them. Time in a part that is called from another one counts for the inner
one only, so that all parts together are the whole.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from engine.linear import Linear
from engine.model import LlamaModel
from engine.step_cost import ATTENTION

NORMS: Final = "norms"
ROPE: Final = "rope_kv_write"
SILU: Final = "silu"

REST: Final = "model_rest"
"""The model's forward without its other parts: the embeddings' lookup, and getting from one part to the next."""

OUTSIDE: Final = "scheduler_sampler"
"""The engine's step without the model."""

_OPERATIONS: Final = {
    "norm": NORMS,
    "add_norm": NORMS,  # with the residual
    "rotate_and_write": ROPE,
    "attend": ATTENTION,
    "silu_multiply": SILU,
}
"""The part of each method of ``engine.operations``."""


class Stopwatch:
    """One running clock that is always charged to exactly one part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.parts_s: dict[str, float] = {}
        self._clock = clock
        self._stack = [OUTSIDE]
        self._since = clock()

    def reset(self) -> None:
        """Forget everything so far."""
        self.parts_s = {}
        self._since = self._clock()

    def read(self) -> dict[str, float]:
        """Seconds by part since ``reset``, up to now."""
        self._charge()
        return dict(self.parts_s)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge ``name`` within."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now = self._clock()
        name = self._stack[-1]
        self.parts_s[name] = self.parts_s.get(name, 0.0) + now - self._since
        self._since = now


class _TimedOperations:
    """Passes every method on to a model's operations, and times it."""

    def __init__(self, operations: object, stopwatch: Stopwatch) -> None:
        self._operations = operations
        self._stopwatch = stopwatch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._operations, name)

        def timed(*args: Any) -> Any:
            with self._stopwatch.part(_OPERATIONS.get(name, REST)):
                return method(*args)

        return timed


@contextlib.contextmanager
def part_timers(model: LlamaModel) -> Iterator[Stopwatch]:
    """Time ``model``'s parts: matrices by their names, operations, the rest of it, and what is not the model."""
    stopwatch = Stopwatch()
    names = {id(model.weights.head): "head"}
    for layer in model.weights.layers:
        matrices = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}
        names |= {id(matrix): name for name, matrix in matrices.items()}
    forward, multiply = LlamaModel.forward, Linear.__call__

    def timed_forward(self: LlamaModel, batch: Any, cache: Any, operations: object, *others: Any) -> Any:
        with stopwatch.part(REST):
            timed = _TimedOperations(operations, stopwatch)
            return forward(self, batch, cache, timed, *others)  # type: ignore[arg-type]

    def timed_multiply(self: Linear, rows: Any) -> Any:
        with stopwatch.part(names.get(id(self), REST)):
            return multiply(self, rows)

    with _replaced(LlamaModel, "forward", timed_forward), _replaced(Linear, "__call__", timed_multiply):
        yield stopwatch


@contextlib.contextmanager
def _replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
