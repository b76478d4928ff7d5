"""The directory that ships: complete, small, loaded by ``transformers`` as it is, and as good as its card says."""

import ast
import hashlib
import json
import logging
import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from engine.models.corpus import SPECIAL_TOKENS, Chat, longest_held_out
from engine.models.recipe import held_out_excerpt

TINY = Path(__file__).parents[2] / "engine" / "models" / "tiny"
MAX_DIRECTORY_BYTES = 16 * 2**20
CHATS = (
    "Return the absolute path of a file.",
    "Write a Python function `is_empty`: return True if the queue is empty.",
    "What is str.split?",
    "Return the length of the list.",
)


def read_json(name: str) -> dict[str, Any]:
    return json.loads((TINY / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return read_json("recipe.json")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def excerpt() -> str:
    """Of this interpreter's own library; another Python's text differs a little from the one on the card."""
    text = longest_held_out(Path(sysconfig.get_paths()["stdlib"]))
    return held_out_excerpt(text, Tokenizer.from_file(str(TINY / "tokenizer.json")))


@pytest.fixture(scope="module")
def excerpt_ids(tokenizer: Any, excerpt: str) -> Tensor:
    """(1, tokens): the held-out excerpt after one end-of-text token."""
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(excerpt)]])


@pytest.fixture(scope="module")
def excerpt_nats(model: Any, excerpt_ids: Tensor) -> Tensor:
    """(tokens - 1,): negative log-likelihood of each token of the excerpt, all before it in view."""
    return next_token_nats(model, excerpt_ids)


def next_token_nats(model: Any, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = model(token_ids[:, :-1], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, token_ids[0, 1:], reduction="none").double()


def test_the_directory_is_complete_and_at_most_16_mb():
    sizes = {path.name: path.stat().st_size for path in TINY.iterdir()}
    assert sum(sizes.values()) <= MAX_DIRECTORY_BYTES
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert {"tokenizer_config.json", "README.md", "recipe.json"} <= sizes.keys()


def test_the_configuration_describes_a_llama_of_about_5_m_parameters_and_8k_positions(recipe):
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 8192
    assert config["vocab_size"] == Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size() == 4096
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert 4_000_000 <= recipe["parameters"] <= 6_500_000


def test_end_tokens_agree_in_every_file(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(SPECIAL_TOKENS)))
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    assert read_json("config.json")["eos_token_id"] == ends
    assert read_json("generation_config.json")["eos_token_id"] == ends
    assert tokenizer.eos_token_id == ends[0]


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What ``transformers`` logs: it passes nothing on to the root logger, where pytest listens."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_transformers_loads_everything_without_a_warning(transformers_log, recipe):
    transformers.AutoTokenizer.from_pretrained(TINY)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(TINY, output_loading_info=True)
    assert [record.getMessage() for record in transformers_log.records] == []
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.num_parameters() == recipe["parameters"]


@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_chat_template_renders_every_role_and_asks_for_an_answer(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi {{ name }}"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|system|>Be brief.<|end|><|user|>Hi {{ name }}<|end|><|assistant|>Hello<|end|>"
    )
    asked = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|end|><|assistant|>")


def test_training_chats_look_as_the_template_renders_them(tokenizer):
    chat = Chat("What is this?", "A test.\n")
    messages = [{"role": "user", "content": chat.user}, {"role": "assistant", "content": chat.assistant}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat.render()


def test_a_chat_is_answered_with_a_python_function_that_ends_by_itself(tokenizer, model):
    answers = []
    for content in CHATS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            out = model.generate(**prompt, max_new_tokens=100, do_sample=False)
        new = out[0, prompt["input_ids"].shape[1] :].tolist()
        answers.append((new[-1] in model.generation_config.eos_token_id, tokenizer.decode(new[:-1])))
    ended = [text for at_end, text in answers if at_end and text.strip()]
    assert any(is_python(text) and "def " in text for text in ended), answers


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_a_plain_prompt_goes_on_as_text(tokenizer, model):
    prompt = tokenizer("class Queue:\n", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**prompt, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert len(set(text.split())) >= 5  # not one word over and over


def test_the_weights_reach_the_bits_per_byte_on_the_card(recipe, excerpt, excerpt_nats):
    text = excerpt.encode()
    is_same_text = hashlib.sha256(text).hexdigest() == recipe["excerpt_sha256"]
    measured = excerpt_nats.sum().item() / math.log(2) / len(text)
    assert measured == pytest.approx(recipe["excerpt_bits_per_byte"], rel=0.003 if is_same_text else 0.1)
    assert f"**{recipe['bits_per_byte']:.3f}**" in (TINY / "README.md").read_text(encoding="utf-8")


def test_the_weights_have_learned_their_language(recipe):
    assert recipe["bits_per_byte"] < 2.0  # far below what unigram statistics of the text reach


def test_a_long_context_helps_rather_than_harms(model, excerpt_ids, excerpt_nats):
    """The same tokens, seen at positions above 6,000 and again near the start."""
    last = excerpt_ids.shape[1]
    assert last > 8000
    span = 1536
    near_start = next_token_nats(model, excerpt_ids[:, last - span - 512 :])[-span:]
    assert excerpt_nats[-span:].sum() <= 1.15 * near_start.sum()


def test_no_recorded_bucket_of_positions_collapses(recipe):
    buckets = recipe["bits_per_byte_by_position"]
    assert list(buckets) == ["0-512", "512-2048", "2048-4096", "4096-8192"]
    assert buckets["4096-8192"] <= 1.15 * buckets["512-2048"]


def test_random_order_of_the_excerpt_is_worse(model, excerpt_ids):
    """The model reads order: were it no better than word counts, shuffling would cost nothing."""
    ids = excerpt_ids[0, :513].tolist()
    shuffled = [ids[0], *random.Random(0).sample(ids[1:], k=512)]
    assert next_token_nats(model, torch.tensor([shuffled])).mean() > 1.5 * (
        next_token_nats(model, torch.tensor([ids])).mean()
    )
