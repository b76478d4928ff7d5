from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.profile import (
    LoadSection,
    Profile,
    ProfileError,
    builtin_profiles,
    load_profile,
    parse_setting,
    profile_from_tree,
)
from cluster.targets import LinkGoal, all_targets


def profile_file(directory: Path, text: str) -> str:
    path = directory / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", builtin_profiles())
def test_every_shipped_profile_loads_under_its_name(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert "steady" in profile.load


@pytest.mark.parametrize(
    ("name", "bits_per_s"),
    [("100mbe", 1e8), ("1gbe", 1e9), ("10gbe", 1e10), ("25gbe", 2.5e10), ("100gbe", 1e11), ("loopback", 0.0)],
)
def test_shipped_links_have_the_rate_of_their_name(name: str, bits_per_s: float) -> None:
    assert load_profile(name).link_bits_per_s == bits_per_s


def test_file_is_laid_over_the_defaults_and_named_after_itself(tmp_path: Path) -> None:
    profile = load_profile(profile_file(tmp_path, '[engine]\nkv_cache = "1GiB"\n'))
    assert profile.name == "mine"
    assert profile.kv_cache_bytes == 2**30
    assert profile.engine.block_size == Profile().engine.block_size


def test_a_pool_may_be_a_share_of_the_free_memory(tmp_path: Path) -> None:
    assert load_profile(profile_file(tmp_path, '[engine]\nkv_cache = "auto"\n')).kv_cache_bytes == 0


def test_overrides_lie_over_the_file() -> None:
    profile = load_profile(
        "10gbe", {"link.bandwidth": "1gbit", "cluster.prefill": 3, "load.steady.rate_per_s": 9}
    )
    assert (profile.link_bits_per_s, profile.cluster.prefill) == (1e9, 3)
    assert profile.load["steady"].rate_per_s == 9.0
    assert profile.link.delay_ms == load_profile("10gbe").link.delay_ms


def test_added_load_keeps_the_steady_one(tmp_path: Path) -> None:
    loads = load_profile(profile_file(tmp_path, "[load.heavy]\nrate_per_s = 50\n")).load
    assert loads["heavy"].rate_per_s == 50.0
    assert loads["steady"] == LoadSection()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nmax_num_seq = 8\n", r"toml: unknown key engine\.max_num_seq; did you mean engine\.max_num_seqs\?"),
        ("[egnine]\n", r"unknown key egnine; did you mean engine\? allowed here: .*cluster"),
        ("[load.steady]\nrate = 1\n", r"unknown key load\.steady\.rate; did you mean load\.steady\.rate_per_s\?"),
        ("engine = 5\n", r"engine is 5; allowed is a section of keys"),
        ("load = 5\n", r"mine\.toml: load: Expected `object`, got `int`"),
        ('[engine]\nblock_size = "big"\n', r"mine\.toml: engine\.block_size: Expected `int`, got `str`"),
        ("[engine\n", r"mine\.toml: not valid TOML"),
        ('[cluster]\nmode = "split"\n', r"cluster\.mode is 'split'; allowed: disagg, colocated"),
        ("[cluster]\ndecode = 0\n", r"cluster\.decode is 0; allowed is 1 or more"),
        ("[cluster]\nprefill = 0\n", r"cluster\.prefill is 0; mode disagg needs 1 or more"),
        ("[router]\nport = 70000\n", r"router\.port is 70000; allowed is 0 \(any free\) to 65535"),
        ('[link]\nbandwidth = "fast"\n', r"link\.bandwidth is 'fast' is not a rate"),
        ("[link]\nloss = 1.0\n", r"link\.loss is 1\.0; allowed is 0 to below 1"),
        ("[link]\ndelay_ms = nan\n", r"link\.delay_ms is nan; allowed is a finite number"),
        ("[supervisor]\nheartbeat_timeout_s = inf\n", r"supervisor\.heartbeat_timeout_s is inf; allowed is a finite"),
        ("[link]\nrho = -1\n", r"link\.rho is -1\.0; allowed is 0 or more"),
        ("[link]\nrho = inf\n", r"link\.rho is inf; allowed is a finite number"),
        ('[link]\nrho = 0.4\ntarget = "a100-7b"\n', r"link\.rho is 0\.4 beside link\.target 'a100-7b'; allowed is one"),
        ('[link]\ntarget = "a100-7"\n', r"link\.target: 'a100-7' is not a target; allowed: a100-7b, .*mean a100-7b\?"),
        ('[link]\ntarget = "a100-7b@25gb"\n', r"'a100-7b@25gb' is on no known link; allowed: 10gbe, .*mean 25gbe\?"),
        ('[link]\ntarget = "a100-7b"\nbandwidth = "unlimited"\n', r"names no link and link\.bandwidth is unlimited"),
        ('[link]\nrho = 0.4\nbackend = "none"\n', r"link\.backend is 'none' and link\.rho is set"),
        ('[link]\ntarget = "a100-7b"\nbackend = "none"\n', r"link\.backend is 'none' and link\.target is set"),
        ("[load.steady]\nrate_per_s = nan\n", r"load\.steady\.rate_per_s is nan"),
        ("[supervisor]\nbackoff_max_s = -1\n", r"supervisor\.backoff_max_s is -1\.0; allowed is 0\.01 or more"),
        ('[engine]\nkv_cache = "0B"\n', r"engine\.kv_cache is '0B'; allowed is a size above 0, or auto"),
        ('[engine]\nkv_cache = "lots"\n', r"engine\.kv_cache is 'lots' is not a size; allowed: .*, or auto"),
        ('[engine]\nkv_cache = "auto"\n[model]\ndevice = "cuda"\n', r"kv_cache is 'auto'; with model\.device 'cuda'"),
        ("[engine]\nprefill_chunk_tokens = -1\n", r"engine\.prefill_chunk_tokens is -1; allowed is 0 or more"),
        ("[engine]\nprefill_chunk_tokens = 513\n", r"chunk_tokens is 513; allowed is .*_tokens \(512\) or less"),
        ("[cluster]\ncores_per_worker = 0\n", r"cluster\.cores_per_worker is 0; allowed is 1 or more"),
        ("[engine]\nmax_num_batched_tokens = 8\n", r"batched_tokens is 8; allowed is engine\.max_num_seqs \(32\)"),
        ("[load.a]\nrate_per_s = 0\n", r"load\.a\.rate_per_s is 0\.0; allowed is above 0"),
        ("[load.a]\nmax_tokens = 0\n", r"load\.a\.max_tokens is 0; allowed is 1 or more"),
        ("[load.a]\ntemperature = -0.5\n", r"load\.a\.temperature is -0\.5; allowed is 0 or more"),
    ],
)  # fmt: skip
def test_bad_profile_is_refused_naming_file_key_and_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as error:
        load_profile(profile_file(tmp_path, text))
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_profile_names_the_nearest_one() -> None:
    with pytest.raises(ProfileError, match=r"profile '10gb' is unknown; allowed: .*; did you mean 10gbe\?"):
        load_profile("10gb")


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.toml: cannot be read: No such file"):
        load_profile(str(tmp_path / "missing.toml"))
    (tmp_path / "dir.toml").mkdir()
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        load_profile(str(tmp_path / "dir.toml"))


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not valid TOML"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine.max_num_seqs=8", ("engine.max_num_seqs", 8)),
        ("engine.prefix_caching=false", ("engine.prefix_caching", False)),
        ("engine.kv_cache=auto", ("engine.kv_cache", "auto")),
        ("link.bandwidth=1gbit", ("link.bandwidth", "1gbit")),
        ('link.bandwidth="1gbit"', ("link.bandwidth", "1gbit")),
        ("model.id=/a=b", ("model.id", "/a=b")),
        (" link.delay_ms = 2.5 ", ("link.delay_ms", 2.5)),
        ("load.heavy.rate_per_s=3", ("load.heavy.rate_per_s", 3)),
    ],
)
def test_settings_are_read_as_toml_or_text(text: str, expected: tuple[str, Any]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_num_seqs", "allowed is key=value"),
        ("=8", "allowed is key=value"),
        ("engine.max_num_seq=8", r"did you mean engine\.max_num_seqs\?"),
        ("engine=8", "engine is 8; allowed is a section"),
        ("load.steady.rte_per_s=8", r"did you mean load\.steady\.rate_per_s\?"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_setting(text)


@pytest.mark.parametrize(
    ("key", "message"),
    [("engine.nonsense", "unknown key engine.nonsense"), ("name.x", "name is a value, not a section")],
)
def test_unknown_override_is_refused_naming_the_key(key: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile("10gbe", {key: 1})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"router.port": 99999}, "router.port is 99999; allowed is 0 (any free) to 65535"),
        ({"kv.codec": "zip"}, "kv.codec is 'zip'; allowed: raw, int8, lossless, auto"),
        ({"engine.block_size": "big"}, "engine.block_size: Expected `int`, got `str`"),
        ({"cluster.prefill": 39}, "cluster.prefill + cluster.decode is 40; allowed is 32 or fewer"),
        ({"load.steady.rate_per_s": 0.0}, "load.steady.rate_per_s is 0.0; allowed is above 0"),
        ({"link.target": "h100-7"}, "link.target: 'h100-7' is not a target"),
    ],
)  # fmt: skip
def test_what_was_given_is_blamed_and_not_the_file(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as error:
        load_profile("10gbe", overrides)
    assert str(error.value).startswith(f"given on top of profile 10gbe: {message}")


def test_the_file_is_blamed_for_its_own_keys_whatever_else_was_given(tmp_path: Path) -> None:
    file = profile_file(tmp_path, "[router]\nport = 99999\n")
    with pytest.raises(ProfileError, match=r"^/.*mine\.toml: router\.port is 99999"):
        load_profile(file, {"kv.codec": "int8"})


def test_profile_survives_the_wire_and_cannot_be_changed() -> None:
    profile = load_profile("wan", {"load.heavy.rate_per_s": 3})
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
    assert profile_from_tree(msgspec.to_builtins(profile), "copy") == profile
    with pytest.raises(AttributeError):
        profile.link.delay_ms = 1.0  # type: ignore[misc]


def test_rho_or_target_is_what_the_link_is_to_have() -> None:
    assert load_profile("10gbe").link_goal is None
    assert load_profile("10gbe", {"link.rho": 0.4}).link_goal == LinkGoal("", 0.4)
    own = load_profile("25gbe", {"link.target": "a100-7b"}).link_goal
    named = load_profile("10gbe", {"link.target": "a100-7b@25gbe"}).link_goal
    assert own is not None
    assert named is not None
    assert (own.target, named.target) == ("a100-7b", "a100-7b@25gbe")
    assert own.rho == named.rho == all_targets()["a100-7b"].rho(25e9)
