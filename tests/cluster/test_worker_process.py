"""A worker as the kernel sees it: cores, threads, memory; forked from a nursery and run as a program."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from cluster.control import StartFailed
from cluster.cpu_plan import available_cpus
from cluster.events import HeartbeatMissed, WorkerStats
from cluster.memory_fit import worker_plan
from cluster.nursery import Nursery
from cluster.profile import ClusterSection, EngineSection, ModelSection, Profile, SupervisorSection
from cluster.spawner import ProgramSpawner, Spawner
from cluster.units import format_bytes
from engine.model_ids import resolve_model
from tests.cluster.supervision import until
from tests.cluster.worker_process import WorkerProcess

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROGRAM = ProgramSpawner((sys.executable, "-m", "cluster.worker_main"))
CPUS = available_cpus()
LONG = 8000
BUSY_SHARE = 0.05
"""A thread that used less than this share of the busiest one's time was waiting, not computing."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    """A user's own settings for OpenMP must not reach the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        patch.setenv("OMP_PROC_BIND", "true")
        made = Nursery.start(PROGRAM)
    made.listen()
    await until(lambda: not made.is_pending, "the nursery")
    yield made
    await made.close()


def profile(model: str = "tiny", cores: int = 1, **engine: object) -> Profile:
    return Profile(
        model=ModelSection(id=model, dtype="float32"),
        cluster=ClusterSection(mode="colocated", prefill=0, cores_per_worker=cores),
        engine=msgspec.structs.replace(EngineSection(), **engine),
    )


async def busy_threads(worker: WorkerProcess) -> dict[int, float]:
    """Thread -> seconds, of those that computed a prompt."""
    before = worker.thread_seconds()
    await worker.compute(LONG // 3)
    used = {thread: s - before.get(thread, 0.0) for thread, s in worker.thread_seconds().items()}
    return {thread: s for thread, s in used.items() if s > BUSY_SHARE * max(used.values())}


async def check_cores(spawner: Spawner, cpus: tuple[int, ...], directory: Path) -> None:
    async with WorkerProcess.run(spawner, profile(cores=len(cpus)), cpus, directory) as worker:
        busy = await busy_threads(worker)
        for _ in range(4):
            if len(busy) > len(cpus):  # a thread that only has to do with the start
                busy = await busy_threads(worker)
        assert len(busy) == len(cpus), f"processor seconds by thread: {busy}"
        allowed = worker.affinities()
        assert set(map(frozenset, allowed.values())) == {frozenset(cpus)}, allowed


@pytest.mark.parametrize("count", [1, 2])
async def test_a_program_uses_exactly_its_cores(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(CPUS) < count:
        pytest.skip(f"{len(CPUS)} cores are usable")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    await check_cores(PROGRAM, CPUS[-count:], tmp_path)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_fork_uses_exactly_its_cores(count: int, nursery: Nursery, tmp_path: Path) -> None:
    if len(CPUS) < count:
        pytest.skip(f"{len(CPUS)} cores are usable")
    await check_cores(nursery, CPUS[-count:], tmp_path)


async def test_after_a_long_prompt_a_worker_is_as_large_as_planned(nursery: Nursery, tmp_path: Path) -> None:
    asked = profile()
    plan = worker_plan(asked, resolve_model("tiny").config)
    async with WorkerProcess.run(nursery, asked, CPUS[-1:], tmp_path) as worker:
        await worker.compute(LONG)  # where no kernel is in the cache, the compiler makes the first one larger
    async with WorkerProcess.run(nursery, asked, CPUS[-1:], tmp_path) as worker:
        await worker.compute(LONG)
        found, planned = worker.rss_bytes(), plan.total_bytes
    assert found == pytest.approx(planned, rel=0.1), f"{format_bytes(found)} of {format_bytes(planned)}"


async def test_a_pool_beyond_the_free_memory_is_refused_with_the_numbers(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with WorkerProcess.run(nursery, profile(kv_cache="90TiB"), (), tmp_path) as worker:
        (refused,) = worker.of(StartFailed)
    assert refused.exit_code == 3
    assert "\n" not in refused.message
    assert refused.message.startswith("decode-0: 1 worker takes up to 921")
    assert "KV pool 92160.0 GiB, weights 25.6 MiB, work space " in refused.message
    assert refused.message.endswith("of memory are free; make engine.kv_cache smaller")


async def test_preemptions_are_counted_in_what_a_worker_reports(nursery: Nursery, tmp_path: Path) -> None:
    small = profile("synthetic:nano", kv_cache="128KiB")  # 16 blocks of 16 tokens
    async with WorkerProcess.run(nursery, small, CPUS[-1:], tmp_path) as worker:
        await worker.compute(40, 40, 40, 40, max_tokens=200)  # 15 blocks each in the end
        await worker.until(lambda: worker.of(WorkerStats)[-1].held_blocks == 0)
        assert worker.of(WorkerStats)[-1].preemptions > 0


async def test_an_engine_that_does_not_end_its_step_is_told_of_while_the_process_answers(
    nursery: Nursery, tmp_path: Path
) -> None:
    one_long_step = profile(max_num_batched_tokens=LONG)
    asked = msgspec.structs.replace(one_long_step, supervisor=SupervisorSection(step_timeout_s=0.1))
    async with WorkerProcess.run(nursery, asked, CPUS[-1:], tmp_path) as worker:
        await worker.start(LONG)
        await worker.until(lambda: bool(worker.of(HeartbeatMissed)))
        (missed,) = worker.of(HeartbeatMissed)
        assert (missed.worker_id, missed.part) == ("decode-0", "engine")
        assert missed.silent_s > 0.1
