"""Write a trained model as a Hugging Face directory: weights, tokenizer, configuration, model card."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.models.corpus import CHAT_TEMPLATE, END_IDS, END_OF_TEXT, HELD_OUT, SPECIAL_TOKENS
from engine.models.training_model import Shape, TrainingModel


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its greedy continuation."""

    prompt: str
    continuation: str
    ended: bool  # by an end token of its own


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model was made and what it measures; ``recipe.json``."""

    seed: int
    python: str
    torch: str
    tokenizers: str
    machine: str
    threads: int
    minutes: float
    compiled: bool
    products: str  # type of the matrix products while training
    parameters: int
    steps: tuple[int, ...]  # per stage
    tokens: int
    training_s: float
    tokens_per_s: float
    training_loss_nats: float
    bits_per_byte: float
    bits_per_byte_by_position: dict[str, float]
    held_out_bytes: int
    excerpt_bytes: int
    excerpt_sha256: str  # of the text, for whoever measures it again
    excerpt_bits_per_byte: float
    samples: tuple[Sample, ...]


def write_directory(directory: Path, model: TrainingModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Fill an existing directory. Weights are stored in bfloat16."""
    ends = list(END_IDS)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "model.safetensors").chmod(0o644)  # the writer leaves it to its owner alone
    _write_json(directory / "config.json", model_config(model.shape, ends))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": ends[0], "eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False},
    )
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model.shape))
    _write_json(directory / "recipe.json", dataclasses.asdict(recipe))
    (directory / "README.md").write_text(model_card(recipe, model.shape), encoding="utf-8")


def model_config(shape: Shape, end_ids: list[int]) -> dict[str, Any]:
    """``config.json`` of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": end_ids[0],
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0],
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """``tokenizer_config.json``; nothing is added to a text unless the chat template adds it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model_card(recipe: Recipe, shape: Shape) -> str:
    """The directory's README."""
    buckets = "\n".join(
        f"| {name} | {value:.3f} |" for name, value in recipe.bits_per_byte_by_position.items()
    )
    command = f"python -m engine.models.recipe --minutes {recipe.minutes:g} --threads {recipe.threads}"
    if recipe.compiled:
        command += " --compile"
    if recipe.products == "bfloat16":
        command += " --bfloat16"
    samples = "\n\n".join(
        f"```text\n{sample.prompt}⟶{sample.continuation}\n```\n"
        + ("Ended by itself." if sample.ended else "Cut here.")
        for sample in recipe.samples
    )
    return f"""---
language: [en, code]
license: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---
# tiny

A Llama of {recipe.parameters:,} parameters that writes Python in the manner of its standard library. It exists so
that a serving system has a real model to run with nothing to download: it produces recognisable text, ends its
sequences and holds up over {shape.max_positions:,} positions. It is not an assistant: what it writes is often wrong.

| | |
|---|---|
| shape | {shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_heads} heads of {shape.head_dim}, \
{shape.num_kv_heads} KV heads, SwiGLU {shape.intermediate_size}, tied embeddings |
| vocabulary | {shape.vocab_size:,}, byte-level BPE |
| context | {shape.max_positions:,} tokens, rope theta {shape.rope_theta:,.0f} |
| stored in | bfloat16 |
| held-out bits per byte | **{recipe.bits_per_byte:.3f}** |
| trained on | {recipe.tokens:,} tokens in {sum(recipe.steps):,} steps, {recipe.training_s:,.0f} s \
({recipe.tokens_per_s:,.0f} tokens/s), {recipe.machine}, {recipe.threads} threads |
| made with | Python {recipe.python}, torch {recipe.torch}, tokenizers {recipe.tokenizers}, seed {recipe.seed} |

## Data and licence

The standard library of the Python interpreter that ran the recipe: source files, single functions, the language
reference that `help()` shows, docstrings, and requests made from docstrings with the function as the answer. Tests,
character tables and third-party packages are left out. Python is © Python Software Foundation and licensed under the
PSF License Version 2; the weights come under the same licence.

## Recipe

```
{command}
```

The minutes are processor time per thread. They are shared between sequences of 512, 2,048 and 8,192 tokens, the rate
falling linearly to the end, so the number of steps depends on the machine: here {", ".join(map(str, recipe.steps))}.
Everything else follows from the seed. `recipe.json` holds the figures of this page for programs.

## Held-out bits per byte

Measured on modules left out of training ({", ".join(f"`{name}`" for name in HELD_OUT)};
{recipe.held_out_bytes:,} bytes), with the stored bfloat16 weights computed in float32. The windows of
{shape.max_positions:,} tokens overlap, so that every bucket of positions sees the same text.

| positions | bits per byte |
|---|---|
{buckets}

The first {recipe.excerpt_bytes:,} bytes of the longest of them alone, after one end-of-text token:
{recipe.excerpt_bits_per_byte:.4f}.

## Samples, greedy

The arrow marks where the prompt ends.

{samples}
"""


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
