"""Model ids: what a name like ``tiny`` or ``synthetic:nano`` stands for. Reads config.json; knows no torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from engine.config import ModelConfig

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
"""Architectures the weight loader can build."""

DOWNLOADABLE = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Model id -> Hugging Face repository it is fetched from."""

SYNTHETIC_PREFIX = "synthetic:"

BYTE_EOS_ID = 256
"""End token of the byte tokenizer that synthetic models use."""

_TINY_DIR = Path(__file__).resolve().parent / "models" / "tiny"


def _synthetic(**shape: Any) -> ModelConfig:
    return ModelConfig(architecture="LlamaForCausalLM", eos_token_ids=(BYTE_EOS_ID,), **shape)


SYNTHETIC_PRESETS = {
    "nano": _synthetic(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=8192,
    ),
    "gpt2-small": _synthetic(
        vocab_size=50257,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        max_model_len=8192,
    ),
    "smollm2-135m": _synthetic(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_model_len=8192,
        rope_theta=100000.0,
    ),
}
"""Shapes of ``synthetic:<preset>``. ``gpt2-small`` has GPT-2 small's sizes; its SwiGLU is two thirds as wide as
GPT-2's MLP, which gives the same number of weights."""


class ModelError(ValueError):
    """A model id or directory that cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: exactly one of ``path`` (Hugging Face directory) and ``preset`` is set."""

    model_id: str
    config: ModelConfig
    path: Path | None = None
    preset: str | None = None


def models_dir() -> Path:
    """Where fetched models lie: ``$PDCONSOLE_HOME/models``, or ``models`` in the user's data directory."""
    home = os.environ.get("PDCONSOLE_HOME")
    return (Path(home) if home else Path(platformdirs.user_data_dir("pdconsole"))) / "models"


def allowed_models() -> tuple[str, ...]:
    """Every id that ``resolve_model`` takes, beside paths."""
    return ("tiny", *DOWNLOADABLE, *(SYNTHETIC_PREFIX + name for name in SYNTHETIC_PRESETS))


def resolve_model(model: str | Path) -> ModelSource:
    """What ``model`` (an id, ``synthetic:<preset>`` or a directory) stands for, with its shape.

    Raises ModelError for an unknown id or preset, a model that is not on this machine yet, a directory without
    ``config.json``, and an architecture or feature that is not supported.
    """
    model_id = str(model)
    if model_id.startswith(SYNTHETIC_PREFIX):
        preset = model_id.removeprefix(SYNTHETIC_PREFIX)
        if preset not in SYNTHETIC_PRESETS:
            raise ModelError(
                f"synthetic preset {preset!r} is unknown; allowed are {', '.join(SYNTHETIC_PRESETS)}"
            )
        return ModelSource(model_id, SYNTHETIC_PRESETS[preset], preset=preset)
    if model_id == "tiny":
        return _directory(model_id, _TINY_DIR)
    if model_id in DOWNLOADABLE:
        path = models_dir() / model_id
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model {model_id!r} is not on this machine ({path} is missing or incomplete); "
                f"put the files of Hugging Face's {DOWNLOADABLE[model_id]} there"
            )
        return _directory(model_id, path)
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"model {model_id!r} is neither a directory nor a known id; "
            f"allowed are {', '.join(allowed_models())}, or a Hugging Face model directory"
        )
    return _directory(model_id, path.resolve())


def _directory(model_id: str, path: Path) -> ModelSource:
    return ModelSource(model_id, read_model_config(path), path=path)


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
    """The shape in a Hugging Face directory's ``config.json``, end tokens of ``generation_config.json`` included.

    Raises ModelError for a missing key and for anything that this engine would compute wrongly.
    """
    file = path / "config.json"
    raw = read_json(file)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{file}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _refuse_unsupported(file, raw)
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_model_len=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(file, raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(path, raw),
            bos_token_id=raw.get("bos_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{file}: key {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error


def _refuse_unsupported(file: Path, raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{file}: hidden_act {activation!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ModelError(f"{file}: {key} true is not supported; supported: false")


def _rope_theta(file: Path, raw: dict[str, Any]) -> float:
    """From ``rope_parameters`` (newer files) or ``rope_theta`` and ``rope_scaling`` (older ones)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"{file}: RoPE scaling {kind!r} is not supported; supported: default")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End tokens: those of generation_config.json where it names any (as ``generate`` does), else config.json's."""
    eos = raw.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(int(token_id) for token_id in (eos if isinstance(eos, list) else [eos]))
