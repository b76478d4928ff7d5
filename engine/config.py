"""Shapes and limits of one engine. Plain data: importing this does not import torch."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Dtypes the engine computes and stores KV in."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder, as read from a Hugging Face ``config.json``."""

    architecture: str  # "LlamaForCausalLM", ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied output head counts once."""
        q_and_o = 2 * self.hidden_size * self.num_heads * self.head_dim
        k_and_v = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = q_and_o + k_and_v + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of one token over all layers: 2 * layers * kv_heads * head_dim * bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. ``num_blocks`` 0 means: as many as ``kv_cache_bytes`` holds."""

    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 512 * 2**20
    max_num_seqs: int = 32  # running at once
    max_num_batched_tokens: int = 512  # the token budget of one step, prefill chunks and decodes together
    dtype: str = "auto"  # auto | float32 | bfloat16
    device: str = "cpu"
    num_threads: int = 1  # torch intra-op threads
    enable_prefix_caching: bool = True  # reuse full blocks of equal prefixes; results are the same either way

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; allowed is 1 or more")
        if self.num_blocks < 0:
            raise ValueError(f"engine.num_blocks is {self.num_blocks}; allowed is 0 (auto) or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}, below engine.max_num_seqs "
                f"{self.max_num_seqs}; one decode step of every running sequence must fit"
            )
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ValueError(f"engine.dtype is {self.dtype!r}; allowed are auto, {', '.join(DTYPE_BYTES)}")
