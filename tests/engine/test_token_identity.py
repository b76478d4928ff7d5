"""However a request is scheduled, it answers with the same tokens, for every family of models.

The compiled kernels give the same bits, so any answer is compared. Without them (small odd shapes, other devices) sums
are rounded differently in batches and chunks of other shapes, and a choice as close as that rounding may go either way:
there answers are compared whose every choice is clear, and of bfloat16 that answers part at unclear choices only.
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
BFLOAT16_ROUNDING = 0.2
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


@dataclass(frozen=True)
class CompiledCase:
    """As ``Case``, for the compiled kernels: any requests, whether their choices are clear or not."""

    loaded: LoadedModel
    requests: list[Request]
    answers: dict[str, list[int]]


@pytest.fixture(
    scope="module",
    params=[
        (family, dtype, temperature)
        for family in FAMILIES
        for dtype in (torch.float32, torch.bfloat16)
        for temperature in (0.0, 1.0)
    ],
    ids=lambda param: f"{param[0]}-{str(param[1])[6:]}-{'sampled' if param[2] else 'greedy'}",
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CompiledCase:
    family, dtype, temperature = request.param
    path = tmp_path_factory.mktemp("checkpoint")
    shape: dict[str, object] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 224,
    }
    write_checkpoint(path, family=family, dtype=dtype, initializer_range=0.3, **shape)
    loaded = load_model(path, str(dtype)[6:])
    requests = [
        make_request(f"r{n}", make_prompt(n, seed=n), temperature=temperature, max_tokens=MAX_TOKENS, seed=n)
        for n in LENGTHS
    ]
    alone = make_engine(loaded, max_num_batched_tokens=512, enable_prefix_caching=False)
    answers = {each.request_id: drive(alone, [each]).tokens[each.request_id] for each in requests}
    assert sum(len(set(answer)) for answer in answers.values()) > 12 * len(answers), "they repeat themselves"
    return CompiledCase(loaded, requests, answers)


def test_in_compiled_kernels_no_bit_depends_on_company_or_chunks(compiled: CompiledCase) -> None:
    """Not only where choices are clear. The second time in one engine, prompts begin with what the first has left."""
    engine = make_engine(compiled.loaded, max_num_batched_tokens=1024, max_num_seqs=16, num_blocks=256)
    assert drive(engine, compiled.requests).tokens == compiled.answers
    assert drive(engine, compiled.requests).tokens == compiled.answers
    assert engine.stats().cached_prefix_tokens > 600
    engine = make_engine(compiled.loaded, max_num_batched_tokens=11)
    assert drive(engine, compiled.requests).tokens == compiled.answers


def test_in_compiled_kernels_no_bit_depends_on_whether_kv_was_computed_again(compiled: CompiledCase) -> None:
    """KV of a generated token comes from a decode step, and when computed again from a prompt."""
    if compiled.loaded.dtype == "bfloat16" and amx.is_available():
        pytest.skip("matrix tiles: decode and prompts are summed in different orders")
    engine = make_engine(compiled.loaded, num_blocks=16, max_num_batched_tokens=48)
    assert drive(engine, reversed(compiled.requests)).tokens == compiled.answers
    assert engine.stats().preemptions >= 4
    done = 10
    continued = [
        Request(
            each.request_id,
            each.prompt_token_ids,
            each.sampling,
            tuple(compiled.answers[each.request_id][:done]),
        )
        for each in compiled.requests
    ]
    rest = drive(make_engine(compiled.loaded, max_num_batched_tokens=64), continued).tokens
    assert rest == {name: answer[done:] for name, answer in compiled.answers.items()}


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
            assert answer_margins(exact, request, alone)[parted] < BFLOAT16_ROUNDING
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
