"""Sampling is a pure function of logits, seed and position, with the right distribution."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.request import SamplingParams
from engine.sampler import candidates, draw, gumbel_noise, sample


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def assert_drawn_by(
    logits: np.ndarray, params: SamplingParams, expected: np.ndarray, count: int = 20_000
) -> None:
    """Pearson's chi-squared over ``count`` output positions, at five standard deviations; nothing else is drawn."""
    drawn = np.bincount([draw(logits, params, i) for i in range(count)], minlength=logits.size)
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    means = count * expected[possible]
    assert means.min() > 5
    freedom = possible.sum() - 1
    chi_squared = ((drawn[possible] - means) ** 2 / means).sum()
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom) + 1e-9


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [(SamplingParams(), 0), (SamplingParams(), 3)]) == [1, 0]


def test_noise_is_fixed_by_seed_position_and_id_and_spread_as_gumbel_says() -> None:
    ids = np.arange(50)
    noise = np.array([[gumbel_noise(seed, i, ids) for i in range(100)] for seed in range(40)])
    assert (gumbel_noise(3, 7, ids[::3]) == noise[3, 7, ::3]).all()
    assert np.unique(noise).size == noise.size
    uniform = np.exp(-np.exp(-noise))
    counts = np.histogram(uniform, bins=100, range=(0, 1))[0]
    assert np.abs(counts - 2000).max() < 4.5 * np.sqrt(2000)
    for axis in range(3):  # neighbours in seed, position and id have nothing to do with each other
        one, other = np.moveaxis(uniform, axis, 0)[:-1], np.moveaxis(uniform, axis, 0)[1:]
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / np.sqrt(one.size)


def test_noise_of_this_release_stays() -> None:
    """Continued and replayed requests rely on it."""
    cases = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (7, 0, 49151), (2**63 - 1, 8191, 0))
    noise = [round(float(gumbel_noise(seed, i, np.array([id_]))[0]), 9) for seed, i, id_ in cases]
    assert noise == [2.474111063, 3.617375581, 2.099540841, -0.376647901, 0.47644569]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_distribution_is_softmax_at_the_temperature(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=30) * 0.9
    params = SamplingParams(temperature=temperature, seed=1)
    assert_drawn_by(logits, params, softmax(logits, temperature))


def test_top_k_keeps_k_and_their_proportions() -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0, 0.0])
    expected = softmax(logits) * [0, 1, 1, 1, 0]
    assert_drawn_by(logits, SamplingParams(temperature=1.0, top_k=3), expected / expected.sum())
    of_equal_ones_the_lower_id = candidates(logits, SamplingParams(temperature=1.0, top_k=1))
    assert of_equal_ones_the_lower_id.tolist() == [1]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    expected = np.array([0, 4 / 7, 0, 3 / 7])
    assert_drawn_by(logits, SamplingParams(temperature=1.0, top_p=0.65), expected)
    assert candidates(logits, SamplingParams(temperature=1.0, top_p=1e-9)).tolist() == [1]


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    assert candidates(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.6)).tolist() == [0]
    assert sorted(candidates(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.7))) == [0, 1]


def kept_by_definition(logits: np.ndarray, params: SamplingParams, rounding: float) -> list[int]:
    order = sorted(range(logits.size), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp((logits[order] - logits.max()) / params.temperature)
    sums = np.cumsum(weights)
    return sorted(order[: int((sums < params.top_p * sums[-1] * (1 + rounding)).sum()) + 1])


@settings(deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=60),
    st.floats(0.05, 5),
    st.one_of(st.just(1.0), st.floats(0.01, 1)),
    st.integers(0, 70),
    st.integers(0, 2**63 - 1),
)
def test_the_cuts_keep_what_they_say_and_a_draw_is_one_of_those(
    values: list[int], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    logits = np.array(values) / 4
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    kept = sorted(candidates(logits, params).tolist())
    assert kept in [kept_by_definition(logits, params, rounding) for rounding in (-1e-12, 1e-12)]
    assert draw(logits, params, 5) in kept


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = np.array([1.0, -300.0, 3.0, 2.5])
    for top_p in (1.0, 0.5):
        params = SamplingParams(temperature=1e-308, top_p=top_p)
        assert {draw(logits, params, position) for position in range(50)} == {2}


def test_a_small_change_of_the_logits_hardly_ever_changes_a_draw() -> None:
    """Less often than the two best sums are as close as that: about one time in a thousand here, and only then."""
    generator = np.random.default_rng(3)
    changed = 0
    for position in range(1000):
        logits = generator.normal(size=2000) * 2
        other = logits + generator.uniform(-1e-3, 1e-3, size=2000)
        params = SamplingParams(temperature=1.0, seed=11)
        scores = np.sort(logits + gumbel_noise(11, position, np.arange(2000)))
        if draw(logits, params, position) != draw(other, params, position):
            changed += 1
            assert scores[-1] - scores[-2] < 2e-3
    assert changed < 10


def test_the_same_row_gives_the_same_token_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator)
    draws = [
        (SamplingParams(temperature=1.0, seed=row, top_k=row * 7, top_p=1 - row / 10), row)
        for row in range(6)
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[row : row + 1], [draws[row]])[0] for row in range(6)]
    assert len(set(together)) > 3


def test_bfloat16_logits_are_sampled_as_their_values() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = [(SamplingParams(temperature=0.8, seed=5), 3)]
    assert sample(logits, params) == sample(logits.float(), params)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_that_are_no_numbers_give_some_token(top_p: float) -> None:
    """What a damaged model computes ends no worker."""
    for value in (float("nan"), float("inf"), float("-inf")):
        logits = torch.full((1, 9), value)
        assert 0 <= sample(logits, [(SamplingParams(temperature=1.0, top_p=top_p), 0)])[0] < 9
