"""However a request is scheduled, it answers with the same tokens, for every family of models.

Compared are answers whose every choice is clear. Sums are rounded differently in batches and chunks of other shapes,
so a choice as close as that rounding may go either way; in float32 that is one token in some ten thousands. In
bfloat16 it is one in some ten, and there it is tested that answers part at such choices only.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.kernels import amx
from engine.request import Request
from engine.weights import LoadedModel, load_model
from tests.engine.helpers import (
    FAMILIES,
    Driven,
    answer_margins,
    clear_answer,
    drive,
    make_engine,
    make_prompt,
    make_request,
    send_kv,
    write_checkpoint,
)

SHAPES: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
    },  # this and the next: compiled kernels
    "qwen2": {"hidden_size": 64, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},  # head_dim 48
    "llama-bias": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
}
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 90, 120, 150)
MAX_TOKENS = 24
BFLOAT16_ROUNDING = {0.0: 0.2, 1.0: 0.05}
"""Largest margin, of logits that spread by about 1, at which bfloat16 may choose differently."""


@dataclass(frozen=True)
class Case:
    """A model and requests, each with its answer when it is alone and its prompt is computed at once."""

    loaded: LoadedModel
    requests: list[Request]
    answers: dict[str, list[int]]


@pytest.fixture(
    scope="module",
    params=[(family, temperature) for family in SHAPES for temperature in (0.0, 1.0)],
    ids=lambda param: f"{param[0]}-{'sampled' if param[1] else 'greedy'}",
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, temperature = request.param
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, family=family, tied=family != "qwen2", initializer_range=0.3, **SHAPES[family])
    loaded = load_model(path, "float32")
    requests: list[Request] = []
    answers: dict[str, list[int]] = {}
    for length in LENGTHS:

        def make(seed: int, length: int = length) -> Request:
            prompt = make_prompt(length, seed=100 * seed + length)
            return make_request(
                f"r{length}", prompt, temperature=temperature, max_tokens=MAX_TOKENS, seed=100 * seed + length
            )

        found, answers[f"r{length}"] = clear_answer(loaded, make)
        requests.append(found)
    assert sum(len(set(answer)) for answer in answers.values()) > 15 * len(answers), "they repeat themselves"
    return Case(loaded, requests, answers)


def test_a_batch_of_16_answers_as_one_by_one(case: Case) -> None:
    engine = make_engine(case.loaded, max_num_batched_tokens=1024, max_num_seqs=16, num_blocks=256)
    driven = drive(engine, case.requests)
    assert max(len(step.new_tokens) for step in driven.steps) == 16
    assert driven.tokens == case.answers


def test_prefill_in_chunks_answers_as_at_once(case: Case) -> None:
    driven = drive(make_engine(case.loaded, max_num_batched_tokens=11), case.requests)
    chunks = [p for step in driven.steps for p in step.prefilled if p.request_id == "r150"]
    assert len(chunks) > 14
    assert driven.tokens == case.answers


def test_a_prefix_hit_answers_as_a_miss(case: Case) -> None:
    engine = make_engine(case.loaded)
    drive(engine, case.requests)
    before = engine.stats().cached_prefix_tokens
    again = drive(engine, case.requests)
    assert engine.stats().cached_prefix_tokens - before > 600
    assert again.tokens == case.answers


def test_a_preempted_sequence_answers_as_an_undisturbed_one(case: Case) -> None:
    engine = make_engine(case.loaded, num_blocks=16, max_num_batched_tokens=48)
    driven = drive(engine, reversed(case.requests))
    assert engine.stats().preemptions >= 4
    assert driven.tokens == case.answers


@pytest.mark.parametrize("done", [0, 10])
def test_transferred_kv_answers_as_kv_computed_here(case: Case, done: int) -> None:
    """All 16 arrive one after the other beside those that run already; ``done`` tokens were generated before."""
    prefill = make_engine(case.loaded)
    decode = make_engine(case.loaded, block_size=8, num_blocks=400, max_num_seqs=16)
    driven = Driven()
    for whole in case.requests:
        request_id, answer = whole.request_id, case.answers[whole.request_id]
        request = Request(request_id, whole.prompt_token_ids, whole.sampling, tuple(answer[:done]))
        decode.reserve(request)
        prefill.add(request, hold=True)
        first = drive(prefill).tokens[request_id]
        assert first == [answer[done]]
        send_kv(prefill, decode, request_id, len(request.prompt_token_ids) + done)
        decode.adopt(request_id, first[0])
        prefill.release(request_id)
        driven.take(decode.step())
        decode.check_integrity()
    rest = drive(decode)
    for request_id, answer in case.answers.items():
        assert driven.tokens.get(request_id, []) + rest.tokens.get(request_id, []) == answer[done + 1 :]
    for engine in (prefill, decode):
        assert engine.stats().held_blocks == 0


@pytest.mark.skipif(not amx.is_available(), reason="this processor has no matrix tiles for bfloat16")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_in_matrix_tiles_answers_the_same_in_any_batch(
    tmp_path: Path, family: str, temperature: float
) -> None:
    """Not only where choices are clear: no bit depends on who else is in the batch."""
    shape: dict[str, object] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 224,
    }
    write_checkpoint(tmp_path, family=family, dtype=torch.bfloat16, initializer_range=0.3, **shape)
    loaded = load_model(tmp_path, "bfloat16")
    requests = [
        make_request(f"r{n}", make_prompt(n, seed=n), temperature=temperature, max_tokens=MAX_TOKENS, seed=n)
        for n in LENGTHS
    ]
    alone = make_engine(loaded, max_num_batched_tokens=512, enable_prefix_caching=False)
    answers = {request.request_id: drive(alone, [request]).tokens[request.request_id] for request in requests}
    engine = make_engine(loaded, max_num_batched_tokens=1024, max_num_seqs=16, num_blocks=256)
    assert drive(engine, requests).tokens == answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", SHAPES)
def test_bfloat16_answers_part_only_where_rounding_decides(
    tmp_path: Path, family: str, temperature: float
) -> None:
    write_checkpoint(tmp_path, family=family, dtype=torch.bfloat16, **SHAPES[family])
    loaded, exact = load_model(tmp_path, "bfloat16"), load_model(tmp_path, "float32")
    requests = [
        make_request(f"r{n}", make_prompt(n, seed=n), temperature=temperature, max_tokens=MAX_TOKENS, seed=n)
        for n in LENGTHS[::2]
    ]
    together = drive(make_engine(loaded, max_num_batched_tokens=48), requests).tokens
    compared = 0
    for request in requests:
        alone = drive(make_engine(loaded, max_num_batched_tokens=512), [request]).tokens[request.request_id]
        pairs = zip(alone, together[request.request_id], strict=True)
        parted = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if parted is not None:
            assert answer_margins(exact, request, alone)[parted] < BFLOAT16_ROUNDING[temperature]
        compared += MAX_TOKENS if parted is None else parted
    assert compared > len(requests) * MAX_TOKENS // 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", SHAPES)
def test_bfloat16_kv_that_moved_answers_as_kv_that_stayed(
    tmp_path: Path, family: str, temperature: float
) -> None:
    """The same chunks and the same batches give the same bits, in any dtype and in any process."""
    write_checkpoint(tmp_path, family=family, dtype=torch.bfloat16, **SHAPES[family])
    loaded = load_model(tmp_path, "bfloat16")
    prefill, decode = make_engine(loaded), make_engine(loaded)
    decode.reserve(make_request("other", make_prompt(40, seed=1)))  # so that the blocks there are others
    for length in LENGTHS[3::4]:
        request = make_request(
            f"r{length}", make_prompt(length), temperature=temperature, max_tokens=MAX_TOKENS
        )
        whole = drive(make_engine(loaded), [request]).tokens[request.request_id]
        decode.reserve(request)
        prefill.add(request, hold=True)
        first = drive(prefill).tokens[request.request_id]
        send_kv(prefill, decode, request.request_id, length)
        decode.adopt(request.request_id, first[0])
        prefill.release(request.request_id)
        assert first + drive(decode).tokens[request.request_id] == whole
