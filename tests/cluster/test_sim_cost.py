"""Step costs: what was measured comes out as measured, and what lies between is what arithmetic says."""

import pytest

from cluster.sim_cost import DecodePoint, NotMeasured, PrefillPoint, StepCosts, costs_from_document


def quadratic(tokens: int) -> float:
    return 0.002 + 1e-4 * tokens + 3e-9 * tokens**2


DECODES = [
    DecodePoint(batch, context, 0.002 + 1e-4 * batch + 1e-7 * batch * context)
    for batch in (1, 4, 16)
    for context in (128, 4096)
]


def costs() -> StepCosts:
    return StepCosts([PrefillPoint(n, quadratic(n)) for n in (128, 1024, 4096, 8000)], DECODES, 32)


def test_measured_lengths_come_out_as_measured() -> None:
    crooked = [PrefillPoint(128, 0.011), PrefillPoint(1024, 0.18), PrefillPoint(8000, 1.4)]
    found = StepCosts(crooked, DECODES, 8)
    for point in crooked:
        assert found.prefill_s(point.tokens) == pytest.approx(point.seconds)


def test_lengths_between_and_beyond_follow_the_quadratic() -> None:
    for tokens in (300, 2500, 6000, 16_000):
        assert costs().prefill_s(tokens) == pytest.approx(quadratic(tokens), rel=0.01)


def test_chunks_of_a_prompt_sum_to_the_prompt() -> None:
    found = costs()
    chunks = [found.chunk_s(start, 512) for start in range(0, 4096, 512)]
    assert sum(chunks) == pytest.approx(found.prefill_s(4096))
    assert chunks[1:] == sorted(chunks[1:]), "later chunks attend to more"


def test_a_decode_step_is_a_line_in_keys_and_between_batches() -> None:
    found = costs()
    assert found.decode_s(8, 8 * 1000) == pytest.approx(0.002 + 8e-4 + 8e-4)
    assert found.decode_s(32, 0) == pytest.approx(0.002 + 32e-4)


def test_many_steps_at_once_are_the_sum_of_each() -> None:
    found = costs()
    one_by_one = sum(found.decode_s(4, 4000 + 4 * step) for step in range(100))
    assert found.decode_s(4, 4000, 100) == pytest.approx(one_by_one)


def test_a_mixed_step_reads_the_weights_once() -> None:
    found = costs()
    assert found.mixed_s([(0, 128)], 4, 400) < found.prefill_s(128) + found.decode_s(4, 400)
    assert found.mixed_s([(0, 128)], 4, 400) > found.prefill_s(128)
    assert found.mixed_s([(0, 128)], 0, 0) == pytest.approx(quadratic(128))


def test_too_little_measured_is_refused() -> None:
    with pytest.raises(NotMeasured, match="1 prompt lengths"):
        StepCosts([PrefillPoint(128, 0.1)], DECODES, 8)
    with pytest.raises(NotMeasured, match="no decode step"):
        StepCosts([PrefillPoint(128, 0.1), PrefillPoint(256, 0.2)], [], 8)
    with pytest.raises(NotMeasured, match="no document"):
        costs_from_document({"prefill": 3}, 8)


def test_cases_without_samples_are_left_out_of_a_document() -> None:
    document = {
        "prefill": [
            {"prompt_tokens": 128, "ttft_ms": {"median": 10.0}},
            {"prompt_tokens": 1024, "ttft_ms": {"median": 100.0}},
            {"prompt_tokens": 99_999, "ttft_ms": {"median": None}},
        ],
        "decode": [{"batch": 1, "context": 128, "step_ms": {"median": 2.0}}],
    }
    found = costs_from_document(document, 4)
    assert found.prefill_s(1024) == pytest.approx(0.1)
    assert found.decode_s(1, 500) == pytest.approx(0.002)
