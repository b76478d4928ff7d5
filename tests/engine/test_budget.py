"""Sharing one step's prefill budget."""

import hypothesis.strategies as st
from hypothesis import given

from engine.budget import share_prefill_budget


@given(
    st.integers(0, 600),
    st.lists(st.integers(1, 9000), max_size=12),
    st.integers(0, 600),
    st.sampled_from((0, 1, 64, 512)),
)
def test_nothing_is_wasted_nothing_is_overdrawn_and_the_oldest_keeps_half(
    budget: int, demands: list[int], short: int, chunk: int
) -> None:
    shares = share_prefill_budget(budget, demands, short=short, chunk=chunk)
    limits = [min(demand, chunk) if chunk else demand for demand in demands]
    assert sum(shares) == min(budget, sum(limits))
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    if demands:
        assert shares[0] >= min(limits[0], (budget + 1) // 2)


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    assert share_prefill_budget(512, [8000, 64], short=512) == [448, 64]


def test_short_prompts_share_half_in_order_of_arrival() -> None:
    assert share_prefill_budget(512, [8000, 200, 200, 200], short=512) == [256, 200, 56, 0]


def test_long_prompts_are_computed_one_after_the_other() -> None:
    assert share_prefill_budget(512, [8000, 8000, 64], short=512) == [448, 0, 64]


def test_what_the_oldest_does_not_need_goes_on_in_order() -> None:
    assert share_prefill_budget(512, [100, 8000, 300], short=512) == [100, 112, 300]


def test_what_a_chunk_leaves_is_open_to_the_next_ones() -> None:
    assert share_prefill_budget(512, [8000, 8000, 8000], short=512, chunk=200) == [200, 200, 112]
    assert share_prefill_budget(512, [8000, 8000, 300], short=512, chunk=200) == [200, 112, 200]
    assert share_prefill_budget(512, [8000], short=512, chunk=200) == [200]
