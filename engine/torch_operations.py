"""What a layer does between its matrix products, in plain torch: any device, any dtype, any shape.

The compiled operations do the same in fewer passes; where both exist they agree within rounding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.attention import Attention
from engine.config import ModelConfig
from engine.forward_batch import ChunkRows, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.layer_weights import LayerWeights


class TorchOperations:
    """Operations on the rows of one step after another. ``cos`` and ``sin`` are ``(max_model_len, head_dim / 2)``."""

    def __init__(self, config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._config = config
        self._cos, self._sin = cos, sin
        self._attention = Attention(cos.dtype, cos.device)
        self._batch_cos = self._batch_sin = self._slots = torch.empty(0)

    def begin(self, batch: ForwardBatch, cache: PagedKVCache) -> None:
        """A step begins; what follows is about its rows and this cache."""
        device = self._cos.device
        positions = torch.from_numpy(batch.positions).to(device)
        self._batch_cos, self._batch_sin = (
            self._cos[positions].unsqueeze(1),
            self._sin[positions].unsqueeze(1),
        )
        self._slots = torch.from_numpy(batch.slots).to(device)
        self._cache = cache

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of every row ``(n, size)``."""
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)

    def add_norm(self, hidden: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden += addend`` in place, then ``norm``."""
        return self.norm(hidden.add_(addend), weight)

    def rotate_and_write(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        """Queries ``(n, heads, head_dim)`` with positions; keys and values go to the cache's layer ``index``.

        ``qkv`` is ``(n, (heads + 2 * kv_heads) * head_dim)`` and may be changed.
        """
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self._config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            heads[:, :num_heads] = self.norm(heads[:, :num_heads], layer.q_norm)
            heads[:, num_heads:-num_kv_heads] = self.norm(heads[:, num_heads:-num_kv_heads], layer.k_norm)
        rotated = rotate(heads[:, : num_heads + num_kv_heads], self._batch_cos, self._batch_sin)
        self._cache.write(index, rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], self._slots)
        return rotated[:, :num_heads]

    def attend(self, index: int, queries: torch.Tensor, chunks: Sequence[ChunkRows]) -> torch.Tensor:
        """``queries (n, heads, head_dim)`` -> ``(n, heads * head_dim)``, each sequence over its own keys."""
        group = self._config.num_heads // self._config.num_kv_heads
        grouped = queries.unflatten(1, (self._config.num_kv_heads, group))
        out = torch.empty(grouped.shape, dtype=queries.dtype, device=queries.device)
        for chunk in chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            keys, values = self._cache.gather(index, chunk.table.runs(), chunk.num_tokens)
            self._attention(grouped[rows], keys, values, out[rows])
        return out.flatten(1)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: ``(n, 2 * size)`` -> ``(n, size)``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``(n, heads, head_dim)``: element i is paired with element i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=rotated_first)
    rotated_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second)
    rotated_second.addcmul_(first, sin)
    return rotated
