"""The engine computes what transformers computes on the same directory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.weights import load_model
from tests.engine.helpers import drive, full_logits, make_engine, make_prompt, make_request, write_checkpoint

TINY = Path(__file__).resolve().parents[2] / "engine" / "models" / "tiny"


def reference_generate(path: Path, prompts: list[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1000, 100, 1])
def test_float32_logits_are_those_of_transformers(tmp_path: Path, tied: bool, chunk: int) -> None:
    reference = write_checkpoint(tmp_path, tied=tied)
    prompt = make_prompt(300 if chunk > 1 else 40)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    actual = full_logits(load_model(tmp_path, "float32"), prompt, chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("chunk", [1000, 70, 1])
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(tmp_path: Path, chunk: int) -> None:
    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    prompt = make_prompt(200 if chunk > 1 else 40)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits[0].float()
    actual = full_logits(load_model(tmp_path, "bfloat16"), prompt, chunk).float()
    assert (actual - exact).norm() < 1.2 * (theirs - exact).norm()
    assert (actual - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24},
        {"family": "qwen2"},
        {"family": "qwen3"},
    ],
    ids=["gqa", "mha", "mqa", "qwen2", "qwen3"],
)
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, tied: bool, changes: dict[str, object]) -> None:
    write_checkpoint(tmp_path, tied=tied, **changes)
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 16, 17, 60, 300)]
    expected = reference_generate(tmp_path, prompts, 24)
    engine = make_engine(load_model(tmp_path, "float32"))
    requests = [make_request(str(i), p, max_tokens=24, ignore_eos=False) for i, p in enumerate(prompts)]
    driven = drive(engine, requests)
    assert [driven.tokens[str(i)] for i in range(len(prompts))] == expected
    assert any(len(set(tokens)) > 4 for tokens in expected), (
        "the model repeats itself: the test shows nothing"
    )


def test_greedy_tokens_of_bfloat16_weights_stored_in_shards(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, dtype=torch.bfloat16)
    single = load_model(tmp_path, "float32")
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    sharded = load_model(tmp_path, "float32")
    assert sharded.fingerprint == single.fingerprint
    prompt = make_prompt(40)
    driven = drive(make_engine(sharded), [make_request("a", prompt, max_tokens=16, ignore_eos=False)])
    assert driven.tokens["a"] == reference_generate(tmp_path, [prompt], 16)[0]


@pytest.mark.skipif(not (TINY / "model.safetensors").is_file(), reason="the tiny model is not built")
def test_greedy_tokens_of_tiny_are_those_of_generate() -> None:
    loaded = load_model("tiny", "float32")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(0, loaded.config.vocab_size, (length,), generator=generator).tolist())
        for length in (3, 40, 700)
    ]
    expected = reference_generate(TINY, prompts, 48)
    engine = make_engine(loaded, max_num_batched_tokens=256)
    driven = drive(
        engine, [make_request(str(i), p, max_tokens=48, ignore_eos=False) for i, p in enumerate(prompts)]
    )
    assert [driven.tokens[str(i)] for i in range(len(prompts))] == expected
