"""Weights: from a Hugging Face directory or seeded random numbers to the model's matrices.

A further file format (GGUF) is one more function that returns named tensors; a further architecture is its names and
shapes in ``expected_shapes``, its matrices in ``build_weights`` and its name in ``SUPPORTED_ARCHITECTURES``.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.dtypes import resolve_dtype
from engine.fingerprint import model_fingerprint
from engine.linear import Linear
from engine.model import LayerWeights, LlamaModel, ModelWeights
from engine.model_ids import ModelError, read_json, resolve_model

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The engine's dtype names as torch's."""

_SYNTHETIC_SEED = 20_240_229


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``fingerprint`` is that of the stored weights: it does not depend on ``dtype``."""

    model_id: str
    config: ModelConfig
    model: LlamaModel
    fingerprint: str
    dtype: str  # float32 | bfloat16, never auto
    device: str


def load_model(model: str | Path, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load a model id, ``synthetic:<preset>`` or Hugging Face directory (see ``resolve_model``).

    Raises ModelError for a model that cannot be used and ValueError for an unknown dtype.
    """
    source = resolve_model(model)
    dtype = resolve_dtype(dtype, device)
    tensors = read_safetensors(source.path) if source.path else synthetic_tensors(source.config)
    tensors = _expected_tensors(source.model_id, source.config, tensors)
    fingerprint = model_fingerprint(source.config, sorted(tensors.items()))
    weights = build_weights(source.config, tensors, TORCH_DTYPES[dtype], device)
    return LoadedModel(
        source.model_id, source.config, LlamaModel(source.config, weights), fingerprint, dtype, device
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, as Hugging Face stores them."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[layer + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[layer + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, mlp)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's ``model.safetensors``, or of the shards that its index names.

    Raises ModelError naming the file that is missing or broken.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: weight_map is missing")
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = [path / "model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read weights from {file}: {error}") from error
    return tensors


def synthetic_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights, the same in every process: activations keep their size and logits spread by about one."""
    generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
    residual_scale = 1.0 / math.sqrt(2 * config.num_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        bound = math.sqrt(3.0 / shape[1])  # uniform in +-bound has variance 1 / fan-in
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            bound *= residual_scale
        tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return tensors


def build_weights(
    config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: str
) -> ModelWeights:
    """Named tensors to the model's matrices, converted, with q, k, v and gate, up joined."""

    def fused(*names: str) -> torch.Tensor:
        parts = [tensors[name] for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.to(device=device, dtype=dtype).contiguous()

    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        projections = [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"]
        layers.append(
            LayerWeights(
                input_norm=fused(layer + "input_layernorm.weight"),
                qkv=Linear(fused(*projections)),
                out=Linear(fused(layer + "self_attn.o_proj.weight")),
                mlp_norm=fused(layer + "post_attention_layernorm.weight"),
                gate_up=Linear(fused(layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight")),
                down=Linear(fused(layer + "mlp.down_proj.weight")),
            )
        )
    embedding = fused("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=fused("model.norm.weight"),
        head=Linear(embedding if config.tie_word_embeddings else fused("lm_head.weight")),
    )


def _expected_tensors(
    model_id: str, config: ModelConfig, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Only the tensors the model uses; ModelError names the first that is missing or of another shape."""
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"model {model_id}: tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"model {model_id}: tensor {name} has shape {tuple(tensors[name].shape)}; config.json asks for {shape}"
            )
    return {name: tensors[name] for name in shapes}
