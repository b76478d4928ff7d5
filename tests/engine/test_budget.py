"""Sharing one step's prefill budget."""

import hypothesis.strategies as st
from hypothesis import given

from engine.budget import share_prefill_budget


@given(st.integers(0, 600), st.lists(st.integers(1, 9000), max_size=12), st.integers(0, 600))
def test_nothing_is_wasted_nothing_is_overdrawn_and_the_oldest_keeps_half(
    budget: int, demands: list[int], short: int
) -> None:
    shares = share_prefill_budget(budget, demands, short)
    assert sum(shares) == min(budget, sum(demands))
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    if demands:
        assert shares[0] >= min(demands[0], (budget + 1) // 2)


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    assert share_prefill_budget(512, [8000, 64], 512) == [448, 64]


def test_short_prompts_share_half_in_order_of_arrival() -> None:
    assert share_prefill_budget(512, [8000, 200, 200, 200], 512) == [256, 200, 56, 0]


def test_long_prompts_are_computed_one_after_the_other() -> None:
    assert share_prefill_budget(512, [8000, 8000, 64], 512) == [448, 0, 64]


def test_what_the_oldest_does_not_need_goes_on_in_order() -> None:
    assert share_prefill_budget(512, [100, 8000, 300], 512) == [100, 112, 300]
