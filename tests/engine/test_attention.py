"""Both attention kernels against the plain formula."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.attention import Attention


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The formula in float64, keys and values repeated for every query head."""
    num_new, num_kv_heads, group, head_dim = queries.shape
    num_tokens = keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    mask = torch.arange(num_tokens) > torch.arange(num_tokens - num_new, num_tokens).unsqueeze(1)
    for kv_head in range(num_kv_heads):
        for member in range(group):
            scores = queries[:, kv_head, member].double() @ keys[kv_head].double().T / math.sqrt(head_dim)
            weights = torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1)
            out[:, kv_head, member] = weights @ values[kv_head].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["flash", "tiled"])
@settings(deadline=None, max_examples=25)
@given(
    num_new=st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(126, 300)),
    start=st.one_of(st.just(0), st.integers(1, 700)),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_formula(
    dtype: torch.dtype, num_new: int, start: int, num_kv_heads: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim, num_tokens = 16, start + num_new
    # laid out as the cache does: the heads of one token are neighbours
    storage = torch.randn(2, num_tokens + 3, num_kv_heads, head_dim, generator=generator).to(dtype)
    keys, values = storage[:, 2 : 2 + num_tokens].transpose(1, 2).unbind(0)
    queries = torch.randn(num_new, num_kv_heads, group, head_dim, generator=generator).to(dtype) * 3
    before = storage.clone()
    out = torch.full_like(queries, math.nan)
    Attention(dtype, torch.device("cpu"))(queries, keys, values, out)
    torch.testing.assert_close(out.double(), plain_attention(queries, keys, values), rtol=2e-5, atol=2e-5)
    assert torch.equal(storage, before)


def test_buffers_of_a_long_sequence_serve_a_short_one() -> None:
    attention = Attention(torch.float64, torch.device("cpu"))
    for num_tokens in (300, 40, 170):
        keys, values = torch.randn(2, 2, num_tokens, 8, dtype=torch.float64).unbind(0)
        queries = torch.randn(num_tokens, 2, 2, 8, dtype=torch.float64)
        out = torch.empty_like(queries)
        attention(queries, keys, values, out)
        torch.testing.assert_close(out, plain_attention(queries, keys, values))
