"""Faults by command: told in the log, healed when their time is over, refused where they make no sense."""

import math
from collections.abc import Callable
from pathlib import Path

from cluster.control import ChangeLink, Command, HealFaults, InjectLinkFault, KillWorker
from cluster.events import FaultHealed, FaultInjected, HeartbeatMissed, LinkConfigured
from tests.cluster.supervised_run import Run
from tests.cluster.supervision import until


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_process_that_is_stopped_for_a_time_goes_on(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    done = await run.command(KillWorker(worker_id="decode-0", signal="STOP", seconds=0.2, cause="test"))
    assert done.ok
    pid = int(done.message.rpartition("pid ")[2].rstrip(")"))
    (healed,) = await run.logged(FaultHealed)
    (injected,) = run.events(FaultInjected)
    assert (injected.fault, injected.target, injected.seconds, injected.cause) == (
        "hang",
        "decode-0",
        0.2,
        "test",
    )
    assert (healed.fault, healed.target, healed.after_s) == ("hang", "decode-0", 0.2)
    assert healed.detail == f"SIGCONT to pid {pid}"
    await until(lambda: state_of(pid) != "T", "the process going on")
    assert run.events(HeartbeatMissed) == []


async def test_a_link_fault_reaches_the_worker_and_is_told(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    assert (await run.command(InjectLinkFault(worker_id="prefill-0", kind="cut", seconds=0.1))).ok
    (healed,) = await run.logged(FaultHealed)
    assert (healed.fault, healed.target) == ("cut", "prefill-0")
    log = run.dir / "logs/prefill-0.log"
    await until(
        lambda: "InjectLinkFault(worker_id='prefill-0', kind='cut', seconds=0.1" in log.read_text(),
        "its fault",
    )
    done = await run.command(InjectLinkFault(worker_id="prefill-0", kind="corrupt"))
    assert done.message == "corrupt will hit the next KV frame of prefill-0"
    cut, corrupt = await run.logged(FaultInjected, 2)
    assert (cut.fault, cut.seconds, corrupt.fault, corrupt.seconds) == ("cut", 0.1, "corrupt", 0.0)


async def test_a_slow_link_gets_its_shape_back(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    before = run.events(LinkConfigured)[-1].asked_bits_per_s
    assert (await run.command(ChangeLink(bits_per_s=1e6, seconds=0.2, cause="test"))).ok
    (healed,) = await run.logged(FaultHealed)
    (injected,) = run.events(FaultInjected)
    assert (injected.fault, injected.target, injected.detail) == ("slow", "link", "1.00 Mb/s")
    assert (healed.fault, healed.target, healed.after_s) == ("slow", "link", 0.2)
    await until(lambda: run.events(LinkConfigured)[-1].asked_bits_per_s == before, "the shape of before")


async def test_a_second_slow_link_does_not_make_the_first_one_last(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    before = run.events(LinkConfigured)[-1].asked_bits_per_s
    assert (await run.command(ChangeLink(bits_per_s=1e6, seconds=60.0))).ok
    assert (await run.command(ChangeLink(bits_per_s=2e6, seconds=0.1))).ok
    await run.logged(FaultHealed)
    await until(lambda: run.events(LinkConfigured)[-1].asked_bits_per_s == before, "the shape of before")
    assert (await run.command(ChangeLink(bits_per_s=3e6))).ok  # not a fault: it stays
    assert len(run.events(FaultInjected)) == 2


async def test_all_that_is_broken_is_healed_at_once(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    before = run.events(LinkConfigured)[-1].asked_bits_per_s
    hang = await run.command(KillWorker(worker_id="decode-0", signal="STOP", seconds=60.0))
    pid = int(hang.message.rpartition("pid ")[2].rstrip(")"))
    assert (await run.command(InjectLinkFault(worker_id="prefill-0", kind="stall", seconds=60.0))).ok
    assert (await run.command(ChangeLink(bits_per_s=1e6, seconds=60.0))).ok
    done = await run.command(HealFaults(cause="test"))
    assert done.message == "healed: hang decode-0, stall prefill-0, slow link"
    healed = await run.logged(FaultHealed, 3)
    assert [(one.fault, one.target) for one in healed] == [
        ("hang", "decode-0"),
        ("stall", "prefill-0"),
        ("slow", "link"),
    ]
    assert all(0 < one.after_s < 60 and one.detail.endswith("(test)") for one in healed)
    await until(lambda: state_of(pid) != "T", "the process going on")
    await until(lambda: run.events(LinkConfigured)[-1].asked_bits_per_s == before, "the shape of before")
    log = run.dir / "logs/prefill-0.log"
    await until(lambda: "HealLink()" in log.read_text(), "the worker's word")
    again = await run.command(HealFaults())
    assert again.message == "nothing to heal: no fault that lasts is on"


async def test_what_has_ended_is_not_healed_again(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    assert (await run.command(KillWorker(worker_id="decode-0", signal="STOP"))).ok
    assert (await run.command(KillWorker(worker_id="decode-0", signal="CONT"))).ok
    assert (await run.command(HealFaults())).message == "nothing to heal: no fault that lasts is on"
    assert (await run.command(KillWorker(worker_id="decode-0", signal="STOP"))).ok
    assert (await run.command(HealFaults())).message == "healed: hang decode-0"


REFUSED: tuple[tuple[Command, str], ...] = (
    (
        KillWorker(worker_id="router", signal="KILL", seconds=1.0),
        "signal KILL does not last; allowed with seconds",
    ),
    (KillWorker(worker_id="router", signal="STOP", seconds=-1.0), "seconds is -1; allowed is 0 to 3600"),
    (
        KillWorker(worker_id="router", signal="STOP", seconds=math.nan),
        "seconds is nan; allowed is 0 to 3600",
    ),
    (
        InjectLinkFault(worker_id="prefill-0", kind="bend"),
        "link fault 'bend' is unknown; allowed: corrupt, cut,",
    ),
    (InjectLinkFault(worker_id="prefill-0", kind="stall"), "link fault stall needs seconds above 0"),
    (InjectLinkFault(worker_id="router", kind="cut"), "the router sends no KV; allowed is a worker"),
    (
        InjectLinkFault(worker_id="prefill-7", kind="cut"),
        "worker 'prefill-7' is unknown; allowed: router, prefill",
    ),
    (ChangeLink(bits_per_s=math.inf), "link: rate, delay and jitter must be 0 or more"),
    (ChangeLink(bits_per_s=1.0, seconds=1e9), "seconds is 1e+09; allowed is 0 to 3600"),
)


async def test_a_fault_that_makes_no_sense_is_refused(start: Callable[..., Run]) -> None:
    run = start()
    await run.up()
    for command, message in REFUSED:
        done = await run.command(command)
        assert not done.ok
        assert done.message.startswith(message)
    assert run.events(FaultInjected) == []
