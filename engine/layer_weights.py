"""What a model multiplies with. Plain data."""

from dataclasses import dataclass

import torch

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
    q_norm: torch.Tensor | None = None  # (head_dim,) of every query head, before its position; Qwen3
    k_norm: torch.Tensor | None = None  # (head_dim,)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the model multiplies with; ``head`` has the values of ``embedding`` where they are tied."""

    embedding: torch.Tensor  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # (hidden,)
    head: Linear  # (vocab, hidden)
