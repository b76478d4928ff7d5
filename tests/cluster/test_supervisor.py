"""A supervisor over real processes: small children first, then the real router and workers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.control import (
    AddNote,
    AnyMessage,
    ChangeLink,
    Command,
    KillWorker,
    SetCodec,
    SetLoad,
    SetMode,
    StartFailed,
    StopCluster,
    SupervisorSpec,
    SupervisorStopped,
    SupervisorUp,
)
from cluster.events import (
    CodecChanged,
    FaultInjected,
    LinkConfigured,
    LinkProbed,
    LinkTuned,
    ModeChanged,
    ModelDescribed,
    RunLogResumed,
    RunLogStalled,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    WorkerExited,
    WorkerReady,
    WorkerStarting,
)
from cluster.run_dir import is_alive as run_is_alive
from cluster.run_dir import read_run_info, read_token
from cluster.run_log import read_events
from cluster.supervisor_run import on_signal
from tests.cluster.full_disk import largest_file
from tests.cluster.link_child import PREFILL_TOKENS_PER_S, PROBED_BITS_PER_S
from tests.cluster.supervised_run import PROFILE, Run, changed, make_supervisor
from tests.cluster.supervision import is_alive, namespaces, until, until_now


async def test_whole_life_from_first_to_last_event(start: Callable[..., Run]) -> None:
    run = start()
    url = await run.up()
    info = read_run_info(run.dir)
    assert (info.run, info.url, info.supervisor_pid) == ("a-run", url, os.getpid())
    assert info.profile == PROFILE
    assert len(read_token(run.dir)) > 20
    assert (run.dir / "token").stat().st_mode & 0o777 == 0o600
    assert run_is_alive(run.dir)

    assert (await run.command(StopCluster(reason="enough"))).ok
    assert await run.task == 0
    assert run.told[-1] == SupervisorStopped(orphans=0)
    assert not run_is_alive(run.dir)

    events = run.events()
    assert [event.index for event in events] == list(range(len(events)))
    assert all(event.source for event in events)
    assert isinstance(events[0], RunStarted)
    assert events[-1].__class__ is RunStopped
    assert events[-1].orphans == 0
    assert run.events(RunStopping)[0].reason == "enough"
    assert len(run.events(ModelDescribed)) == 1
    (ready,) = run.events(RunReady)
    assert ready.url == url
    exits = run.events(WorkerExited)
    assert [event.cause for event in exits] == ["stop"] * 3
    assert exits[0].worker_id == "router", "the router stops first"
    assert run.notes().count("goodbye") == 3, "what a child says while it stops is kept"
    summary = json.loads((run.dir / "summary.json").read_text())
    assert (summary["run"], summary["profile"]) == ("a-run", "test")


async def test_router_knows_ready_workers_only_and_at_every_change(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    await until(lambda: "knows ['prefill-0', 'decode-0']" in run.notes(), "both workers listed")
    assert (await run.command(KillWorker(worker_id="prefill-0", cause="test"))).ok
    await until(lambda: "knows ['decode-0']" in run.notes(), "the dead worker delisted")
    await until(lambda: run.notes().count("knows ['prefill-0', 'decode-0']") >= 2, "the new worker listed")
    (fault,) = run.events(FaultInjected)
    assert (fault.fault, fault.target, fault.cause) == ("kill", "prefill-0", "test")
    (exited,) = run.events(WorkerExited)
    assert (exited.worker_id, exited.signal, exited.cause) == ("prefill-0", signal.SIGKILL, "operator")
    ready = [event for event in run.events(WorkerReady) if event.worker_id == "prefill-0"]
    assert len(ready) == 2
    assert ready[1].at - exited.at < 5.0


async def test_links_are_measured_before_ready_and_after_a_change(start: Callable[..., Run]) -> None:
    run = start(changed(cluster={"prefill": 2, "decode": 2}))
    await run.up()
    probed = run.events(LinkProbed)
    there = {(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)}
    ways = [(event.from_worker, event.to_worker) for event in probed]
    assert set(ways[:4]) == there, "first the way that KV goes"
    assert set(ways[4:]) == {(decode, prefill) for prefill, decode in there}
    assert probed[0].index < run.events(RunReady)[0].index
    done = await run.command(ChangeLink(bits_per_s=1e10, delay_ms=2.0, cause="test"))
    assert (done.ok, done.message) == (True, "link 10.00 Gb/s, 2 ms one way")
    await run.logged(LinkProbed, 16)
    last = run.events(LinkConfigured)[-1]
    assert (last.backend, last.asked_bits_per_s, last.asked_delay_ms) == ("pacing", 1e10, 2.0)
    assert "asked 10.00 Gb/s; this host reached 950.00 Mb/s" in last.limit
    assert "SetLink(bits_per_s=10000000000.0, delay_ms=2.0" in (run.dir / "logs/decode-1.log").read_text()


async def test_a_link_gets_its_rho_before_ready_from_the_measured_prefill_rate(
    start: Callable[..., Run],
) -> None:
    run = start(changed(link={"rho": 4.0, "bandwidth": "10gbit", "delay_ms": 3.0}))
    await run.up()
    (tuned,) = run.events(LinkTuned)
    b_star = PREFILL_TOKENS_PER_S * 256  # the children's KV bytes per token
    assert (tuned.target, tuned.target_rho, tuned.limit) == ("", 4.0, "")
    assert tuned.prefill_tokens_per_s == pytest.approx(PREFILL_TOKENS_PER_S)
    assert tuned.b_star_bytes_per_s == pytest.approx(b_star)
    assert tuned.asked_bits_per_s == pytest.approx(4.0 * b_star * 8)
    assert tuned.achieved_bits_per_s == PROBED_BITS_PER_S
    assert tuned.rho == pytest.approx(PROBED_BITS_PER_S / 8 / b_star)
    assert tuned.index < run.events(RunReady)[0].index
    asked = [event.asked_bits_per_s for event in run.events(LinkConfigured)]
    assert (asked[0], asked[-1]) == (1e10, tuned.asked_bits_per_s)
    assert [event.asked_delay_ms for event in run.events(LinkConfigured)] == [3.0] * len(asked)
    told = f"SetLink(bits_per_s={tuned.asked_bits_per_s!r}, delay_ms=3.0"
    for log in [run.dir / f"logs/{process_id}.log" for process_id in ("router", "prefill-0", "decode-0")]:
        await until(lambda log=log: told in log.read_text(), f"the new link in {log.name}")  # type: ignore[misc]
    assert (await run.command(StopCluster())).ok
    assert await run.task == 0
    summary = json.loads((run.dir / "summary.json").read_text())
    assert (summary["target"], summary["target_rho"]) == ("", 4.0)
    assert summary["rho_at_start"] == pytest.approx(tuned.rho, abs=1e-6)


async def test_a_router_that_comes_back_learns_the_link_that_is(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    log = run.dir / "logs/router.log"
    told = "SetLink(bits_per_s=3000000000.0"
    assert (await run.command(ChangeLink(bits_per_s=3e9))).ok
    await until(lambda: log.read_text().count(told) == 1, "told the first router")
    assert (await run.command(KillWorker(worker_id="router"))).ok
    await until(lambda: log.read_text().count(told) == 2, "told both routers")


async def test_a_link_whose_prefill_rate_cannot_be_measured_is_no_start(start: Callable[..., Run]) -> None:
    run = start(changed(link={"rho": 2.0}), router="unmeasured")
    assert await run.task == 3
    (failed,) = run.of(StartFailed)
    assert failed.message == "the link cannot be given its rho: no worker takes it"


async def test_dead_router_comes_back_on_the_same_port(start: Callable[..., Run]) -> None:
    run = start()
    url = await run.up()
    assert (await run.command(SetMode(mode="colocated", cause="test"))).ok
    (first,) = [event for event in run.events(WorkerReady) if event.role == "router"]
    os.kill(first.pid, signal.SIGKILL)
    port = int(url.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=5).close()  # the kernel queues it meanwhile
    await until(lambda: run.notes().count("knows ['prefill-0', 'decode-0']") >= 2, "workers listed again")
    assert read_run_info(run.dir).url == url
    roles = [event.role for event in run.events(WorkerExited)]
    assert roles == ["router"]


async def test_mode_and_codec_reach_the_router_or_the_log(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    assert (await run.command(SetMode(mode="colocated"))).message == "mode colocated"
    assert (await run.command(SetCodec(codec="int8"))).ok
    log = run.dir / "logs/router.log"
    await until(lambda: "SetCodec" in log.read_text(), "the router was told")
    assert "SetMode(mode='colocated'" in log.read_text()
    assert run.events(ModeChanged) == run.events(CodecChanged) == [], "the router itself says when it changed"


async def test_router_that_is_away_begins_with_what_was_set_meanwhile(start: Callable[..., Run]) -> None:
    run = start(changed(supervisor={"backoff_first_s": 1.5}))
    await run.up()
    assert (await run.command(KillWorker(worker_id="router"))).ok
    await run.logged(WorkerExited)
    assert (await run.command(SetCodec(codec="int8", cause="test"))).ok
    assert (await run.command(SetMode(mode="colocated", cause="test"))).ok
    (mode,) = await run.logged(ModeChanged)
    (codec,) = await run.logged(CodecChanged)
    assert (mode.mode, mode.source, codec.codec, codec.cause) == ("colocated", "supervisor", "int8", "test")
    log = run.dir / "logs/router.log"
    await until(lambda: "begins with colocated int8" in log.read_text(), "the new router's beginning")
    done = await run.command(KillWorker(worker_id="router", signal="TERM"))
    assert done.ok


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            KillWorker(worker_id="prefill-9"),
            "worker 'prefill-9' is unknown; allowed: router, prefill-0, decode-0",
        ),
        (
            KillWorker(worker_id="router", signal="HUP"),
            "signal 'HUP' is unknown; allowed: KILL, TERM, STOP, CONT",
        ),
        (SetMode(mode="both"), "mode 'both' is unknown; allowed: disagg, colocated"),
        (SetCodec(codec="zip"), "codec 'zip' is unknown; allowed: raw, int8, lossless, auto"),
        (SetLoad(name="storm"), "load 'storm' is unknown; allowed: steady"),
        (ChangeLink(bits_per_s=-1.0), "link: rate, delay and jitter must be 0 or more"),
    ],
)
async def test_wrong_commands_say_what_is_allowed(
    start: Callable[..., Run], command: Command, message: str
) -> None:
    run = start()
    await run.up()
    done = await run.command(command)
    assert (done.ok, done.message) == (False, message)
    assert run.events(WorkerExited) == []


async def test_command_through_the_router_is_answered_to_the_router(start: Callable[..., Run]) -> None:
    run = start(router="asking")
    await run.up()
    assert (await run.command(SetMode(mode="colocated"))).ok  # makes this router ask
    await until(lambda: "by way of the router" in run.notes(), "the note")
    log = run.dir / "logs/router.log"
    await until(lambda: "CommandDone(command_id=77, ok=True" in log.read_text(), "its answer")


async def test_hung_worker_is_noticed_killed_and_replaced(start: Callable[..., Run]) -> None:
    run = start(changed(supervisor={"heartbeat_timeout_s": 0.8}))
    await run.up()
    assert (await run.command(KillWorker(worker_id="decode-0", signal="STOP"))).ok
    (exited,) = await run.logged(WorkerExited)
    assert (exited.worker_id, exited.cause) == ("decode-0", "hang")
    await until(lambda: run.notes().count("knows ['prefill-0', 'decode-0']") >= 2, "the new worker listed")
    assert [event.fault for event in run.events(FaultInjected)] == ["hang"]


async def test_a_worker_whose_engine_does_not_end_a_step_is_killed_as_hung(start: Callable[..., Run]) -> None:
    run = start(worker="stuck")
    exited = (await run.logged(WorkerExited))[0]
    assert (exited.worker_id, exited.signal, exited.cause) == ("decode-0", signal.SIGKILL, "hang")


async def test_a_full_disk_stops_nothing_and_loses_no_event(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()
    await run.up()
    said = ""

    def is_stalled() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "events.jsonl cannot be written: File too large" in said

    with largest_file((run.dir / "events.jsonl").stat().st_size):
        for number in range(3):
            assert (await run.command(AddNote(text=f"note {number}"))).ok
        await until(is_stalled, "the stall")
        assert (await run.command(AddNote(text="last"))).ok
        assert "last" not in run.notes()
    (resumed,) = await run.logged(RunLogResumed)
    (stalled,) = run.events(RunLogStalled)
    assert stalled.reason == "File too large"
    assert 0 < resumed.after_s <= resumed.at - stalled.at + 1e-6
    assert [t for t in run.notes() if t.startswith(("note", "last"))] == [
        "note 0",
        "note 1",
        "note 2",
        "last",
    ]
    assert [event.index for event in run.events()] == list(range(len(run.events())))


async def test_a_log_that_stays_incomplete_is_said_at_the_end(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    with largest_file(100):
        assert (await run.command(StopCluster())).ok
        assert await run.task == 0
    (stopped,) = run.of(SupervisorStopped)
    assert re.search(
        r"events\.jsonl lacks its last \d+ bytes: File too large; no summary of ", stopped.problem
    )
    assert stopped.orphans == 0


async def test_port_in_use_refuses_before_any_process(start: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start(changed(router={"port": port}))
        assert await run.task == 3
    (failed,) = run.of(StartFailed)
    assert failed.exit_code == 3
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()}" in failed.message
    assert "--port 0" in failed.message
    assert run.events(WorkerStarting) == []
    assert (run.dir / "summary.json").exists()


@pytest.mark.parametrize(
    ("sections", "exit_code", "words"),
    [
        ({"engine": {"kv_cache": "90TiB"}}, 3, "2 workers take up to 184320."),
        (
            {"cluster": {"cores_per_worker": 4000}},
            2,
            "cluster.cores_per_worker is 4000: 2 workers need 8000 cores",
        ),
    ],
)
async def test_what_the_machine_has_not_is_refused_before_any_process(
    start: Callable[..., Run], sections: dict[str, Any], exit_code: int, words: str
) -> None:
    run = start(changed(**sections))
    assert await run.task == exit_code
    (failed,) = run.of(StartFailed)
    assert failed.message.startswith(words)
    assert "\n" not in failed.message
    assert run.events(WorkerStarting) == []


async def test_an_auto_pool_has_one_size_for_the_whole_run(start: Callable[..., Run]) -> None:
    run = start(changed(engine={"kv_cache": "auto"}))
    await run.up()
    written = read_run_info(run.dir).profile.engine.kv_cache
    assert re.fullmatch(r"[1-9]\d*B", written)


async def test_second_supervisor_in_one_run_directory_is_refused(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    events = len(run.events(RunStarted))
    told: list[AnyMessage] = []
    spec = SupervisorSpec(run="other", run_dir=str(run.dir), profile=PROFILE)
    assert await make_supervisor(spec, told).run() == 3
    assert isinstance(told[0], StartFailed)
    assert "is in use by a running cluster" in told[0].message
    assert len(run.events(RunStarted)) == events, "and it wrote nothing there"


async def test_workers_that_differ_refuse_to_start(start: Callable[..., Run]) -> None:
    run = start(worker="mismatch")
    assert await run.task == 2
    (failed,) = run.of(StartFailed)
    assert failed.exit_code == 2
    assert failed.message.startswith("workers differ in model fingerprint: ")
    assert "decode-0 has of decode" in failed.message
    assert "prefill-0 has of prefill" in failed.message
    assert run.of(SupervisorUp) == []
    assert "mismatch" in {event.cause for event in run.events(WorkerExited)}


async def test_refusing_worker_refuses_the_cluster_in_its_own_words(start: Callable[..., Run]) -> None:
    run = start(worker="refuse")
    assert await run.task == 2
    assert run.of(StartFailed) == [StartFailed(message="model 'none' is unknown; allowed: some", exit_code=2)]


async def test_workers_that_crash_at_start_refuse_the_cluster(start: Callable[..., Run]) -> None:
    run = start(changed(supervisor={"crash_loop_exits": 2, "backoff_first_s": 0.01}), worker="crash")
    assert await run.task == 3
    (failed,) = run.of(StartFailed)
    assert (
        "does not stay up: crash loop: 2 exits within 30 s, the last by exit code 7; see " in failed.message
    )


async def test_unknown_load_is_refused_at_once(start: Callable[..., Run]) -> None:
    run = start(load="storm")
    assert await run.task == 2
    assert run.of(StartFailed)[0].message == "load 'storm' is unknown; allowed: steady"


async def test_stop_while_starting(start: Callable[..., Run]) -> None:
    run = start(worker="guarded")  # never becomes ready
    await run.logged(WorkerStarting, 3)
    run.supervisor.request_stop("changed my mind")
    assert await run.task == 0
    assert run.told == [SupervisorStopped(orphans=0)]
    assert run.events(RunReady) == []


async def test_commands_wait_for_ready(start: Callable[..., Run]) -> None:
    run = start(worker="guarded")
    await run.logged(WorkerStarting, 3)
    done = await run.command(AddNote(text="early"))
    assert (done.ok, done.message) == (False, "the cluster is not ready yet")
    assert (await run.command(StopCluster())).ok
    assert await run.task == 0


async def test_second_signal_waits_for_nobody(start: Callable[..., Run]) -> None:
    run = start(changed(supervisor={"stop_grace_s": 600.0}), worker="deaf")
    await run.up()
    on_signal(run.supervisor, signal.SIGINT)
    await run.logged(RunStopping)
    assert not run.task.done()
    on_signal(run.supervisor, signal.SIGINT)
    assert await run.task == 0
    assert run.events(RunStopping)[0].reason == "SIGINT"
    assert {event.signal for event in run.events(WorkerExited) if event.role != "router"} == {signal.SIGKILL}


PARENT = """
import os, socket, subprocess, sys, time
from cluster.control import SupervisorSpec, encode_message
from tests.cluster.supervised_run import PROFILE, changed
profile = changed(PROFILE, link={"backend": "auto"})
ours, theirs = socket.socketpair()
subprocess.Popen([sys.executable, "-m", "cluster.supervisor_main", "--fd", str(theirs.fileno())],
                 pass_fds=(theirs.fileno(),), start_new_session=True)
theirs.close()
ours.sendall(encode_message(SupervisorSpec(run="a-run", run_dir=sys.argv[1], profile=profile)))
print(ours.makefile("rb").readline().decode(), end="", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("supervisor_too", [False, True], ids=["console", "console and supervisor"])
def test_real_cluster_leaves_nothing_after_sigkill(tmp_path: Path, supervisor_too: bool) -> None:
    """The real router and workers; kill -9 of the process that spawned the supervisor, or of both."""
    (tmp_path / "logs").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent:
        answer = json.loads(parent.stdout.readline())
        events = list(read_events(tmp_path / "events.jsonl"))
        pids = [event.pid for event in events if isinstance(event, WorkerStarting)]
        networks = {int(os.readlink(f"/proc/{pid}/ns/net")[5:-1]) for pid in pids if is_alive(pid)}
        if supervisor_too:
            os.kill(answer["pid"], signal.SIGKILL)
        parent.kill()
    assert answer["msg"] == "supervisor_up"
    assert len(pids) == 3
    until_now(lambda: not any(is_alive(pid) for pid in [*pids, answer["pid"]]), "the end of all processes")
    ours = os.stat("/proc/self/ns/net").st_ino
    (link,) = [event for event in events if isinstance(event, LinkConfigured)][:1]
    assert len(networks - {ours}) == (2 if link.backend == "netns" else 0)
    until_now(lambda: not (networks - {ours}) & namespaces(), "the end of the workers' namespaces")
    assert not run_is_alive(tmp_path)
    if not supervisor_too:  # it saw its parent go, and ended the run in order
        last = list(read_events(tmp_path / "events.jsonl"))[-1]
        assert isinstance(last, RunStopped)
        assert last.orphans == 0
        assert (tmp_path / "summary.json").exists()


@pytest.mark.slow
async def test_real_processes_come_back_and_stop(start: Callable[..., Run]) -> None:
    """Real tokens through the pair; then all three processes are killed at once and all come back, same port."""
    run = start(worker=None, router=None)
    url = await run.up()
    for process_id in ("prefill-0", "decode-0", "router"):
        assert (await run.command(KillWorker(worker_id=process_id))).ok
    await run.logged(WorkerReady, 6)
    assert (await run.command(StopCluster())).ok
    assert await run.task == 0
    assert run.told[-1] == SupervisorStopped(orphans=0)
    exits = run.events(WorkerExited)
    assert [event.cause for event in exits] == ["operator"] * 3 + ["stop"] * 3
    assert read_run_info(run.dir).url == url
