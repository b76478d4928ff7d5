"""Which cases there are, what they need, and what is said of those that do not fit."""

import pytest

from engine.benchmark_plan import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    BenchmarkSpec,
    Case,
    DecodeCase,
    PrefillCase,
    Room,
    blocks_needed,
    problem_of,
)
from engine.config import EngineConfig

ROOM = Room(max_model_len=4096, num_blocks=300, block_size=16, max_num_seqs=32)


def test_cases_come_by_length_then_context_and_batch() -> None:
    spec = BenchmarkSpec("tiny", "float32", EngineConfig(), (8, 64), (1, 4), (128, 4096), 3, 1)
    assert [str(case) for case in spec.cases()] == [
        "prefill of 8 tokens",
        "prefill of 64 tokens",
        "decode batch 1, context 128",
        "decode batch 4, context 128",
        "decode batch 1, context 4,096",
        "decode batch 4, context 4,096",
    ]


def test_keys_of_the_middle_step_are_the_mean() -> None:
    """The first step after the KV came reads context + 1 keys, each later one more."""
    keys = [128 + 1 + step for step in range(WARM_UP_STEPS + MEASURED_STEPS)][WARM_UP_STEPS:]
    assert DecodeCase(1, 128).num_keys == sum(keys) / len(keys) == keys[len(keys) // 2]


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        (PrefillCase(15), 1),
        (PrefillCase(16), 2),
        (DecodeCase(1, 128), 10),
        (DecodeCase(5, 128), 50),
    ],
)
def test_blocks_of_a_case(case: Case, blocks: int) -> None:
    assert blocks_needed(case, block_size=16) == blocks


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (PrefillCase(4095), ""),
        (PrefillCase(4096), "needs 4,097 tokens; the model's context is 4,096"),
        (DecodeCase(1, 4076), ""),
        (DecodeCase(1, 4077), "needs 4,097 tokens; the model's context is 4,096"),
        (DecodeCase(33, 16), "needs 33 sequences; engine.max_num_seqs is 32"),
        (DecodeCase(30, 128), ""),
        (DecodeCase(31, 128), "needs 310 blocks of KV; the pool has 300 of 16 tokens"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(case: Case, problem: str) -> None:
    assert problem_of(case, ROOM) == problem
