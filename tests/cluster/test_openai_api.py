"""Request bodies: what is taken, what is refused and with which words."""

import json
from typing import Any

import pytest

from cluster.openai_api import ApiError, ApiRequest, Replies, error_body, parse_request
from engine.model_ids import resolve_model
from engine.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(resolve_model("synthetic:nano"))


def parse(body: Any, is_chat: bool = False, context: int = 64) -> ApiRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(raw, is_chat, TOKENIZER, "nano", context, TOKENIZER.vocab_size)


def refusal(body: Any, is_chat: bool = False, context: int = 64) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, is_chat, context)
    return caught.value


def test_text_ids_and_nested_ids_are_one_prompt() -> None:
    ids = tuple(TOKENIZER.encode("hello"))
    for prompt in ("hello", list(ids), [list(ids)], ["hello"]):
        assert parse({"prompt": prompt}).prompt_token_ids == ids


def test_sampling_fields_arrive() -> None:
    request = parse(
        {
            "prompt": "a",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "stop": "x",
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
    assert (sampling.seed, sampling.ignore_eos) == (3, True)
    assert (request.stop, request.stream, request.include_usage) == (("x",), True, True)


def test_without_a_seed_two_requests_draw_differently() -> None:
    assert parse({"prompt": "a"}).sampling.seed != parse({"prompt": "a"}).sampling.seed


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"{", "not JSON", None),
        (b"[]", "not a JSON object", None),
        ({"prompt": ""}, "no tokens", "prompt"),
        ({"prompt": [99999]}, "99999", "prompt"),
        ({"prompt": [-1]}, "-1", "prompt"),
        ({"prompt": ["a", "b"]}, "2 prompts", "prompt"),
        ({"prompt": [1] * 70}, "70 tokens", "prompt"),
        ({"prompt": [1] * 60, "max_tokens": 10}, "70 together", "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1", "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0", "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0", "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "max_tokens"),
        ({"prompt": "a", "n": 2}, "n is 2", "n"),
        ({"prompt": "a", "logprobs": 1}, "logprobs is 1", "logprobs"),
        ({"prompt": "a", "stop": ["x", ""]}, "empty string", "stop"),
        ({"prompt": {"a": 1}}, "prompt", "prompt"),
        ({"prompt": "a", "model": "gpt-5"}, "'nano'", "model"),
    ],
)
def test_bad_bodies_are_refused_by_name(body: Any, words: str, param: str | None) -> None:
    error = refusal(body)
    assert error.status == (404 if param == "model" else 400)
    assert words in error.message
    assert error.param == param


def test_prompt_longer_than_the_context_names_both_numbers() -> None:
    error = refusal({"prompt": [1] * 70})
    assert "70 tokens" in error.message
    assert "64 tokens" in error.message
    error = refusal({"prompt": [1] * 60, "max_tokens": 10})
    assert "70 together" in error.message


def test_another_model_is_not_served() -> None:
    error = refusal({"prompt": "a", "model": "gpt-5"})
    assert error.status == 404
    assert "'nano'" in error.message


def test_chat_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    whole = parse({"messages": [{"role": "user", "content": "hello"}]}, is_chat=True)
    joined = parse({"messages": [{"role": "user", "content": parts}]}, is_chat=True)
    assert joined.prompt_token_ids == whole.prompt_token_ids
    assert (
        "image_url"
        in refusal({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, is_chat=True).message
    )
    assert "empty" in refusal({"messages": []}, is_chat=True).message
    wizard = refusal({"messages": [{"role": "user"}, {"role": "wizard", "content": "x"}]}, is_chat=True)
    assert wizard.message.startswith("messages[1].role: 'wizard' is not a role; allowed: system, ")


def test_first_chat_chunk_carries_role_and_text_together() -> None:
    request = parse({"messages": [{"role": "user", "content": "a"}], "stream": True}, is_chat=True)
    replies = Replies("1", "nano", request, 0)
    first, second = (json.loads(replies.chunk(text)[6:]) for text in ("x", "y"))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "x"}
    assert second["choices"][0]["delta"] == {"content": "y"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_an_error_says_whose_fault_it_is(status: int, kind: str) -> None:
    assert json.loads(error_body(ApiError(status, "no")))["error"]["type"] == kind
