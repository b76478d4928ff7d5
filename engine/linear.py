"""Matrix products with weights, in the layout that the device multiplies fastest."""

import threading
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from engine.bulk_memory import Scratch
from engine.kernels import matmul
from engine.kernels.products import Unit, unit
from engine.kv_cache import numbers_of
from engine.row_buffer import RowBuffer

_PACKED_FOR_ROWS = 16


class Linear:
    """``rows (n, in)`` -> ``(n, out)`` by a weight ``(out, in)`` and an optional bias ``(out,)``.

    On a CPU the weight is repacked once: for the compiled product where the processor multiplies bfloat16 (``kernels``
    "auto"), else into oneDNN's blocked layout. Few rows (decode) and many (prefill) run from the same copy.
    The result is valid until the next product of the same width in the same thread.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, kernels: str = "auto") -> None:
        self._product = _product(weight, bias, kernels)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows)


def _product(
    weight: torch.Tensor, bias: torch.Tensor | None, kernels: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    on_cpu = weight.device.type == "cpu"
    compiled = kernels == "auto" and on_cpu and weight.dtype == torch.bfloat16 and matmul.fits(*weight.shape)
    if compiled and (kind := unit()):
        return _CompiledProduct(weight, bias, kind)
    if on_cpu and _can_pack(weight.dtype):
        return _OneDnnProduct(weight, bias)
    return lambda rows: F.linear(rows, weight, bias)


class _OneDnnProduct:
    """A row's result does not depend on the other rows: a single one is multiplied beside a copy of itself.

    For one row oneDNN has another kernel, which sums in another order; two rows cost a batch-1 step 3 % more.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        # the layout is chosen for a number of rows; one for few rows serves many as well, but not the reverse
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows if count > 1 else rows.repeat(2, 1), self._weight, self._bias, "none", [], ""
        )
        return product[:count]


class _CompiledProduct:
    """Its result is memory that the next product of the same width in the same thread writes to again."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: Unit) -> None:
        self._multiply = matmul.multiply_by(kind)
        self._outputs, self._inputs = weight.shape
        self._weight = matmul.pack(numbers_of(weight).reshape(weight.shape))
        self._bias = np.empty(0, np.uint16) if bias is None else numbers_of(bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        out, out_numbers = _workspace.rows(self._outputs).first(count)
        scratch = _workspace.words.first(matmul.scratch_words(count, self._inputs))
        self._multiply(
            numbers_of(rows),
            self._weight,
            self._bias,
            count,
            self._inputs,
            self._outputs,
            out_numbers,
            scratch,
        )
        return out


class _Workspace(threading.local):
    """What products write to, one of each for a thread: fresh memory for each would cost as much as the product."""

    def __init__(self) -> None:
        self._rows: dict[int, RowBuffer] = {}
        self.words = Scratch(np.int32)

    def rows(self, size: int) -> RowBuffer:
        """Rows of ``size`` bfloat16."""
        buffer = self._rows.get(size)
        if buffer is None:
            buffer = self._rows[size] = RowBuffer(size, torch.bfloat16)
        return buffer


_workspace = _Workspace()


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
