"""Weights: from a Hugging Face directory, a GGUF file or seeded random numbers to the model's matrices.

A further file format is one more function that returns named tensors; a further architecture is its names and shapes
in ``expected_shapes``, its matrices in ``build_weights`` and its name in ``SUPPORTED_ARCHITECTURES``.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.dtypes import resolve_dtype
from engine.fingerprint import model_fingerprint
from engine.gguf_file import read_gguf
from engine.gguf_tensors import read_gguf_tensors
from engine.layer_weights import LayerWeights, ModelWeights
from engine.linear import Linear
from engine.model import LlamaModel
from engine.model_ids import ModelError, ModelSource, read_json, resolve_model

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The engine's dtype names as torch's."""

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that weights may have on disk."""

# what files repeat of other tensors or of the config: a tied head, and the rotary frequencies
_REDUNDANT = ("lm_head.weight", "rotary_emb.inv_freq")

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


def load_model(
    model: str | Path, dtype: str = "auto", device: str = "cpu", kernels: str = "auto"
) -> LoadedModel:
    """Load a model id, ``synthetic:<preset>``, Hugging Face directory or GGUF file (see ``resolve_model``).

    ``kernels``: as in ``EngineConfig``; "torch" keeps the weights in torch's layouts.

    Raises ModelError for a model that cannot be used and ValueError for an unknown dtype.
    """
    source = resolve_model(model)
    dtype = resolve_dtype(dtype, device)
    tensors = _read_tensors(source)
    tensors = _expected_tensors(source.model_id, source.config, tensors)
    fingerprint = model_fingerprint(source.config, sorted(tensors.items()))
    weights = build_weights(source.config, tensors, TORCH_DTYPES[dtype], device, kernels)
    return LoadedModel(
        source.model_id, source.config, LlamaModel(source.config, weights), fingerprint, dtype, device
    )


def _read_tensors(source: ModelSource) -> dict[str, torch.Tensor]:
    if source.path is None:
        return synthetic_tensors(source.config)
    if source.is_gguf:
        named = read_gguf_tensors(read_gguf(source.path), source.config)
        return {name: torch.from_numpy(values) for name, values in named}
    return read_safetensors(source.path)


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
        if config.qkv_bias:
            shapes[layer + "self_attn.q_proj.bias"] = (q_size,)
            shapes[layer + "self_attn.k_proj.bias"] = (kv_size,)
            shapes[layer + "self_attn.v_proj.bias"] = (kv_size,)
        if config.out_bias:
            shapes[layer + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
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

    Raises ModelError naming the file that is missing, broken, or not as the index says.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return _load_file(path / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for shard, names in _shards(index).items():
        stored = _load_file(path / shard)
        for name in names:
            if name not in stored:
                raise ModelError(f"{path / shard}: tensor {name} is missing, {index.name} says it is there")
            tensors[name] = stored[name]
    return tensors


def _shards(index: Path) -> dict[str, list[str]]:
    """The files of a sharded model, all in the index's own directory, and the tensors in each."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        # a name like ../x or /x would read a file that is not the model's
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ModelError(
                f"{index}: {name} is in {shard!r}; allowed is a .safetensors file in the same directory"
            )
        shards.setdefault(shard, []).append(name)
    return shards


def _load_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read weights from {file}: {error}") from error


def synthetic_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights, the same in every process: activations keep their size and logits spread by about one."""
    generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
    residual_scale = 1.0 / math.sqrt(2 * config.num_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
            continue
        bound = math.sqrt(3.0 / shape[-1])  # uniform in +-bound has variance 1 / fan-in
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            bound *= residual_scale
        tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return tensors


def build_weights(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: str,
    kernels: str = "auto",
) -> ModelWeights:
    """Named tensors to the model's matrices, converted, with q, k, v and gate, up joined."""

    def fused(*names: str) -> torch.Tensor:
        parts = [tensors[name] for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.to(device=device, dtype=dtype).contiguous()

    linear = partial(Linear, kernels=kernels)
    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        qkv = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
        out = layer + "self_attn.o_proj"
        layers.append(
            LayerWeights(
                input_norm=fused(layer + "input_layernorm.weight"),
                qkv=linear(
                    fused(*(name + ".weight" for name in qkv)),
                    fused(*(name + ".bias" for name in qkv)) if config.qkv_bias else None,
                ),
                out=linear(fused(out + ".weight"), fused(out + ".bias") if config.out_bias else None),
                mlp_norm=fused(layer + "post_attention_layernorm.weight"),
                gate_up=linear(fused(layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight")),
                down=linear(fused(layer + "mlp.down_proj.weight")),
                q_norm=fused(layer + "self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=fused(layer + "self_attn.k_norm.weight") if config.qk_norm else None,
            )
        )
    embedding = fused("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=fused("model.norm.weight"),
        head=linear(embedding if config.tie_word_embeddings else fused("lm_head.weight")),
    )


def _expected_tensors(
    model_id: str, config: ModelConfig, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors the model uses. ModelError names the first that is missing, unknown, or of another shape or dtype.

    An unknown one is a part that the model would be computed without: it is refused, not ignored.
    """
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"model {model_id}: tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"model {model_id}: tensor {name} has shape {tuple(tensors[name].shape)}; config.json asks for {shape}"
            )
        if tensors[name].dtype not in STORED_DTYPES:
            raise ModelError(
                f"model {model_id}: tensor {name} is stored as {str(tensors[name].dtype).removeprefix('torch.')}; "
                "supported: float32, float16, bfloat16"
            )
    for name in tensors:
        if name not in shapes and not name.endswith(_REDUNDANT):
            raise ModelError(
                f"model {model_id}: tensor {name} has no place in the {config.architecture} that config.json describes"
            )
    return {name: tensors[name] for name in shapes}
