"""Matrix products with weights, in the layout that the device multiplies fastest."""

import torch
import torch.nn.functional as F

_PACKED_FOR_ROWS = 16


class Linear:
    """``rows (n, in)`` -> ``(n, out)`` by a weight ``(out, in)`` without bias.

    On a CPU the weight is repacked once into oneDNN's blocked layout: few rows (decode) and many (prefill) both run
    up to twice as fast as from the plain layout.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._is_packed = _can_pack(weight)
        # the layout is chosen for a number of rows; one for few rows serves many as well, but not the reverse
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._weight, None, "none", [], ""
            )
            return product
        return F.linear(rows, self._weight)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
