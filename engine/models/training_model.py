"""The Llama-family decoder in its trainable form: whole sequences, no cache, plain autograd.

Parameter names are those of a Hugging Face Llama checkpoint, so a state dict is written as it is. Serving has its
own model with a paged cache; nothing here is used outside training.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder; the defaults are the model that ships."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_positions: int = 8192
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-5


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, tokens, hidden), cos and sin (tokens, head_dim / 2) -> like x."""
        batch, tokens, _ = x.shape
        group = self.shape.num_heads // self.shape.num_kv_heads

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin).repeat_interleave(group, dim=1)
        v = heads(self.v_proj(x)).repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, hidden) -> like x."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and inside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, tokens, hidden) -> like x."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, token_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """token_ids (batch, tokens) -> hidden states (batch, tokens, hidden)."""
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


class TrainingModel(nn.Module):
    """The whole decoder; its output head is the transposed embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.cos: Tensor
        self.sin: Tensor
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).double(), inverse)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for name, parameter in self.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every layer starts as the identity
            elif name.endswith("_proj.weight"):
                nn.init.normal_(parameter, std=0.6 * parameter.shape[1] ** -0.5)

    def forward(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """token_ids (batch, tokens) -> logits (batch, tokens, vocab).

        ``positions`` (tokens,) must rise and stay below ``max_positions``; by default they count from 0.
        """
        where: Tensor | slice = slice(token_ids.shape[1]) if positions is None else positions
        hidden = self.model(token_ids, self.cos[where], self.sin[where])
        return F.linear(hidden, self.model.embed_tokens.weight)

    def losses(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """token_ids (batch, tokens + 1) -> negative log-likelihood in nats of each next token (batch, tokens)."""
        logits = self(token_ids[:, :-1], positions)
        targets = token_ids[:, 1:]
        flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return flat.view_as(targets)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split order of Llama: x (batch, heads, tokens, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
