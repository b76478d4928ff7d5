"""Real children under the policy: ends, silence and refusals, and what the log says of them."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cluster.control import AnyMessage, Ping, WorkerUp
from cluster.events import (
    Event,
    HeartbeatMissed,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRestarting,
    WorkerStarting,
)
from cluster.log_lines import last_text
from cluster.process_set import ProcessSet
from cluster.process_slot import ProcessSlot
from cluster.profile import SupervisorSection
from cluster.spawner import ProgramSpawner
from tests.cluster.supervision import child_command, until

LIMITS = SupervisorSection(
    heartbeat_timeout_s=0.8, stop_grace_s=10.0, backoff_first_s=0.01, crash_loop_window_s=60.0
)


class Harness:
    """One process under supervision; ``tick`` until something is true."""

    def __init__(self, log_dir: Path, mode: str, limits: SupervisorSection = LIMITS) -> None:
        self.events: list[Event] = []
        self.changes = 0
        self.slot = ProcessSlot("decode-0", "decode", ProgramSpawner(child_command(mode)), index=0, cpus=(0,))
        self.processes = ProcessSet(
            [self.slot],
            limits,
            log_dir,
            first_message=lambda slot: (Ping(seq=0), ()),
            emit=self.events.append,
            on_message=self._said,
            on_change=self._changed,
        )

    def _said(self, slot: ProcessSlot, message: AnyMessage) -> None:
        if isinstance(message, WorkerUp):
            self.processes.mark_ready(slot, total_blocks=10, kv_address="here")

    def _changed(self, slot: ProcessSlot) -> None:
        self.changes += 1

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def tick_until(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 40
        while not is_true():
            assert time.monotonic() < deadline, f"never came: {what}"
            await self.processes.tick(time.monotonic())
            await self._breathe()

    async def _breathe(self) -> None:
        seen = len(self.events)
        pause_ends_at = time.monotonic() + 0.02
        await until(lambda: len(self.events) > seen or time.monotonic() > pause_ends_at, "a pause")

    async def ready(self, times: int = 1) -> None:
        await self.tick_until(lambda: len(self.of(WorkerReady)) >= times, f"ready {times} times")


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(mode: str, limits: SupervisorSection = LIMITS) -> Harness:
        made.append(Harness(tmp_path, mode, limits))
        return made[-1]

    yield build
    for harness in made:
        harness.processes.kill_all()
        await harness.processes.stop(["decode-0"])
        assert harness.processes.survivors() == []


async def test_start_is_told_and_ready_is_told(make: Callable[..., Harness]) -> None:
    harness = make("plain")
    await harness.ready()
    starting, ready = harness.events
    assert isinstance(starting, WorkerStarting)
    assert isinstance(ready, WorkerReady)
    assert (starting.worker_id, starting.role, starting.restarts, starting.cpus) == (
        "decode-0",
        "decode",
        0,
        (0,),
    )
    assert starting.pid == ready.pid == harness.slot.child.pid  # type: ignore[union-attr]
    assert (ready.total_blocks, ready.kv_address) == (10, "here")
    assert 0 < ready.after_s < 40
    assert last_text(Path(starting.log), 20).startswith("plain started")


async def test_killed_worker_comes_back(make: Callable[..., Harness]) -> None:
    harness = make("plain")
    await harness.ready()
    os.kill(harness.slot.child.pid, signal.SIGKILL)  # type: ignore[union-attr]
    await harness.ready(times=2)
    (exited,) = harness.of(WorkerExited)
    (restarting,) = harness.of(WorkerRestarting)
    assert isinstance(exited, WorkerExited)
    assert isinstance(restarting, WorkerRestarting)
    assert (exited.signal, exited.exit_code, exited.cause) == (signal.SIGKILL, 0, "crash")
    assert restarting.restarts == 1
    assert [event.restarts for event in harness.of(WorkerStarting)] == [0, 1]  # type: ignore[attr-defined]
    assert harness.changes == 1


async def test_silent_worker_is_killed_and_comes_back(make: Callable[..., Harness]) -> None:
    harness = make("plain")
    await harness.ready()
    os.kill(harness.slot.child.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    await harness.ready(times=2)
    (missed,) = harness.of(HeartbeatMissed)
    (exited,) = harness.of(WorkerExited)
    assert isinstance(missed, HeartbeatMissed)
    assert isinstance(exited, WorkerExited)
    assert missed.silent_s > LIMITS.heartbeat_timeout_s
    assert (exited.signal, exited.cause) == (signal.SIGKILL, "hang")


async def test_worker_that_answers_is_never_silent(make: Callable[..., Harness]) -> None:
    harness = make("plain")
    await harness.ready()
    until_at = time.monotonic() + 2 * LIMITS.heartbeat_timeout_s
    await harness.tick_until(lambda: time.monotonic() > until_at, "twice the limit")
    assert harness.of(HeartbeatMissed) == []
    assert harness.slot.is_ready


async def test_crash_loop_ends_with_the_last_lines_of_the_log(make: Callable[..., Harness]) -> None:
    harness = make("crash")
    await harness.tick_until(lambda: bool(harness.of(WorkerFailed)), "WorkerFailed")
    (failed,) = harness.of(WorkerFailed)
    assert isinstance(failed, WorkerFailed)
    assert failed.reason == "crash loop: 5 exits within 60 s, the last by exit code 7"
    assert "cannot go on" in failed.detail
    assert len(failed.detail.splitlines()) <= 20
    assert len(harness.of(WorkerStarting)) == 5
    backoffs = [event.backoff_s for event in harness.of(WorkerRestarting)]  # type: ignore[attr-defined]
    assert backoffs == pytest.approx([0.01, 0.02, 0.04, 0.08])
    await harness.processes.tick(time.monotonic() + 1000)
    assert len(harness.of(WorkerStarting)) == 5, "it is not started again"
    assert harness.slot.state == "failed"


async def test_refusal_is_final_and_keeps_its_words(make: Callable[..., Harness]) -> None:
    harness = make("refuse")
    await harness.tick_until(lambda: bool(harness.of(WorkerFailed)), "WorkerFailed")
    (failed,) = harness.of(WorkerFailed)
    assert isinstance(failed, WorkerFailed)
    assert failed.reason == "model 'none' is unknown; allowed: some"
    assert len(harness.of(WorkerStarting)) == 1


async def test_worker_too_slow_to_start_is_killed(make: Callable[..., Harness]) -> None:
    limits = SupervisorSection(start_timeout_s=1.0, crash_loop_exits=1)
    harness = make("guarded", limits)
    await harness.tick_until(lambda: bool(harness.of(WorkerFailed)), "WorkerFailed")
    (exited,) = harness.of(WorkerExited)
    assert isinstance(exited, WorkerExited)
    assert (exited.signal, exited.cause) == (signal.SIGKILL, "hang")
    (missed,) = harness.of(HeartbeatMissed)
    assert isinstance(missed, HeartbeatMissed)
    assert (missed.part, missed.silent_s) == ("start", 1.0)


async def test_stop_is_told_as_such_and_nothing_restarts(make: Callable[..., Harness]) -> None:
    harness = make("plain")
    await harness.ready()
    await harness.processes.stop(["decode-0"])
    (exited,) = harness.of(WorkerExited)
    assert isinstance(exited, WorkerExited)
    assert (exited.exit_code, exited.signal, exited.cause) == (0, 0, "stop")
    await harness.processes.tick(time.monotonic() + 1000)
    assert len(harness.of(WorkerStarting)) == 1
