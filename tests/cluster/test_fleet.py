"""The set of workers changes while a supervisor serves. The children are small and real, and serve nobody."""

from collections.abc import Callable

import pytest

from cluster.control import (
    AddWorker,
    Command,
    DrainWorker,
    KillWorker,
    RemoveWorker,
    RestartWorker,
    ResumeWorker,
    SetMode,
    SetRole,
)
from cluster.events import (
    RoleChanged,
    WorkerAdded,
    WorkerDrained,
    WorkerDraining,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRemoved,
    WorkerResumed,
    WorkerStarting,
)
from tests.cluster.supervised_run import Run, changed
from tests.cluster.supervision import until

Start = Callable[..., Run]

TWO_BY_TWO = changed(cluster={"prefill": 2, "decode": 2})


async def test_a_drained_worker_is_listed_as_such_until_it_resumes(start: Start) -> None:
    run = start(TWO_BY_TWO)
    await run.up()
    done = await run.command(DrainWorker(worker_id="decode-0", cause="test"))
    assert (done.ok, done.message) == (True, "decode-0 drains: no new requests")
    (draining,) = await run.logged(WorkerDraining)
    assert (draining.worker_id, draining.reason, draining.cause) == ("decode-0", "drain", "test")
    assert (await run.logged(WorkerDrained))[0].worker_id == "decode-0"
    again = await run.command(DrainWorker(worker_id="decode-0"))
    assert (again.ok, again.message) == (False, "decode-0 drains already")
    other = await run.command(DrainWorker(worker_id="decode-1"))
    assert not other.ok
    assert "it is the only decode worker that takes requests" in other.message
    assert (await run.command(ResumeWorker(worker_id="decode-0", cause="test"))).ok
    assert [event.worker_id for event in await run.logged(WorkerResumed)] == ["decode-0"]
    refused = await run.command(ResumeWorker(worker_id="decode-0"))
    assert (refused.ok, refused.message) == (False, "decode-0 does not drain")
    assert run.events(WorkerExited) == []


async def test_a_restart_drains_stops_and_comes_back_without_counting_as_a_failure(start: Start) -> None:
    run = start(changed(supervisor={"crash_loop_exits": 1, "backoff_first_s": 0.02}))
    await run.up()
    for _ in range(3):
        assert (await run.command(RestartWorker(worker_id="decode-0", cause="test"))).ok
        busy = await run.command(RestartWorker(worker_id="decode-0"))
        assert (busy.ok, busy.message) == (False, "decode-0 is being restarted; wait for its end")
        ready = len(run.events(WorkerReady))
        await run.logged(WorkerReady, ready + 1)
    exits = await run.logged(WorkerExited, 3)
    assert [(e.worker_id, e.cause, e.exit_code, e.signal) for e in exits] == [
        ("decode-0", "restart", 0, 0)
    ] * 3
    assert run.events(WorkerFailed) == []
    assert run.notes().count("knows ['prefill-0', 'decode-0']") >= 3


async def test_a_restart_does_not_wait_longer_than_told(start: Start) -> None:
    run = start(router="busy")  # never says drained
    await run.up()
    assert (await run.command(RestartWorker(worker_id="prefill-0", drain_s=0.05))).ok
    (exited,) = await run.logged(WorkerExited)
    assert (exited.worker_id, exited.cause) == ("prefill-0", "restart")
    await run.logged(WorkerReady, 4)
    assert run.events(WorkerDrained) == []


async def test_a_worker_that_was_given_up_can_be_started_again(start: Start) -> None:
    run = start(
        changed(cluster={"decode": 2}, supervisor={"crash_loop_exits": 1, "heartbeat_timeout_s": 0.8})
    )
    await run.up()
    assert (await run.command(KillWorker(worker_id="decode-1", signal="STOP"))).ok
    (failed,) = await run.logged(WorkerFailed)
    assert failed.worker_id == "decode-1"
    log = run.dir / "logs/router.log"
    await until(lambda: "absent [('decode-1', False)]" in log.read_text(), "the router hears of it")
    assert (await run.command(RestartWorker(worker_id="decode-1"))).ok
    await until(
        lambda: len([e for e in run.events(WorkerReady) if e.worker_id == "decode-1"]) == 2, "its return"
    )


async def test_one_more_worker_and_one_less(start: Start) -> None:
    run = start()
    await run.up()
    assert (await run.command(AddWorker(role="decode", cause="test"))).message == "decode-1 starts"
    await until(lambda: "knows ['prefill-0', 'decode-0', 'decode-1']" in run.notes(), "the new worker listed")
    (added,) = await run.logged(WorkerAdded)
    assert (added.worker_id, added.role, added.cause) == ("decode-1", "decode", "test")
    assert (await run.command(RemoveWorker(worker_id="decode-0", cause="test"))).ok
    (removed,) = await run.logged(WorkerRemoved)
    assert (removed.worker_id, removed.cause) == ("decode-0", "test")
    (exited,) = run.events(WorkerExited)
    assert (exited.worker_id, exited.cause) == ("decode-0", "stop")
    gone = await run.command(KillWorker(worker_id="decode-0"))
    assert (gone.ok, gone.message) == (
        False,
        "worker 'decode-0' is unknown; allowed: router, prefill-0, decode-1",
    )
    assert (await run.command(AddWorker(role="decode"))).message == "decode-2 starts", (
        "an id names one worker"
    )
    await run.logged(WorkerReady, 5)
    started = [event.worker_id for event in run.events(WorkerStarting)]
    assert started.count("decode-0") == 1


async def test_roles_change_at_run_time_as_long_as_each_has_a_worker(start: Start) -> None:
    run = start(TWO_BY_TWO)
    await run.up()
    assert (await run.command(SetRole(worker_id="prefill-1", role="decode", cause="test"))).ok
    (changed_,) = await run.logged(RoleChanged)
    assert (changed_.worker_id, changed_.from_role, changed_.role) == ("prefill-1", "prefill", "decode")
    worker_log = run.dir / "logs/prefill-1.log"
    await until(
        lambda: "SetRole(worker_id='prefill-1', role='decode'" in worker_log.read_text(), "it was told"
    )
    last = await run.command(SetRole(worker_id="prefill-0", role="decode"))
    assert not last.ok
    assert "it is the only prefill worker that takes requests" in last.message
    assert (await run.command(SetRole(worker_id="prefill-0", role="both"))).ok
    assert (await run.command(SetMode(mode="colocated"))).ok
    assert (await run.command(SetRole(worker_id="prefill-0", role="decode"))).ok
    refused = await run.command(SetMode(mode="disagg"))
    assert (refused.ok, refused.message) == (
        False,
        "mode disagg needs a prefill worker; this cluster has none",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (DrainWorker(worker_id="router"), "worker 'router' is unknown; allowed: prefill-0, decode-0"),
        (RestartWorker(worker_id="x"), "worker 'x' is unknown; allowed: prefill-0, decode-0"),
        (RestartWorker(worker_id="decode-0", drain_s=-1.0), "drain_s is -1; allowed is 0 to 3600"),
        (RemoveWorker(worker_id="decode-0", drain_s=float("nan")), "drain_s is nan; allowed is 0 to 3600"),
        (
            SetRole(worker_id="decode-0", role="router"),
            "role 'router' is unknown; allowed: prefill, decode, both",
        ),
        (SetRole(worker_id="decode-0", role="decode"), "decode-0 has the role decode already"),
        (AddWorker(role=""), "role '' is unknown; allowed: prefill, decode, both"),
        (
            RemoveWorker(worker_id="prefill-0"),
            "prefill-0 cannot leave: it is the only prefill worker that takes requests; add one first, or set mode "
            "colocated",
        ),
    ],
)
async def test_wrong_changes_say_what_is_allowed(start: Start, command: Command, message: str) -> None:
    run = start()
    await run.up()
    done = await run.command(command)
    assert (done.ok, done.message) == (False, message)
    assert run.events(WorkerDraining) == []
