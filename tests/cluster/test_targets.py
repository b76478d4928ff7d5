import pytest

from cluster.planner import should_transfer
from cluster.profile import builtin_profiles, load_profile
from cluster.targets import (
    COMMON_LINKS,
    Derived,
    LinkGoal,
    Measured,
    Target,
    UnknownTarget,
    all_links,
    all_targets,
    find_target,
    link_goal,
    rho_of_targets,
)


def test_published_figures_give_known_rates_and_kv() -> None:
    rates = {name: round(target.prefill_tokens_per_s) for name, target in all_targets().items()}
    assert rates == {
        "a100-7b": 14_670,  # 2048 tokens in 139.6 ms
        "h100-7b": 63_210,  # in 32.4 ms
        "h100-8b": 28_328,  # 989 TFLOP/s x 0.46 / (2 x 8.03e9)
        "h800x8-8b": 40_313,  # 8192 in 212.05 - 8.84 ms
        "a100x4-70b": 5_432,  # 2048 in 377 ms
        "a100x8-70b": 8_218,  # in 249.2 ms
        "h100x4-70b": 18_789,  # in 109 ms
        "h100x8-70b": 24_066,  # in 85.1 ms
    }
    kv = {name: target.kv_bytes_per_token for name, target in all_targets().items()}
    assert kv["h800x8-8b"] == 147_456
    assert kv["a100-7b"] == kv["h100-8b"] == 131_072
    assert kv["a100x4-70b"] == 327_680, "8 KV heads, not 64"
    assert kv["h100x4-70b"] == kv["a100x4-70b"] // 2, "FP8 KV"


def test_b_star_of_qwen3_8b_is_5_9_gigabytes() -> None:
    target = all_targets()["h800x8-8b"]
    assert target.b_star_bytes_per_s == pytest.approx(5.94e9, rel=1e-3)
    assert target.rho(1e10) == pytest.approx(0.21, abs=0.001)
    assert not should_transfer(8192, target.kv_bytes_per_token, 1.25e9, target.prefill_tokens_per_s)


@pytest.mark.parametrize("target", all_targets().values(), ids=lambda target: target.name)
def test_every_target_names_its_source_and_a_link_of_its_own(target: Target) -> None:
    assert target.source.url.startswith("https://")
    assert 2022 <= target.source.year <= 2026
    assert target.source.title
    assert target.conditions
    assert target.own_link in all_links()
    assert (target.basis == "derived") == target.conditions.startswith("derived")


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_both_gpus_have_a_small_and_a_large_model_with_grouped_heads(gpu: str) -> None:
    models = [target.model for target in all_targets().values() if target.gpu == gpu]
    assert any(model.endswith("7B") for model in models)
    assert any(model.endswith("70B") for model in models)
    assert all(target.num_kv_heads == 8 for target in all_targets().values())


def test_links_have_the_rate_of_the_profile_of_their_name() -> None:
    shared = all_links().keys() & builtin_profiles().keys()
    assert shared == {"10gbe", "25gbe", "100gbe"}
    for name in shared:
        assert all_links()[name].bits_per_s == load_profile(name).link_bits_per_s
    assert set(COMMON_LINKS) <= all_links().keys()
    assert all_links()["ib-400g"].bits_per_s == 4e11
    assert all_links()["nvlink4"].bits_per_s == 450e9 * 8


def test_10_gbe_loses_on_every_gpu_and_400g_on_none() -> None:
    low, high = rho_of_targets(1e10)
    assert (low, high) == (pytest.approx(0.2103, abs=1e-4), pytest.approx(0.7022, abs=1e-4))
    assert min(target.rho(4e11) for target in all_targets().values()) > 1


def test_a_rate_is_measured_or_derived_never_both() -> None:
    target = all_targets()["h100-8b"]
    assert target.derived == Derived(parameters=8.03e9, peak_flop_per_s=989e12, mfu=0.46)
    both = {field: getattr(target, field) for field in target.__struct_fields__}
    both["measured"] = Measured(prompt_tokens=2048, first_token_ms=100.0)
    with pytest.raises(ValueError, match="h100-8b needs either a measured or a derived rate"):
        Target(**both)


def test_a_target_is_found_with_and_without_its_link() -> None:
    assert find_target("h100-7b") == (all_targets()["h100-7b"], None)
    assert find_target("h100-7b@nvlink4") == (all_targets()["h100-7b"], all_links()["nvlink4"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100x70b", r"'h100x70b' is not a target; allowed: a100-7b, .*; did you mean h100x\d-70b\?"),
        ("", r"'' is not a target; allowed: a100-7b"),
        ("h100-7b@", r"'h100-7b@' is on no known link; allowed: 10gbe"),
        ("h100-7b@100gb", r"'h100-7b@100gb' is on no known link; allowed: 10gbe, .*; did you mean 100gbe\?"),
        ("@10gbe", r"'@10gbe' is not a target"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UnknownTarget, match=message) as error:
        find_target(text)
    assert "\n" not in str(error.value)


def test_a_goal_is_a_number_or_a_target_on_its_own_or_the_profiles_link() -> None:
    assert link_goal("", 0.0, 1e10) is None
    assert link_goal("", 0.4, 0.0) == LinkGoal("", 0.4)
    on_ten = all_targets()["a100-7b"].rho(1e10)
    assert link_goal("a100-7b@10gbe", 0.0, 1e9) == LinkGoal("a100-7b@10gbe", on_ten)
    assert link_goal("a100-7b", 0.0, 1e10) == LinkGoal("a100-7b", on_ten)
    with pytest.raises(UnknownTarget, match=r"link\.bandwidth is unlimited; allowed: a100-7b@10gbe, "):
        link_goal("a100-7b", 0.0, 0.0)
