"""Model ids: what a name like ``tiny`` or ``synthetic:nano`` stands for. Knows no torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from engine.config import ModelConfig
from engine.downloadable import DOWNLOADABLE
from engine.gguf_config import gguf_model_config
from engine.gguf_file import read_gguf
from engine.hf_config import ModelError as ModelError  # "as": both are part of this module's interface
from engine.hf_config import read_json as read_json
from engine.hf_config import read_model_config as read_model_config

SYNTHETIC_PREFIX = "synthetic:"

HUB_PREFIX = "hf:"
"""Begins the id of a model on the Hugging Face Hub, ``hf:ORG/NAME``."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

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


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: exactly one of ``path`` (Hugging Face directory, GGUF file) and ``preset`` is set."""

    model_id: str
    config: ModelConfig
    path: Path | None = None
    preset: str | None = None
    is_gguf: bool = False  # path is a GGUF file


def models_dir() -> Path:
    """Where fetched models lie: ``$PDCONSOLE_HOME/models``, or ``models`` in the user's data directory."""
    home = os.environ.get("PDCONSOLE_HOME")
    return (Path(home) if home else Path(platformdirs.user_data_dir("pdconsole"))) / "models"


def fetched_dir(model_id: str) -> Path:
    """Where a fetched model lies or will lie. Raises ModelError for an id that names none that can be fetched."""
    if model_id in DOWNLOADABLE:
        return models_dir() / model_id
    name = model_id.removeprefix(HUB_PREFIX)
    if name == model_id or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {model_id!r} cannot be fetched; allowed are {', '.join(DOWNLOADABLE)}, or {HUB_PREFIX}ORG/NAME"
        )
    return models_dir() / "hf" / name


def allowed_models() -> tuple[str, ...]:
    """Every id that ``resolve_model`` takes, beside paths and ``hf:ORG/NAME``."""
    return ("tiny", *DOWNLOADABLE, *(SYNTHETIC_PREFIX + name for name in SYNTHETIC_PRESETS))


def fetched_hub_models() -> tuple[str, ...]:
    """The ids of the Hugging Face Hub's models that are on this machine."""
    home = models_dir() / "hf"
    return tuple(
        HUB_PREFIX + str(file.parent.relative_to(home)) for file in sorted(home.glob("*/*/config.json"))
    )


def resolve_model(model: str | Path) -> ModelSource:
    """What ``model`` (an id, ``synthetic:<preset>``, a directory or a GGUF file) stands for, with its shape.

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
    if model_id in DOWNLOADABLE or model_id.startswith(HUB_PREFIX):
        path = fetched_dir(model_id)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model {model_id!r} is not on this machine ({path} is missing); "
                f"fetch it with: pdconsole model get {model_id}"
            )
        return _directory(model_id, path)
    path = Path(model).expanduser()
    if path.is_file():
        path = path.resolve()
        return ModelSource(model_id, gguf_model_config(read_gguf(path)), path=path, is_gguf=True)
    if not path.is_dir():
        raise ModelError(
            f"model {model_id!r} is neither a directory, a file nor a known id; allowed are "
            f"{', '.join(allowed_models())}, {HUB_PREFIX}ORG/NAME, a Hugging Face model directory, or a GGUF file"
        )
    return _directory(model_id, path.resolve())


def _directory(model_id: str, path: Path) -> ModelSource:
    return ModelSource(model_id, read_model_config(path), path=path)
