"""Whether workers fit into memory: before anything is started, with the numbers in the refusal."""

import msgspec
import pytest

from cluster.engine_settings import engine_config
from cluster.memory_fit import fitted, memory_problem, with_kv_cache, worker_plan
from cluster.profile import ClusterSection, EngineSection, ModelSection, Profile
from cluster.start_refused import StartRefused
from engine import memory
from engine.model_ids import resolve_model

GIB = 2**30
NANO = resolve_model("synthetic:nano").config


def profile(kv_cache: str = "512MiB", device: str = "cpu", decode: int = 1) -> Profile:
    return Profile(
        cluster=ClusterSection(decode=decode),
        model=ModelSection(id="synthetic:nano", dtype="float32", device=device),
        engine=EngineSection(kv_cache=kv_cache),
    )


def test_a_pool_of_a_given_size_stays_as_it_is() -> None:
    assert fitted(profile("300MiB"), 8 * GIB) == profile("300MiB")


def test_auto_becomes_one_size_for_all_workers_and_they_fit() -> None:
    free = 3 * GIB // 2
    settled = fitted(profile("auto", decode=3), free)
    assert settled.kv_cache_bytes > 0
    assert msgspec.structs.replace(settled, engine=profile("auto").engine) == profile("auto", decode=3)
    taken = 4 * worker_plan(settled, NANO).total_bytes
    unused = free - 4 * worker_plan(profile("auto"), NANO).total_bytes
    assert free - taken == pytest.approx(unused / 2, rel=0.01)  # the other half stays free


def test_auto_takes_no_more_than_can_be_used() -> None:
    settled = fitted(profile("auto"), 1000 * GIB)
    config = engine_config(settled)
    full_context = NANO.max_model_len * NANO.kv_bytes_per_token("float32")
    assert config.kv_cache_bytes == config.max_num_seqs * full_context


def test_auto_without_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartRefused) as refused:
        fitted(profile("auto"), 100 * 2**20)
    needed = 2 * worker_plan(profile("auto"), NANO).total_bytes
    assert refused.value.message == (
        f"engine.kv_cache is auto: 2 workers need {needed / 2**20:.1f} MiB without it, "
        "100.0 MiB of memory are free"
    )


def test_pools_that_do_not_fit_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "has_cuda_build", lambda: False)
    plan = worker_plan(profile("4GiB"), NANO)
    assert fitted(profile("4GiB"), 2 * plan.total_bytes) == profile("4GiB")
    with pytest.raises(StartRefused) as refused:
        fitted(profile("4GiB"), 2 * plan.total_bytes - 1)
    message = refused.value.message
    assert refused.value.exit_code == 3
    assert message.startswith("2 workers take up to 8.4 GiB (each KV pool 4.0 GiB, weights 1.1 MiB, ")
    assert message.endswith("; 8.4 GiB of memory are free; make engine.kv_cache smaller")
    assert "\n" not in message


def test_a_cuda_build_of_torch_counts_with_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {}
    for has_cuda in (False, True):
        monkeypatch.setattr(memory, "has_cuda_build", lambda has_cuda=has_cuda: has_cuda)
        totals[has_cuda] = worker_plan(profile("4GiB"), NANO).total_bytes
    assert totals[True] - totals[False] == memory.CUDA_LIBRARIES_BYTES


def test_one_worker_is_said_in_the_singular() -> None:
    assert memory_problem(worker_plan(profile(), NANO), 1, 0).startswith("1 worker takes up to ")


def test_memory_of_another_device_is_not_looked_at() -> None:
    assert fitted(profile("4GiB", device="cuda"), 1) == profile("4GiB", device="cuda")


@pytest.mark.parametrize("kv_cache", ["auto", "1MiB"])
def test_a_model_that_cannot_be_used_is_refused_at_once(kv_cache: str) -> None:
    unknown = msgspec.structs.replace(profile(kv_cache), model=ModelSection(id="gpt-9"))
    with pytest.raises(StartRefused, match="model 'gpt-9' is neither") as refused:
        fitted(unknown, GIB)
    assert refused.value.exit_code == 2


def test_every_pool_counts_whole_blocks() -> None:
    settled = with_kv_cache(profile("auto"), NANO, GIB)
    assert settled.kv_cache_bytes % (16 * NANO.kv_bytes_per_token("float32")) == 0
