"""The transformer: token ids and positions in, logits out. Knows no requests, no scheduling and no sampling.

All tokens of a step, of any number of sequences, go through every layer as the rows of one matrix; only attention
looks at sequences one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.attention import Attention
from engine.config import ModelConfig
from engine.kv_cache import PagedKVCache
from engine.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are ``(out, in)``; q, k, v are one matrix and so are gate and up."""

    input_norm: torch.Tensor  # (hidden,)
    qkv: Linear  # ((heads + 2 * kv_heads) * head_dim, hidden)
    out: Linear  # (hidden, heads * head_dim)
    mlp_norm: torch.Tensor  # (hidden,)
    gate_up: Linear  # (2 * intermediate, hidden)
    down: Linear  # (hidden, intermediate)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the model multiplies with; ``head`` has the values of ``embedding`` where they are tied."""

    embedding: torch.Tensor  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # (hidden,)
    head: Linear  # (vocab, hidden)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a batch that belong to one sequence."""

    first_row: int
    num_rows: int
    num_logits: int  # of how many rows, counted from the last, the logits are wanted
    num_tokens: int  # keys in the cache when this chunk is written: its own are the last ``num_rows``
    runs: tuple[tuple[int, int], ...]  # the block table, as contiguous_runs gives it


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows. ``n`` is their number."""

    token_ids: torch.Tensor  # (n,) int64
    positions: torch.Tensor  # (n,) int64
    slots: torch.Tensor  # (n,) int64: where each row's KV goes
    chunks: tuple[ChunkRows, ...]
    logit_rows: torch.Tensor  # (m,) int64: the rows that the chunks' ``num_logits`` name, in order


class LlamaModel:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU. No state but the weights and scratch buffers."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._attention = Attention(self.dtype, self.device)
        self._cos, self._sin = rope_tables(config, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Write the rows' KV to the cache and return logits ``(m, vocab)`` of ``batch.logit_rows``."""
        config, weights = self.config, self.weights
        cos, sin = self._cos[batch.positions].unsqueeze(1), self._sin[batch.positions].unsqueeze(1)
        hidden = F.embedding(batch.token_ids, weights.embedding)
        chunks = batch.chunks
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._qkv(layer.qkv(self._norm(hidden, layer.input_norm)), cos, sin)
            cache.write(index, keys, values, batch.slots)
            if index == config.num_layers - 1:  # from here on, only what becomes logits
                hidden, queries, chunks = (
                    hidden[batch.logit_rows],
                    queries[batch.logit_rows],
                    _logit_chunks(chunks),
                )
                if not chunks:
                    break
            hidden = hidden + layer.out(self._attend(index, queries, chunks, cache))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).split(
                config.intermediate_size, dim=-1
            )
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        if not chunks:
            return torch.empty((0, config.vocab_size), dtype=self.dtype, device=self.device)
        return weights.head(self._norm(hidden, weights.norm))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _qkv(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split ``(n, (heads + 2 * kv_heads) * head_dim)`` into rotated queries, rotated keys and values."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]

    def _attend(
        self, index: int, queries: torch.Tensor, chunks: Sequence[ChunkRows], cache: PagedKVCache
    ) -> torch.Tensor:
        """``queries (n, heads, head_dim)`` -> ``(n, heads * head_dim)``, each sequence over its own keys."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        grouped = queries.unflatten(1, (config.num_kv_heads, group))
        out = torch.empty(grouped.shape, dtype=self.dtype, device=self.device)
        for chunk in chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            keys, values = cache.gather(index, chunk.runs, chunk.num_tokens)
            self._attention(grouped[rows], keys, values, out[rows])
        return out.flatten(1)


def _logit_chunks(chunks: Sequence[ChunkRows]) -> tuple[ChunkRows, ...]:
    """The chunks as they are when all other rows are taken out."""
    kept: list[ChunkRows] = []
    first_row = 0
    for chunk in chunks:
        if chunk.num_logits:
            kept.append(replace(chunk, first_row=first_row, num_rows=chunk.num_logits))
            first_row += chunk.num_logits
    return tuple(kept)


def rope_tables(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``(max_model_len, head_dim / 2)`` of every position, computed in float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(config.max_model_len).float().unsqueeze(1) * inverse_frequencies
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


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
