"""Causal attention of one sequence's new tokens over its keys and values. Knows no cache and no batch.

Shapes: ``queries (n, num_kv_heads, group, head_dim)``, where ``group`` query heads share a key head;
``keys`` and ``values`` ``(num_kv_heads, num_tokens, head_dim)``, the new tokens being the last ``n`` of them;
``out`` as ``queries``. Keys and values are never repeated for the heads that share them, nor copied.
"""

import math

import torch
import torch.nn.functional as F

_FLASH_ROWS = 128
_TILED_ROWS = 64
"""New tokens taken at once: small enough that little is computed beyond the diagonal and that the working set
stays in cache, large enough that the matrix products run at full speed."""


class Attention:
    """Chooses the fastest kernel for device and dtype, and keeps the buffers these need."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        # Torch's CPU kernel is best in float32; in bfloat16 plain matrix products are three times as fast.
        self._use_flash = device.type == "cpu" and dtype == torch.float32
        self._scores = torch.empty(0, dtype=dtype, device=device)

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the attention of the last ``n`` tokens to ``out``."""
        num_new = queries.shape[0]
        if num_new == 1:
            _attend_one(queries, keys, values, out)
            return
        rows = _FLASH_ROWS if self._use_flash else _TILED_ROWS
        start = keys.shape[1] - num_new
        for first in range(0, num_new, rows):
            last = min(first + rows, num_new)
            tile = (queries[first:last], keys[:, : start + last], values[:, : start + last], out[first:last])
            if self._use_flash:
                _attend_flash(*tile)
            else:
                self._attend_tiled(*tile)

    def _attend_tiled(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Two matrix products and a softmax per key head, in one buffer that is allocated once."""
        num_new, num_kv_heads, group, head_dim = queries.shape
        num_keys = keys.shape[1]
        rows = num_new * group
        if self._scores.numel() < rows * num_keys:
            self._scores = torch.empty(rows * num_keys, dtype=queries.dtype, device=queries.device)
        scores = self._scores[: rows * num_keys].view(rows, num_keys)
        diagonal = scores.view(num_new, group, num_keys)[:, :, num_keys - num_new :]
        future = torch.ones(num_new, num_new, dtype=torch.bool, device=queries.device).triu_(1).unsqueeze(1)
        scaled = (queries * (1.0 / math.sqrt(head_dim))).transpose(0, 1).reshape(num_kv_heads, rows, head_dim)
        attended = torch.empty_like(scaled)
        for head in range(num_kv_heads):
            torch.mm(scaled[head], keys[head].t(), out=scores)
            diagonal.masked_fill_(future, -math.inf)
            torch.softmax(scores, dim=-1, out=scores)  # summed in float32 whatever the dtype
            torch.mm(scores, values[head], out=attended[head])
        out.copy_(attended.view(num_kv_heads, num_new, group, head_dim).transpose(0, 1))


def _attend_one(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """A decode step: the heads of a group are the query rows of their key head."""
    attended = F.scaled_dot_product_attention(queries, keys.unsqueeze(0), values.unsqueeze(0))
    out.copy_(attended)


def _attend_flash(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Earlier keys without a mask, new keys with a causal one; the two are joined by their log-sum-exp."""
    num_new = queries.shape[0]
    start = keys.shape[1] - num_new
    heads = queries.permute(1, 2, 0, 3)  # (num_kv_heads, group, n, head_dim)
    attended, log_sum = _flash(heads, keys[:, start:], values[:, start:], True)
    if start:
        earlier, earlier_log_sum = _flash(heads, keys[:, :start], values[:, :start], False)
        weight = torch.sigmoid(earlier_log_sum - log_sum).unsqueeze(-1)
        attended = torch.lerp(attended, earlier, weight)
    out.copy_(attended.permute(2, 0, 1, 3))


def _flash(
    heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's CPU kernel: ``(num_kv_heads, group, n, head_dim)`` and the log-sum-exp ``(num_kv_heads, group, n)``."""
    num_kv_heads, group, _, head_dim = heads.shape
    shape = (num_kv_heads, group, keys.shape[1], head_dim)
    shared_keys = keys.unsqueeze(1).expand(shape)  # stride 0 over the group: not repeated
    shared_values = values.unsqueeze(1).expand(shape)
    attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        heads, shared_keys, shared_values, 0.0, is_causal
    )
    return attended, log_sum
