"""What this core can do at best: FLOPs per second in matrix products, bytes per second from memory.

They are measured in the process that they are compared with, over and over between its cases: a machine that is slow
for a while is slow for both.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.benchmark_result import LimitSamples, MatmulSamples
from engine.config import ModelConfig
from engine.linear import Linear
from engine.step_cost import matrix_shapes

_MATMUL_TIMING_S = 0.01
_MATMUL_TRIES = 3
_MEMORY_TRIES = 3
_SQUARE = 1024


@dataclass(slots=True)
class _Product:
    """``(rows, in) @ (in, out)`` by every kernel at hand: the limit is not that of the engine's own."""

    name: str
    rows: torch.Tensor
    weight: torch.Tensor  # (out, in)
    linears: tuple[Linear, ...]
    product: torch.Tensor  # (rows, out)
    flops_per_s: list[float] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return 2 * self.rows.shape[0] * self.weight.numel()

    def kernels(self) -> tuple[Callable[[], object], ...]:
        transposed = self.weight.t()
        return (
            *(functools.partial(linear, self.rows) for linear in self.linears),
            lambda: torch.mm(self.rows, transposed, out=self.product),
        )


class CoreLimits:
    """Samples both limits, in rounds.

    The products have the shapes of the model's own matrices times one step's rows, and one square shape, since a
    small model's own do not show what the core can do. Memory is read by summing a buffer of ``buffer_bytes``.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_rows: int, buffer_bytes: int) -> None:
        shapes = {name: shape for name, shape in matrix_shapes(config).items() if name != "head"}
        shapes["square"] = (_SQUARE, _SQUARE)
        self._products = [
            _product(name, num_rows, shape[0], shape[1], dtype) for name, shape in shapes.items()
        ]
        # Written once: a page that nothing was written to is not read from memory.
        self._buffer = torch.empty(max(1, buffer_bytes // 4), dtype=torch.float32).fill_(1.0)
        self._memory_bytes_per_s: list[float] = []

    @torch.inference_mode()
    def sample(self, *, keep: bool) -> None:
        """One sample of every product and a few of the memory; not ``keep``: warm-up."""
        for product in self._products:
            seconds = min(_best_s(kernel) for kernel in product.kernels())
            if keep:
                product.flops_per_s.append(product.flops / seconds)
        for _ in range(_MEMORY_TRIES):
            began = time.perf_counter()
            self._buffer.sum()
            seconds = time.perf_counter() - began
            if keep:
                self._memory_bytes_per_s.append(self._buffer.nbytes / seconds)

    def samples(self) -> LimitSamples:
        """Everything kept so far."""
        return LimitSamples(
            matmul=[
                MatmulSamples(
                    product.name,
                    (product.rows.shape[0], product.rows.shape[1], product.weight.shape[0]),
                    product.flops_per_s,
                )
                for product in self._products
            ],
            memory_buffer_bytes=self._buffer.nbytes,
            memory_bytes_per_s=self._memory_bytes_per_s,
        )


def _product(name: str, num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> _Product:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, num_in, generator=generator).to(dtype)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    linears = Linear(weight), Linear(weight, kernels="torch")
    return _Product(name, rows, weight, linears, torch.empty(num_rows, num_out, dtype=dtype))


def _best_s(kernel: Callable[[], object]) -> float:
    """Seconds of one call: the best of a few timings, each long enough for the clock."""
    began = time.perf_counter()
    kernel()
    calls = max(1, round(_MATMUL_TIMING_S / max(time.perf_counter() - began, 1e-6)))
    best = float("inf")
    for _ in range(_MATMUL_TRIES):
        began = time.perf_counter()
        for _ in range(calls):
            kernel()
        best = min(best, (time.perf_counter() - began) / calls)
    return best
