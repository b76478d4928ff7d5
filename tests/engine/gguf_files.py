"""Small GGUF files, written with the gguf library from models of transformers."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|turn|>"]
BEGIN_ID, END_ID = 0, 1

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

CORPUS = [
    "the quick brown fox jumps over the lazy dog 1234567890",
    "naïve café, 日本語 and 🙂 emoji 🙃 it's we'll",
    "def f(x):\n    return x ** 2\n\n\n",
]


def train_tokenizer(vocab_size: int = 330) -> Tokenizer:
    """A byte-level BPE whose first ids are SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order that llama.cpp wants of Q and K of a llama: each head's row i beside its row i + half."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    stored_as: str = "F32",
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    changes: dict[str, object] | None = None,
    rope_factors: np.ndarray | None = None,
) -> None:
    """Store ``model``, and set its weights to what the stored ones dequantise to.

    ``changes`` add metadata or replace it; None leaves a key out.
    """
    config = model.config
    kind = config.model_type
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    metadata: dict[str, object] = {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": heads,
        f"{kind}.attention.head_count_kv": kv_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{kind}.rope.dimension_count": config.head_dim,
    }
    if tokenizer is not None:
        metadata |= tokenizer_metadata(tokenizer, pre)
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (metadata | (changes or {})).items():
        add_metadata(writer, key, value)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        format_ = gguf.GGMLQuantizationType[stored_as if values.ndim == 2 else "F32"]
        if kind == "llama" and "self_attn.q_proj." in name:
            values = interleaved(values, heads)
        if kind == "llama" and "self_attn.k_proj." in name:
            values = interleaved(values, kv_heads)
        writer.add_tensor(gguf_name(name), gguf.quantize(values, format_), raw_dtype=format_)
        # rows are quantised one by one, so their order does not matter to what they become
        exact = gguf.dequantize(gguf.quantize(tensor.float().numpy(), format_), format_)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(exact)))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": BEGIN_ID,
        "tokenizer.ggml.eos_token_id": END_ID,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")
