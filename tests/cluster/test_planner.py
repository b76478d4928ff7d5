import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner import (
    PlanLink,
    break_even_bandwidth,
    break_even_tokens,
    kv_bytes_per_token,
    kv_transfer_ms,
    plan_table,
    plan_verdict,
    rho,
    should_transfer,
    split_worthwhile,
    stall_avoided_ms,
    ttft_ms,
    wrong_choice_verdict,
)
from engine.config import ModelConfig

MIB, GIB = 2**20, 2**30


def shape(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=8192,
    )


QWEN3_8B = shape(36, 8, 128)
SMOLLM2_135M = shape(30, 3, 64)


def test_kv_bytes_of_known_models() -> None:
    assert kv_bytes_per_token(QWEN3_8B, "bfloat16") == 147_456
    assert kv_bytes_per_token(SMOLLM2_135M, "bfloat16") == 23_040
    assert kv_bytes_per_token(SMOLLM2_135M, "float32") == 2 * 23_040
    assert kv_bytes_per_token(QWEN3_8B, "fp8") == 147_456 // 2
    assert kv_bytes_per_token(SMOLLM2_135M, "float32") == SMOLLM2_135M.kv_bytes_per_token("float32")


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"dtype is 'int4'; allowed: float32, bfloat16, float16, fp8"):
        kv_bytes_per_token(QWEN3_8B, "int4")


def test_known_transfer_times() -> None:
    assert kv_transfer_ms(512 * MIB, 32 * GIB) == 15.625
    assert kv_transfer_ms(512 * MIB, 2 * GIB) == 250.0
    assert kv_transfer_ms(0, 1.0) == 0.0


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_transfer_over_no_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s"):
        kv_transfer_ms(1, bandwidth)


def test_ttft_is_the_sum_of_its_parts() -> None:
    assert ttft_ms(1.0, 20.0, 300.0, 4000.0) == 4321.0


def test_stall_avoided_is_the_prompts_own_time() -> None:
    assert stall_avoided_ms(4, 2048) == pytest.approx(204.8)
    assert stall_avoided_ms(16, 100, prefill_cost=0.5) == stall_avoided_ms(1, 100, 9.0, 0.5) == 50.0


@pytest.mark.parametrize(
    ("transfer_ms", "stall_ms", "limit_ms", "worthwhile"),
    [
        (50.0, 200.0, 50.0, True),
        (50.1, 200.0, 50.0, False),  # costs more TTFT than allowed
        (50.0, 50.0, 100.0, False),  # saves no more than it costs
        (50.0, 50.1, 100.0, True),
    ],
)
def test_split_is_worthwhile_within_the_limit_and_with_a_gain(
    transfer_ms: float, stall_ms: float, limit_ms: float, worthwhile: bool
) -> None:
    assert split_worthwhile(transfer_ms, stall_ms, limit_ms) is worthwhile


@given(st.integers(1, 10**12), st.floats(0.001, 1e6))
def test_break_even_bandwidth_moves_the_bytes_just_in_time(kv_bytes: int, limit_ms: float) -> None:
    assert kv_transfer_ms(kv_bytes, break_even_bandwidth(kv_bytes, limit_ms)) == pytest.approx(limit_ms)


def test_break_even_within_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="max_transfer_ms is 0"):
        break_even_bandwidth(1, 0)


def test_8k_tokens_of_an_8b_model_over_10_gbe_lose_to_a_fast_gpu() -> None:
    assert not should_transfer(8192, 147_456, 1.25e9, 40_300)
    assert should_transfer(8192, 147_456, 12.5e9, 40_300)


def test_short_prompts_are_not_worth_the_overhead() -> None:
    fast = {"kv_bytes_per_tok": 23_040, "link_bytes_per_s": 1.25e9, "prefill_tps": 20_000}
    assert not should_transfer(16, **fast)
    assert should_transfer(16, **fast, overhead_s=0.0)
    assert should_transfer(4096, **fast)


@pytest.mark.parametrize("prefill_tps", [0.0, -5.0])
def test_decision_needs_a_prefill_rate(prefill_tps: float) -> None:
    with pytest.raises(ValueError, match="prefill_tps"):
        should_transfer(10, 1, 1.0, prefill_tps)


@given(
    st.integers(1, 100_000),
    st.integers(1, 10**6),
    st.floats(1e3, 1e12),
    st.floats(1.0, 1e7),
    st.floats(0.0, 1.0),
)
def test_without_overhead_the_decision_is_rho(
    n_tokens: int, per_token: int, link: float, tps: float, overhead_s: float
) -> None:
    ratio = rho(link, per_token, tps)
    if abs(ratio - 1) > 1e-6:
        assert should_transfer(n_tokens, per_token, link, tps, overhead_s=0.0) is (ratio > 1)
    if should_transfer(n_tokens, per_token, link, tps, overhead_s):
        assert should_transfer(n_tokens, per_token, link, tps, overhead_s=0.0), "overhead never helps"


GBE, TEN_GBE = PlanLink("1gbe", 1e9), PlanLink("10gbe", 1e10, delay_ms=0.05)


def test_table_has_a_row_per_link_and_length() -> None:
    rows = plan_table(23_040, [100, 8000], [GBE, TEN_GBE], 900.0)
    assert [(row.link, row.tokens) for row in rows] == [
        ("1gbe", 100), ("1gbe", 8000), ("10gbe", 100), ("10gbe", 8000),
    ]  # fmt: skip
    row = rows[-1]
    assert row.kv_bytes == 8000 * 23_040
    assert row.transfer_ms == pytest.approx(8000 * 23_040 / 1.25e9 * 1000 + 2.0 + 0.05)
    assert row.recompute_ms == pytest.approx(8000 / 0.9)
    assert row.rho == pytest.approx(1.25e9 / (23_040 * 900))
    assert row.transfer_pays is True


def test_verdicts_agree_with_the_figures_beside_them() -> None:
    for row in plan_table(23_040, [1, 100, 8000], [PlanLink("slow", 1e8), GBE, TEN_GBE], 20_000.0):
        assert row.recompute_ms is not None
        assert row.transfer_pays is (row.transfer_ms < row.recompute_ms)
        assert row.verdict.startswith("yes" if row.transfer_pays else "no")


def test_one_sentence_can_say_yes_no_and_it_depends() -> None:
    def verdict(prefill_tps: float | None, *links: PlanLink) -> str:
        return plan_verdict(plan_table(23_040, [1000], links, prefill_tps))

    assert verdict(900.0, TEN_GBE).startswith("yes: ")
    assert verdict(1e6, GBE, TEN_GBE).startswith("no: ")
    assert (
        verdict(20_000.0, GBE, TEN_GBE) == "it depends: moving KV pays in 1 of 2 rows: 1000 tokens on 10gbe"
    )
    assert verdict(None, GBE).startswith("no verdict: ")


def test_without_a_prefill_rate_transfer_times_stand_alone() -> None:
    (row,) = plan_table(23_040, [1000], [GBE], None)
    assert row.transfer_ms > 0
    assert (row.recompute_ms, row.rho, row.transfer_pays) == (None, None, None)


def test_rho_of_qwen3_8b_on_10_gbe() -> None:
    assert rho(1.25e9, 147_456, 40_300) == pytest.approx(0.2104, abs=1e-4)


@given(st.integers(1, 10**6), st.floats(1e3, 1e12), st.floats(1.0, 1e7), st.floats(1e-6, 1.0))
def test_break_even_tokens_is_where_transferring_begins_to_pay(
    per_token: int, link: float, tps: float, overhead_s: float
) -> None:
    tokens = break_even_tokens(per_token, link, tps, overhead_s)
    if tokens is None:
        assert rho(link, per_token, tps) <= 1 + 1e-9
        assert not should_transfer(10**6, per_token, link, tps, overhead_s)
    elif tokens < 10**6 and rho(link, per_token, tps) > 1 + 1e-6:  # beyond, a rounding is more than a token
        assert should_transfer(tokens + 1, per_token, link, tps, overhead_s)
        assert tokens < 3 or not should_transfer(tokens - 2, per_token, link, tps, overhead_s)


def test_break_even_tokens_of_a_known_case() -> None:
    """A token saves 1 ms of computing and costs 0.5 ms of moving: 2.1 ms of overhead are worth 5 tokens."""
    assert break_even_tokens(500_000, 1e9, 1000.0, 0.0021) == 5
    assert break_even_tokens(1_000_000, 1e9, 1000.0, 0.0021) is None
    with pytest.raises(ValueError, match="prefill_tps is 0"):
        break_even_tokens(1, 1.0, 0.0)


def test_wrong_choice_is_one_sentence_for_all_some_and_no_links() -> None:
    again = "computing KV again is faster than moving it"
    assert wrong_choice_verdict(147_456, [TEN_GBE], 40_300) == (
        f"disaggregation is the wrong choice on 10gbe (rho 0.21), where {again} at any prompt length"
    )
    some = wrong_choice_verdict(147_456, [TEN_GBE, PlanLink("100gbe", 1e11)], 40_300)
    assert some == (
        f"disaggregation is the wrong choice on 10gbe (rho 0.21), where {again} at any prompt length; moving is faster "
        "from 154 tokens on 100gbe (rho 2.1)"
    )
    none = wrong_choice_verdict(147_456, [PlanLink("100gbe", 1e11)], 40_300)
    assert none == (
        f"disaggregation is the wrong choice only below 154 tokens on 100gbe (rho 2.1): there {again}"
    )
