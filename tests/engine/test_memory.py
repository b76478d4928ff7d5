"""What an engine takes, what is free, and that it does not grow."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from cluster.spawner import LIBRARY_SETTINGS
from engine.compiled_operations import supports
from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import (
    AUTO_SHARE,
    auto_kv_cache_bytes,
    free_memory_bytes,
    has_compiled_kernels,
    memory_plan,
    num_kv_blocks,
)
from engine.model_ids import SYNTHETIC_PRESETS, resolve_model
from engine.weights import load_model

NANO = SYNTHETIC_PRESETS["nano"]
BLOCK_BYTES = 16 * 512  # of nano in float32: 2 * 2 layers * 2 heads * 16 * 4 bytes a token


def config(**changes: object) -> EngineConfig:
    return EngineConfig(**({"dtype": "float32"} | changes))  # type: ignore[arg-type]


# --- the plan ---------------------------------------------------------------------------------------------------


def test_a_plan_is_the_sum_of_its_parts() -> None:
    plan = memory_plan(config(num_blocks=10), NANO)
    assert plan.kv_pool_bytes == 10 * BLOCK_BYTES
    assert plan.weights_bytes == 4 * (NANO.num_parameters + 512 * 64 + 8192 * 16)  # tied head, rotary tables
    parts = (plan.runtime_bytes, plan.weights_bytes, plan.workspace_bytes, plan.kv_pool_bytes)
    assert plan.total_bytes == sum(parts)


def test_work_space_follows_the_step_and_the_dtype() -> None:
    plan = memory_plan(config(), NANO)
    assert memory_plan(config(max_num_batched_tokens=2048), NANO).workspace_bytes > 1.5 * plan.workspace_bytes
    half = memory_plan(config(dtype="bfloat16"), NANO)
    assert half.weights_bytes * 2 == plan.weights_bytes
    assert half.kv_bytes_per_token * 2 == plan.kv_bytes_per_token


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", [*SYNTHETIC_PRESETS, "tiny"])
def test_the_plan_knows_who_runs_compiled_kernels(name: str, kernels: str) -> None:
    model = SYNTHETIC_PRESETS.get(name) or resolve_model(name).config
    expected = kernels == "auto" and supports(model, torch.device("cpu"))
    assert has_compiled_kernels(config(kernels=kernels), model) == expected
    assert not has_compiled_kernels(config(kernels=kernels, device="cuda"), model)


# --- the pool ---------------------------------------------------------------------------------------------------


def test_an_auto_pool_is_a_share_of_what_engines_leave_free() -> None:
    asked = config(kv_cache_bytes=0)
    fixed = memory_plan(asked, NANO).total_bytes
    assert memory_plan(asked, NANO).kv_pool_bytes == 0
    spare = 50 * BLOCK_BYTES
    for engines in (1, 3):
        free = engines * (fixed + spare)
        assert auto_kv_cache_bytes(asked, NANO, free, engines) == AUTO_SHARE * spare
    assert auto_kv_cache_bytes(asked, NANO, fixed // 2) == 0
    most = asked.max_num_seqs * NANO.max_model_len // 16
    assert auto_kv_cache_bytes(asked, NANO, 10**15) == most * BLOCK_BYTES


def test_blocks_come_from_their_number_or_from_bytes() -> None:
    assert num_kv_blocks(config(num_blocks=7, kv_cache_bytes=10**9), NANO, "float32") == 7
    assert num_kv_blocks(config(kv_cache_bytes=3 * BLOCK_BYTES + 1), NANO, "float32") == 3
    with pytest.raises(ValueError, match=rf"bytes is 100; allowed is {BLOCK_BYTES} \(one block\) or more"):
        num_kv_blocks(config(kv_cache_bytes=100), NANO, "float32")


def test_no_room_for_an_auto_pool_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.free_memory_bytes", lambda: 1)
    with pytest.raises(ValueError, match=r"bytes is 0 \(auto: 0 of the memory that is free\); allowed is"):
        num_kv_blocks(config(kv_cache_bytes=0), NANO, "float32")


def test_an_engine_sizes_its_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("synthetic:nano", "float32")
    plan = memory_plan(config(kv_cache_bytes=0), NANO)
    free = plan.workspace_bytes + 40 * BLOCK_BYTES  # weights and process are here already
    monkeypatch.setattr("engine.memory.free_memory_bytes", lambda: free)
    assert Engine(config(kv_cache_bytes=0), loaded).stats().total_blocks == 20


# --- what is free -----------------------------------------------------------------------------------------------


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    group(root / "a" / "b", memory__max="9000", memory__current="1000")
    assert free_memory_bytes(root, membership) == 8000
    group(root / "a", memory__max="6000", memory__current="2000", memory__stat="anon 7\ninactive_file 500")
    assert free_memory_bytes(root, membership) == 4500
    group(root, memory__max="3000", memory__current="9000")
    assert free_memory_bytes(root, membership) == 0


def test_groups_of_the_older_kind_count_too(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("7:cpu,cpuacct:/x\n4:memory:/outside/of/this/container\n0::/\n")
    group(root / "memory", memory__limit_in_bytes="5000", memory__usage_in_bytes="4000")
    group(root / "memory", memory__stat="inactive_file 1\ntotal_inactive_file 250")
    assert free_memory_bytes(root, membership) == 1250


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_without_a_limit_it_is_the_machines(limit: str, tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/a\n4:memory:/a\n")
    group(tmp_path / "a", memory__max="max", memory__current="5")
    group(tmp_path / "memory" / "a", memory__limit_in_bytes=limit, memory__usage_in_bytes="5")
    assert 2**20 < free_memory_bytes(tmp_path, membership) <= psutil.virtual_memory().total
    assert 2**20 < free_memory_bytes(tmp_path, tmp_path / "no such file") <= psutil.virtual_memory().total


# --- growth -----------------------------------------------------------------------------------------------------

_GROWTH = """
import random, sys
import psutil
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.weights import load_model
engine = Engine(EngineConfig(dtype="float32", kv_cache_bytes=4 * 2**20), load_model("synthetic:nano", "float32"))
rng = random.Random(1)
added = live = 0
def run(until):
    global added, live
    while live or added < until:
        while live < 12 and added < until:
            added += 1
            live += 1
            length = min(1 + int(rng.expovariate(1 / 80)), 1000)
            max_tokens, temperature = rng.randint(1, 16), rng.choice((0.0, 0.8))
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
            engine.add(Request(f"r{added}", tuple(rng.randrange(3, 500) for _ in range(length)), sampling))
        live -= len(engine.step().finished)
    assert engine.stats().held_blocks == 0
    engine.check_integrity()
    return psutil.Process().memory_info().rss
print(run(300), run(900))
"""


def test_hundreds_of_requests_leave_the_process_as_large_as_it_was() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _GROWTH],
        env={**os.environ, **LIBRARY_SETTINGS},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    after_300, after_900 = map(int, ran.stdout.split())
    assert after_900 - after_300 < 12 * 2**20, f"grew from {after_300} to {after_900} bytes"
