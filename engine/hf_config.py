"""A Hugging Face directory's ``config.json`` to a ``ModelConfig``. Knows no torch, no weights and no model ids.

What this engine would compute wrongly is refused by name: a model runs as its makers meant it, or not at all.
"""

import json
import math
from pathlib import Path
from typing import Any

from engine.config import ModelConfig

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"

SUPPORTED_ARCHITECTURES = (LLAMA, QWEN2, QWEN3)
"""Architectures the weight loader can build."""


class ModelError(ValueError):
    """A model id, directory or file that cannot be used; the message names it and what is allowed."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError naming the file when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def read_model_config(path: Path) -> ModelConfig:
    """The shape in a directory's ``config.json``, end tokens of ``generation_config.json`` included.

    Raises ModelError for a missing or impossible key and for anything that this engine would compute wrongly.
    """
    file = path / "config.json"
    raw = read_json(file)
    architecture = _architecture(file, raw)
    _refuse_unsupported(file, raw)
    has_bias = bool(raw.get("attention_bias")) and architecture != QWEN2  # whose files say nothing about it
    try:
        hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        head_dim = _size(raw, "head_dim", default=hidden // heads)
        kind, rope = _rope(file, raw)
        theta = _number(rope if rope.get("rope_theta") else raw, "rope_theta", default=10000.0)
        return ModelConfig(
            architecture=architecture,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(raw, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            max_model_len=_size(raw, "max_position_embeddings"),
            rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6),
            rope_theta=theta,
            rope_freq_factors=_llama3_freq_factors(rope, theta, head_dim) if kind == "llama3" else (),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or architecture == QWEN2,
            out_bias=has_bias,
            qk_norm=architecture == QWEN3,
            eos_token_ids=_eos_token_ids(path, raw),
            bos_token_id=raw.get("bos_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{file}: key {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or ["(none)"]
    architecture = str(named[0] if isinstance(named, list) else named)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{file}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return architecture


def _refuse_unsupported(file: Path, raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{file}: hidden_act {activation!r} is not supported; supported: silu")
    for key in ("mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ModelError(f"{file}: {key} true is not supported; supported: false")
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise ModelError(f"{file}: layer type {kind!r} is not supported; supported: full_attention")
    if raw.get("quantization_config"):
        raise ModelError(
            f"{file}: quantization_config is set, quantised safetensors are not supported; "
            "supported: weights in float32, float16 or bfloat16"
        )


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A count; ``default`` stands for a key that is missing or null. Raises KeyError and ValueError."""
    value = raw.get(key) if default is not None else raw[key]
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; allowed is a whole number of 1 or more")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A measure; ``default`` as for ``_size``. Raises KeyError and ValueError."""
    value = raw.get(key) if default is not None else raw[key]
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}; allowed is a number above 0")
    return float(value)


def _rope(file: Path, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of rotary positions, and ``rope_parameters`` (newer files) or ``rope_scaling`` (older ones)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {rope!r}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"{file}: RoPE scaling {kind!r} is not supported; supported: default, llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{file}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; supported: 1.0"
        )
    return kind, rope


def _llama3_freq_factors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3's stretching of the context, as divisors of the rotary frequencies.

    Wavelengths (in tokens) well inside the context of the pretraining stay, those beyond it are stretched by
    ``factor``, and the frequencies between are a mean of both. Raises KeyError and ValueError.
    """
    factor, low, high = (_number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = _size(rope, "original_max_position_embeddings")
    if low >= high:
        raise ValueError(f"high_freq_factor is {high:g}; allowed is more than low_freq_factor {low:g}")
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (exponent / head_dim)
        kept = (context / wavelength - low) / (high - low)  # the share of the unstretched frequency
        kept = min(1.0, max(0.0, kept))
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End tokens: those of generation_config.json where it names any (as ``generate`` does), else config.json's."""
    eos = raw.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(int(token_id) for token_id in (eos if isinstance(eos, list) else [eos]))
