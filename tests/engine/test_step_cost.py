"""FLOPs and bytes against values counted by hand."""

import dataclasses

import pytest

from engine.config import ModelConfig
from engine.model_ids import SYNTHETIC_PRESETS
from engine.step_cost import decode_bytes, matrix_shapes, prefill_flops

NANO = SYNTHETIC_PRESETS["nano"]
"""Hidden 64, MLP 160, 2 layers, 4 heads and 2 key heads of 16, vocabulary 512, tied head."""


def test_matrices_of_nano() -> None:
    assert matrix_shapes(NANO) == {
        "qkv": (128, 64),
        "out": (64, 64),
        "gate_up": (320, 64),
        "down": (64, 160),
        "head": (512, 64),
    }


def test_prefill_of_three_tokens_by_hand() -> None:
    """qkv sees 3 rows in both layers, the rest 3 rows in the first layer and 1 in the last, the head 1."""
    assert prefill_flops(NANO, 3) == {
        "qkv": 2 * 8_192 * 6,
        "out": 2 * 4_096 * 4,
        "gate_up": 2 * 20_480 * 4,
        "down": 2 * 10_240 * 4,
        "head": 2 * 32_768,
        "attention": 4 * 64 * ((1 + 2 + 3) + 3),
    }
    assert sum(prefill_flops(NANO, 3).values()) == 444_672


def test_one_token_goes_through_everything_once() -> None:
    matrices = NANO.num_parameters - 5 * 64  # all but the five norms
    assert sum(prefill_flops(NANO, 1).values()) == 2 * matrices + 4 * 64 * 2


def test_attention_grows_with_the_square_and_matrices_with_the_length() -> None:
    short, long = prefill_flops(NANO, 4_000), prefill_flops(NANO, 8_000)
    assert long["attention"] / short["attention"] == pytest.approx(4.0, rel=1e-3)
    assert long["down"] / short["down"] == pytest.approx(2.0, rel=1e-3)
    assert long["head"] == short["head"]


def test_decode_step_by_hand() -> None:
    """2 sequences with 10 and 20 keys; a token's KV is 2 * 2 layers * 2 heads * 16 numbers."""
    expected = {
        "qkv": 2 * 8_192,
        "out": 2 * 4_096,
        "gate_up": 2 * 20_480,
        "down": 2 * 10_240,
        "head": 32_768,
        "attention": 128 * 30,
        "other": 5 * 64,
    }
    assert decode_bytes(NANO, "bfloat16", [10, 20]) == {name: 2 * n for name, n in expected.items()}
    assert decode_bytes(NANO, "float32", [10, 20]) == {name: 4 * n for name, n in expected.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_read_once_whatever_the_batch(tied: bool) -> None:
    """An embedding that is not also the head is looked up, not read."""
    config: ModelConfig = dataclasses.replace(NANO, tie_word_embeddings=tied)
    for batch in (1, 16):
        parts = decode_bytes(config, "float32", [100] * batch)
        weights = sum(parts.values()) - parts["attention"]
        assert weights == 4 * NANO.num_parameters
        assert parts["attention"] == batch * 100 * config.kv_bytes_per_token("float32")
