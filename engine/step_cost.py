"""What a prefill has to compute and a decode step has to read, in FLOPs and bytes. Pure arithmetic on shapes.

A multiplication and the addition that follows it are two FLOPs. Counted is what the result needs, not what a kernel
happens to do: scores above the diagonal, padding and copies are nobody's work. Norms, positions, SiLU, biases and the
lookup of embeddings are left out of the FLOPs; together they are below a hundredth of the products.
"""

from collections.abc import Sequence
from typing import Final

from engine.config import DTYPE_BYTES, ModelConfig

MATRICES: Final = ("qkv", "out", "gate_up", "down", "head")
"""The products with weights, by the names of ``engine.model.LayerWeights`` and ``ModelWeights``."""

ATTENTION: Final = "attention"


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """``(out, in)`` of every matrix in MATRICES; all but ``head`` exist once per layer."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (q_size + 2 * kv_size, hidden),
        "out": (hidden, q_size),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
        "head": (config.vocab_size, hidden),
    }


def prefill_flops(config: ModelConfig, num_tokens: int) -> dict[str, int]:
    """FLOPs of one prompt's prefill by part (MATRICES and ATTENTION); their sum is the prefill's.

    A matrix costs 2 * out * in for every row that goes through it. Attention costs a token at position p (from 1)
    2 * heads * head_dim * p for its scores and as much for the sum over values. Only the last token's logits are
    wanted, so ``head`` has one row; and the last layer needs ``qkv`` of all tokens (their keys and values are what a
    prefill is for) but everything after it of the last token only.
    """
    full_layers = config.num_layers - 1
    rows = {"qkv": config.num_layers * num_tokens, "head": 1}
    flops = {
        name: 2 * out_size * in_size * rows.get(name, full_layers * num_tokens + 1)
        for name, (out_size, in_size) in matrix_shapes(config).items()
    }
    positions = full_layers * (num_tokens * (num_tokens + 1) // 2) + num_tokens
    flops[ATTENTION] = 2 * 2 * config.num_heads * config.head_dim * positions
    return flops


def decode_bytes(config: ModelConfig, dtype: str, num_keys: Sequence[int]) -> dict[str, int]:
    """Bytes that one decode step reads by part; their sum is the step's.

    Every weight once, whatever the batch: the matrices, and under ``other`` norms and biases. A tied head is read
    like any matrix; of an embedding only one row per sequence is, which is left out. Attention reads keys and values
    of ``num_keys`` tokens for each sequence, its newest token included.
    """
    size = DTYPE_BYTES[dtype]
    weights = {
        name: out_size * in_size * (1 if name == "head" else config.num_layers)
        for name, (out_size, in_size) in matrix_shapes(config).items()
    }
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    other = config.num_parameters - embedding - sum(weights.values())
    return {
        **{name: count * size for name, count in weights.items()},
        ATTENTION: config.kv_bytes_per_token(dtype) * sum(num_keys),
        "other": other * size,
    }
