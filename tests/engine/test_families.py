"""Every family of models computes what transformers computes on the same directory, whatever its shape.

The checkpoints' weights are large: logits spread by about 2, answers do not repeat themselves, and a part left out or
put in the wrong place changes every token.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.hf_config import read_model_config
from engine.weights import load_model
from tests.engine.helpers import (
    CLEAR,
    FAMILIES,
    LLAMA3_ROPE,
    decision_margins,
    drive,
    full_logits,
    make_engine,
    make_prompt,
    make_request,
    write_checkpoint,
)

FAMILY = pytest.mark.parametrize("family", FAMILIES)
SHAPES: dict[str, dict[str, object]] = {
    "even": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32},  # what compiled kernels take
    "three-kv-heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
    "head-dim-48": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "intermediate_size": 50,
    },
    "one-layer-mha": {"num_hidden_layers": 1, "num_key_value_heads": 6, "head_dim": 32, "vocab_size": 130},
}


@FAMILY
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_float32_logits_are_those_of_transformers(
    tmp_path: Path, family: str, shape: str, tied: bool
) -> None:
    reference = write_checkpoint(tmp_path, family=family, tied=tied, **SHAPES[shape])
    prompt = tuple(token_id % reference.config.vocab_size for token_id in make_prompt(150))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    loaded = load_model(tmp_path, "float32")
    for chunk in (150, 47):
        actual = full_logits(loaded, prompt, chunk)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=3e-5 * expected.std().item())


@FAMILY
def test_llama3_rope_scaling_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """At positions far beyond the context of the pretraining; other scalings are refused."""
    reference = write_checkpoint(tmp_path / "scaled", family=family, rope_parameters=LLAMA3_ROPE)
    write_checkpoint(tmp_path / "plain", family=family)
    prompt = make_prompt(700)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    scaled, plain = load_model(tmp_path / "scaled", "float32"), load_model(tmp_path / "plain", "float32")
    assert min(scaled.config.rope_freq_factors) == 1.0
    assert max(scaled.config.rope_freq_factors) == 4.0
    actual = full_logits(scaled, prompt, 256)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5 * expected.std().item())
    assert (full_logits(plain, prompt, 256) - expected).abs().max() > 0.1 * expected.std()


@FAMILY
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_256_greedy_tokens_of_20_prompts_are_those_of_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """In one batch. transformers is given the engine's tokens: if it would choose each of them, the answers are equal.

    Answers with a choice so close that rounding may decide it are left out, by transformers' own logits.
    """
    reference = write_checkpoint(tmp_path, family=family, tied=tied, initializer_range=0.3)
    engine = make_engine(load_model(tmp_path, "float32"), num_blocks=700, max_num_seqs=32)
    prompts = [make_prompt(1 + 37 * seed % 90, seed=seed) for seed in range(30)]
    requests = [make_request(str(seed), prompt, max_tokens=256) for seed, prompt in enumerate(prompts)]
    answers = drive(engine, requests).tokens
    compared = 0
    for request in requests:
        answer = answers[request.request_id]
        assert len(answer) == 256
        ids = torch.tensor([[*request.prompt_token_ids, *answer[:-1]]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(request.prompt_token_ids) - 1 :]
        if min(decision_margins(logits, request)) < CLEAR:
            continue
        assert answer == logits.argmax(-1).tolist()
        compared += 1
    assert compared >= 20
    assert sum(len(set(answer)) for answer in answers.values()) > 30 * 40, "they repeat themselves"


@FAMILY
def test_a_family_has_the_parts_it_is_known_for(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path, family=family, tied=False)
    config = read_model_config(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    parts = (config.qkv_bias, config.out_bias, config.qk_norm)
    assert (
        parts
        == {
            "llama": (False, False, False),
            "llama-bias": (True, True, False),
            "qwen2": (True, False, False),
            "qwen3": (False, False, True),
            "qwen3-bias": (True, True, True),
        }[family]
    )
    assert config.num_parameters == sum(tensor.numel() for tensor in stored.values())
    keys = [tensor.shape[0] for name, tensor in stored.items() if name.endswith("k_proj.weight")]
    assert config.kv_bytes_per_token("float32") == sum(2 * 4 * rows for rows in keys)
    assert config.kv_bytes_per_token("bfloat16") == sum(2 * 2 * rows for rows in keys)


@FAMILY
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_may_be_stored_in_any_of_three_dtypes(
    tmp_path: Path, family: str, stored: torch.dtype
) -> None:
    write_checkpoint(tmp_path, family=family, dtype=stored, **SHAPES["even"])
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {stored}
    prompt = make_prompt(60)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits[0].float()
    exact = full_logits(load_model(tmp_path, "float32"), prompt, 60)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=3e-5 * expected.std().item())
    rounded = full_logits(load_model(tmp_path, "bfloat16"), prompt, 60).float()
    assert (rounded - expected).norm() < 1.2 * (theirs - expected).norm()
