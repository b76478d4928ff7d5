"""Shapes and limits of one engine. Plain data: importing this does not import torch."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Dtypes the engine computes and stores KV in."""

_MODEL_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family (Llama, Qwen2, Qwen3), as read from a Hugging Face ``config.json``."""

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
    rope_freq_factors: tuple[float, ...] = ()  # (head_dim / 2,): divide the rotary frequencies; empty: by 1
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # the query, key and value projections add a bias
    out_bias: bool = False  # the attention's output projection adds a bias
    qk_norm: bool = False  # RMSNorm over every query and key head, before its position
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _MODEL_SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed is 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if len(self.rope_freq_factors) not in (0, self.head_dim // 2):
            raise ValueError(
                f"rope_freq_factors has {len(self.rope_freq_factors)} numbers; "
                f"allowed is 0 or head_dim / 2 = {self.head_dim // 2}"
            )

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied output head counts once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q_size + kv_size)  # q and o, k and v
        attention += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.out_bias
        attention += 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    @property
    def fills_vectors(self) -> bool:
        """True for what the compiled kernels take: sizes of whole vectors of 16, at most 16 heads to a key."""
        sizes = (self.hidden_size, self.intermediate_size, self.head_dim // 2)
        return self.num_heads // self.num_kv_heads <= 16 and not any(size % 16 for size in sizes)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of one token over all layers: 2 * layers * kv_heads * head_dim * bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    ``num_blocks`` 0 means: as many as ``kv_cache_bytes`` holds; that 0 too: a share of the free memory.
    """

    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 512 * 2**20
    max_num_seqs: int = 32  # running at once
    max_num_batched_tokens: int = 512  # the token budget of one step, prefill chunks and decodes together
    prefill_chunk_tokens: int = 0  # of one prompt computed in one step, at most; 0 = the whole budget
    dtype: str = "auto"  # auto | float32 | bfloat16
    device: str = "cpu"
    num_threads: int = 1  # torch intra-op threads
    kernels: str = "auto"  # auto: compiled where they exist for model and machine | torch
    enable_prefix_caching: bool = True  # reuse full blocks of equal prefixes; results are the same either way

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; allowed is 1 or more")
        for name in ("num_blocks", "kv_cache_bytes", "prefill_chunk_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; allowed is 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}, below engine.max_num_seqs "
                f"{self.max_num_seqs}; one decode step of every running sequence must fit"
            )
        if self.prefill_chunk_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"engine.prefill_chunk_tokens is {self.prefill_chunk_tokens}; allowed is up to "
                f"engine.max_num_batched_tokens ({self.max_num_batched_tokens}), or 0 (the whole budget)"
            )
        if self.kernels not in ("auto", "torch"):
            raise ValueError(f"engine.kernels is {self.kernels!r}; allowed are auto, torch")
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ValueError(f"engine.dtype is {self.dtype!r}; allowed are auto, {', '.join(DTYPE_BYTES)}")

    @property
    def kernels_in_use(self) -> str:
        """``kernels``, but "torch" for several threads: the compiled code runs in one."""
        return self.kernels if self.num_threads == 1 else "torch"
