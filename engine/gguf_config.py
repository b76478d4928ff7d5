"""A GGUF file's model: its shape, and which of its tensors is which. Reads no weights but the RoPE factors."""

import struct
from dataclasses import dataclass
from typing import Final

from engine.config import ModelConfig
from engine.gguf_file import GgufFile, GgufTensor
from engine.hf_config import ModelError

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""GGUF's architectures that the engine computes, by Hugging Face's names."""

_ROPE_FACTORS: Final = "rope_freqs.weight"
_F32: Final = 0

_MODEL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

_INTERLEAVED: Final = {"attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor that the model uses."""

    name: str  # Hugging Face's
    stored: GgufTensor
    interleaved_heads: int = (
        0  # rows of each head have their two halves interleaved; 0: in Hugging Face's order
    )


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """The shape of a GGUF file's model.

    Raises ModelError for an architecture that is not supported, for missing or wrong metadata, and for every feature
    that the engine would compute wrongly.
    """
    kind = file.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(file, kind)
    hidden, heads = file.integer(f"{kind}.embedding_length"), file.integer(f"{kind}.attention.head_count")
    embedding = _tensor(file, "token_embd.weight")
    try:
        return ModelConfig(
            architecture=ARCHITECTURES[kind],
            vocab_size=embedding.shape[0] if embedding.shape else 0,
            hidden_size=hidden,
            intermediate_size=file.integer(f"{kind}.feed_forward_length"),
            num_layers=_num_layers(file, kind),
            num_heads=heads,
            num_kv_heads=file.integer(f"{kind}.attention.head_count_kv", heads),
            head_dim=_head_dim(file, kind, hidden, heads),
            max_model_len=file.integer(f"{kind}.context_length"),
            rms_norm_eps=_measure(file, f"{kind}.attention.layer_norm_rms_epsilon"),
            rope_theta=_measure(file, f"{kind}.rope.freq_base", 10000.0),
            rope_freq_factors=_rope_factors(file),
            tie_word_embeddings="output.weight" not in file.tensors,
            qkv_bias=kind == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
            out_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm=kind == "qwen3",
            eos_token_ids=_end_tokens(file),
            bos_token_id=_optional_token(file, "bos_token_id"),
        )
    except ValueError as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{file.path}: {error}") from error


def model_tensors(file: GgufFile, config: ModelConfig) -> list[ModelTensor]:
    """The file's tensors under Hugging Face's names. Raises ModelError for one that the model has no place for."""
    # llama.cpp rotates neighbours in the llama architecture, and its files have the rows of Q and K ordered for that
    is_interleaved = config.architecture == "LlamaForCausalLM"
    found = []
    for stored in file.tensors.values():
        if stored.name == _ROPE_FACTORS:
            continue
        name, heads = _MODEL_NAMES.get(stored.name), 0
        prefix, _, rest = stored.name.partition(".")
        index, _, part = rest.partition(".")
        if prefix == "blk" and index.isdecimal() and part in _LAYER_NAMES:
            name = f"model.layers.{int(index)}.{_LAYER_NAMES[part]}"
            if is_interleaved and part in _INTERLEAVED:
                heads = config.num_heads if part.startswith("attn_q.") else config.num_kv_heads
        if name is None:
            raise ModelError(
                f"{file.path}: tensor {stored.name} has no place in a {config.architecture} as the engine computes it"
            )
        found.append(ModelTensor(name, stored, heads))
    return found


def _refuse_unsupported(file: GgufFile, kind: str) -> None:
    if file.integer("split.count", 1) > 1:
        raise ModelError(
            f"{file.path} is one of {file.integer('split.count')} parts; supported are whole files"
        )
    if file.integer(f"{kind}.expert_count", 0):
        raise ModelError(f"{file.path}: a mixture of experts is not supported; supported are dense models")
    scaling = file.text(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{file.path}: RoPE scaling {scaling!r} is not supported; supported: none, llama3")
    context = file.integer(f"{kind}.context_length")
    window = file.integer(f"{kind}.attention.sliding_window", 0)
    if 0 < window < context:
        raise ModelError(f"{file.path}: a sliding window of {window} tokens is not supported")


def _num_layers(file: GgufFile, kind: str) -> int:
    num_layers = file.integer(f"{kind}.block_count")
    if num_layers > len(file.tensors):
        raise ModelError(
            f"{file.path}: {kind}.block_count is {num_layers}, but there are only {len(file.tensors)} tensors"
        )
    return num_layers


def _head_dim(file: GgufFile, kind: str, hidden: int, heads: int) -> int:
    if heads < 1:
        raise ModelError(f"{file.path}: {kind}.attention.head_count is {heads}; allowed is 1 or more")
    head_dim = file.integer(f"{kind}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.integer(f"{kind}.{key}", head_dim)
        if size != head_dim:
            raise ModelError(f"{file.path}: {kind}.{key} is {size}; supported is the head size, {head_dim}")
    return head_dim


def _rope_factors(file: GgufFile) -> tuple[float, ...]:
    """What each rotary frequency is divided by (Llama 3's scaling); empty where the file has no such tensor."""
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type_id != _F32 or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: tensor {tensor.name} is not one row of 32-bit floats")
    layout = f"<{min(tensor.shape[0], file.size)}f"
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        content = stream.read(struct.calcsize(layout))
    if len(content) < struct.calcsize(layout):
        raise ModelError(f"{file.path} is cut off: tensor {tensor.name} goes on after byte {file.size}")
    factors: tuple[float, ...] = struct.unpack(layout, content)
    if not all(0 < factor < float("inf") for factor in factors):
        raise ModelError(f"{file.path}: tensor {tensor.name} has factors that are not above 0")
    return () if all(factor == 1.0 for factor in factors) else factors


def _end_tokens(file: GgufFile) -> tuple[int, ...]:
    """The end of text and, where the file names one, the end of a turn."""
    ends = (_optional_token(file, key) for key in ("eos_token_id", "eot_token_id"))
    return tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))


def _optional_token(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}"
    return file.integer(key) if key in file.metadata else None


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name]


def _measure(file: GgufFile, key: str, default: float | None = None) -> float:
    """A number above 0, as it was written: 1e-05, where the file's 32-bit float is 9.99999974737875e-06."""
    value = file.number(key, default)
    if not 0 < value < float("inf"):
        raise ModelError(f"{file.path}: {key} is {value:g}; allowed is a number above 0")
    return float(f"{value:.7g}")
