"""What is asked of the measuring process, what its ends mean, and what its samples come to."""

import sys
from typing import Any

import psutil
import pytest

from cluster import measuring_process
from cluster.cpu_plan import available_cpus
from cluster.engine_bench import benchmark_spec, run_benchmark
from cluster.engine_bench_report import engine_bench_document
from cluster.measuring_process import BenchmarkFailed, BenchmarkRefused
from cluster.profile import load_profile
from engine.benchmark_plan import BenchmarkSpec, DecodeCase, PrefillCase
from engine.benchmark_result import (
    BenchmarkResult,
    DecodeSamples,
    LimitSamples,
    MatmulSamples,
    PartTimes,
    PrefillSamples,
)
from engine.model_ids import SYNTHETIC_PRESETS
from engine.step_cost import decode_bytes, prefill_flops

NANO = SYNTHETIC_PRESETS["nano"]


def make_spec(*, size_pool: bool = True, model: str = "synthetic:nano", **settings: Any) -> BenchmarkSpec:
    profile = load_profile("10gbe", {"model.id": model} | settings)
    return benchmark_spec(
        profile, NANO, "float32",
        prefill_tokens=[64, 8191, 9000], batches=[1, 4], contexts=[128],
        repeats=2, where=False, size_pool=size_pool,
    )  # fmt: skip


def test_pool_has_room_for_the_largest_case_that_the_model_can_have() -> None:
    assert make_spec().engine.num_blocks == 8192 // 16
    assert make_spec(**{"engine.block_size": 32}).engine.num_blocks == 8192 // 32


def test_pool_of_the_profile_stays_when_it_is_asked_for() -> None:
    spec = make_spec(size_pool=False, **{"engine.kv_cache": "1MiB"})
    assert (spec.engine.num_blocks, spec.engine.kv_cache_bytes) == (0, 2**20)


def test_pool_and_buffer_leave_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 MiB that are free, 2 MiB hold the KV of 4,096 tokens of nano, 512 bytes each: 4 x 148 fit, 8,191 do not."""
    memory = type("Memory", (), {"available": 4 * 2**20})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    spec = make_spec()
    assert spec.engine.num_blocks == 4 * 10
    assert spec.memory_buffer_bytes == 2**20


def test_nothing_is_cached_and_nothing_runs_beside() -> None:
    engine = make_spec().engine
    assert (engine.enable_prefix_caching, engine.num_threads) == (False, 1)


def test_model_that_cannot_be_loaded_is_refused_in_its_own_words() -> None:
    with pytest.raises(BenchmarkRefused, match=r"^model 'gpt-9' is neither a directory"):
        run_benchmark(make_spec(model="gpt-9"), available_cpus()[-1], print)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('one'); sys.exit(3)", r"said b'one\\n': JSON is malformed"),
        ("import sys; sys.exit('two\\nthree\\n')", "ended by exit code 1: three"),
        ("pass", "ended by exit code 0: it said nothing"),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"ended by signal SIGKILL \(out of memory\?\): it said nothing",
        ),
    ],
)
def test_process_that_ends_early_is_one_line(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring_process, "guarded_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(BenchmarkFailed, match=words) as failed:
        run_benchmark(make_spec(), 0, print)
    assert "\n" not in str(failed.value)


def make_result() -> BenchmarkResult:
    """100 GFLOP/s and 10 GB/s; a prefill of 2 ms at best; decode steps of 1 to 10 ms."""
    prefill, decode = PrefillCase(64), DecodeCase(4, 128)
    return BenchmarkResult(
        model="synthetic:nano",
        dtype="float32",
        kernels="torch",
        torch_version="2",
        num_blocks=512,
        limits=LimitSamples(
            [MatmulSamples("qkv", (512, 64, 128), [50e9, 100e9]), MatmulSamples("out", (512, 64, 64), [80e9])],
            2**20,
            [9e9, 10e9, 8e9],
        ),
        prefill=[
            PrefillSamples(prefill, "", (0.004, 0.002, 0.016), 0.9),
            PrefillSamples(PrefillCase(9000), "too long"),
        ],
        decode=[DecodeSamples(decode, "", ((0.001, 0.002, 0.003), (0.004, 0.010, 0.006)), 1.0)],
        where=[
            PartTimes(prefill, 0.004, {"qkv": 0.003, "norms": 0.001}),
            PartTimes(decode, 0.002, {"attention": 0.0005, "head": 0.0015}),
        ],
    )  # fmt: skip


def test_document_compares_medians_with_the_best_of_the_core() -> None:
    document = engine_bench_document(make_spec(), NANO, 1, {"cpu": "c"}, make_result())
    assert document["machine"] == {"cpu": "c", "core": 1}
    assert document["limits"]["matmul"]["flops_per_s"] == 100e9
    assert document["limits"]["memory_read"]["bytes_per_s"] == 10e9
    prefill = document["prefill"][0]
    assert prefill["flops"] == sum(prefill_flops(NANO, 64).values())
    assert prefill["ttft_ms"] == pytest.approx({"p10": 2.4, "median": 4.0, "p90": 13.6})
    assert prefill["tokens_per_s"]["median"] == pytest.approx(16_000)
    assert prefill["share_of_limit"] == pytest.approx(prefill["flops"] / 0.004 / 100e9)
    decode = document["decode"][0]
    assert decode["bytes"] == sum(decode_bytes(NANO, "float32", [139] * 4).values())
    assert decode["step_ms"]["median"] == pytest.approx(3.5)
    assert decode["tokens_per_s"]["median"] == pytest.approx((4 / 0.003 + 4 / 0.004) / 2)
    assert decode["share_of_limit"] == pytest.approx(decode["bytes"] / 0.0035 / 10e9)
    assert document["engine"]["kv_cache_bytes"] == 512 * 16 * NANO.kv_bytes_per_token("float32")


def test_a_case_that_was_not_measured_has_no_figures() -> None:
    case = engine_bench_document(make_spec(), NANO, 1, {}, make_result())["prefill"][1]
    assert (case["prompt_tokens"], case["problem"], case["ttft_s"]) == (9000, "too long", [])
    assert case["ttft_ms"] == case["tokens_per_s"] == {"p10": None, "median": None, "p90": None}
    assert case["flops_per_s"] is case["share_of_limit"] is case["cpu_share"] is None


def test_parts_have_shares_and_the_rate_of_their_work() -> None:
    prefill, decode = engine_bench_document(make_spec(), NANO, 1, {}, make_result())["where"]
    qkv, rest = prefill["parts"]
    assert (qkv["part"], qkv["share"], qkv["work"]) == ("qkv", 0.75, prefill_flops(NANO, 64)["qkv"])
    assert qkv["share_of_limit"] == pytest.approx(qkv["work"] / 0.003 / 100e9)
    assert (rest["part"], rest["work"], rest["work_per_s"]) == ("norms", None, None)
    head, attention = decode["parts"]
    assert head["work_per_s"] == pytest.approx(512 * 64 * 4 / 0.0015)
    assert attention["work"] == NANO.kv_bytes_per_token("float32") * 139 * 4
