"""A GGUF file to a Hugging Face directory: bfloat16 weights, configuration, tokenizer and chat template.

The directory is what ``transformers`` and this engine both read, so a fetched model has one form on disk.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from engine.config import ModelConfig
from engine.gguf_config import gguf_model_config, model_tensors
from engine.gguf_file import GgufFile, read_gguf
from engine.gguf_tensors import read_gguf_tensors, stored_formats
from engine.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from engine.hf_config import LLAMA, QWEN2, QWEN3, ModelError
from engine.safetensors_writer import write_bfloat16_safetensors

_MODEL_TYPES: Final = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3"}


def convert_gguf(
    source: Path, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill an existing, empty directory. ``progress`` hears of tensors done and in all.

    Weights are rounded to bfloat16, so their values are not exactly the file's. Raises ModelError for a file that
    cannot be used, and OSError; the directory is then incomplete.
    """
    file = read_gguf(source)
    config = gguf_model_config(file)
    if config.rope_freq_factors:
        raise ModelError(f"{source}: RoPE factors cannot be written to a config.json; load the file itself")
    tokenizer = read_gguf_tokenizer(file)
    shapes = {tensor.name: tensor.stored.shape for tensor in model_tensors(file, config)}

    def counted() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for done, named in enumerate(read_gguf_tensors(file, config)):
            progress(done, len(shapes))
            yield named
        progress(len(shapes), len(shapes))

    write_bfloat16_safetensors(directory / "model.safetensors", shapes, counted())
    tokenizer.tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(tokenizer, config))
    _write_json(directory / "generation_config.json", _token_ids(file, config))
    _write_json(directory / "config.json", _model_config(config) | _token_ids(file, config))


def describe_formats(source: Path) -> str:
    """The file's storage formats with their shares of the weights: ``Q4_1 79 %, Q8_0 21 %``. Raises ModelError."""
    formats = stored_formats(read_gguf(source))
    total = sum(formats.values())
    shares = [
        f"{name} {100 * count / total:.0f} %" for name, count in formats.items() if count * 200 >= total
    ]
    return ", ".join(shares)


def _model_config(config: ModelConfig) -> dict[str, Any]:
    document = {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if config.architecture == QWEN2:
        return document | {"use_sliding_window": False}
    return document | {"attention_bias": config.qkv_bias, "mlp_bias": False}


def _token_ids(file: GgufFile, config: ModelConfig) -> dict[str, Any]:
    ends = list(config.eos_token_ids)
    ids: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _tokenizer_config(tokenizer: GgufTokenizer, config: ModelConfig) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "model_max_length": config.max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template is not None:
        document["chat_template"] = tokenizer.chat_template
    return document


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
