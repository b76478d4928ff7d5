"""With root: real namespaces, real bytes, and nothing left."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from cluster.netns import Fabric, LinkShape, NetnsError, shaping_commands, token_bucket
from cluster.process_guard import enter_netns
from tests.cluster.supervision import namespaces, until_now


def why_not() -> str:
    """Why this host cannot make namespaces; "" = it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Fabric.create(1).close()
    except NetnsError as error:
        return str(error)
    return ""


needs_netns = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def named_things() -> str:
    """Named namespaces, and the devices of the namespace we live in."""
    listed = [
        subprocess.run(["ip", *what], capture_output=True, text=True).stdout
        for what in (["netns", "list"], ["-br", "link"])
    ]
    return "\n".join(listed)


def in_namespace(fd: int, work):  # type: ignore[no-untyped-def]
    """Run ``work`` in a forked child inside the namespace; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        enter_netns(fd)
        work()
        code = 0
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_rate_alone_is_one_token_bucket() -> None:
    assert shaping_commands("kv0", LinkShape(bits_per_s=1e9)) == [
        "qdisc replace dev kv0 root handle 2: tbf rate 1000000000bit burst 250000 latency 50ms"
    ]


def test_unlimited_is_a_plain_queue() -> None:
    assert shaping_commands("kv0", LinkShape(bits_per_s=0)) == [
        "qdisc replace dev kv0 root handle 1: pfifo limit 1000"
    ]


def test_delay_and_loss_go_through_netem_with_room_for_what_is_on_the_way() -> None:
    shape = LinkShape(bits_per_s=2e8, delay_ms=20, jitter_ms=2, loss=0.01)
    assert shaping_commands("kv0", shape) == [
        "qdisc replace dev kv0 root handle 3: netem limit 1366 delay 20ms 2ms loss 1%",
        "qdisc replace dev kv0 parent 3:1 handle 4: tbf rate 200000000bit burst 131072 latency 50ms",
    ]


@pytest.mark.parametrize(("rate", "burst"), [(1e6, 131072), (1e9, 250000), (1e10, 2500000), (1e12, 4194304)])
def test_burst_follows_the_rate_within_bounds(rate: float, burst: int) -> None:
    assert f" burst {burst} " in token_bucket(rate)


def test_too_many_workers_is_a_clear_error() -> None:
    with pytest.raises(NetnsError, match="251 workers; the netns link holds 250"):
        Fabric.create(251)


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NetnsError, match=r"the command tc \(iproute2\) is not installed"):
        Fabric.create(1)


@needs_netns
def test_workers_reach_each_other_through_shaped_cables_only() -> None:
    fabric = Fabric.create(2)
    try:
        fabric.shape(LinkShape(bits_per_s=1e9))
        for queues in (fabric.queues(0), fabric.queues(1), fabric.port_queues(0), fabric.port_queues(1)):
            (root,) = json.loads(queues)
            assert (root["kind"], root["root"], root["options"]["rate"]) == ("tbf", True, 125_000_000)
        address = fabric.address(1)
        ready_read, ready_write = os.pipe()
        sent = os.urandom(300_000)

        def receive() -> None:
            with socket.create_server((address, 0)) as server:
                os.write(ready_write, b"%d\n" % server.getsockname()[1])
                connection, peer = server.accept()
                with connection, connection.makefile("rb") as stream:
                    assert peer[0] == fabric.address(0)
                    assert stream.read() == sent

        receiver = in_namespace(fabric.namespace_fd(1), receive)
        with os.fdopen(ready_read) as ready:
            port = int(ready.readline())

        def send() -> None:
            with socket.create_connection((address, port), timeout=20) as connection:
                connection.sendall(sent)

        assert exit_code(in_namespace(fabric.namespace_fd(0), send)) == 0
        assert exit_code(receiver) == 0
        os.close(ready_write)
        with pytest.raises(OSError, match=r"timed out|unreachable|refused"):
            socket.create_connection((address, port), timeout=0.3)  # not from our own namespace
    finally:
        fabric.close()


@needs_netns
@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10, 0.0, 25e9])
def test_hot_change_takes_effect_at_both_ends(rate: float) -> None:
    fabric = Fabric.create(1)
    try:
        fabric.shape(LinkShape(bits_per_s=5e8))
        fabric.shape(LinkShape(bits_per_s=rate))
        for queues in (fabric.queues(0), fabric.port_queues(0)):
            (root,) = json.loads(queues)
            assert root["kind"] == ("tbf" if rate else "pfifo")
            if rate:
                assert root["options"]["rate"] == int(rate / 8)
    finally:
        fabric.close()


@needs_netns
def test_delay_uses_netem_only_where_the_kernel_has_it() -> None:
    fabric = Fabric.create(1)
    try:
        fabric.shape(LinkShape(bits_per_s=1e9, delay_ms=5))
        kinds = {queue["kind"] for queue in json.loads(fabric.queues(0))}
        assert kinds == ({"netem", "tbf"} if fabric.has_netem else {"tbf"})
        fabric.shape(LinkShape(bits_per_s=0, delay_ms=5))
        kinds = {queue["kind"] for queue in json.loads(fabric.queues(0))}
        assert kinds == ({"netem"} if fabric.has_netem else {"pfifo"})
    finally:
        fabric.close()


class Sink:
    """A process in a worker's namespace that takes ``num_streams`` streams at once, each to its end."""

    def __init__(self, fabric: Fabric, slot: int, num_streams: int) -> None:
        ready, ready_write = os.pipe()

        def receive() -> None:
            with socket.create_server((fabric.address(slot), 0)) as server:
                os.write(ready_write, b"%d\n" % server.getsockname()[1])
                connections = [server.accept()[0] for _ in range(num_streams)]
                for connection in connections:
                    connection.setblocking(False)
                while connections:
                    for connection in select.select(connections, [], [], 20.0)[0]:
                        if not connection.recv(1 << 20):
                            connection.close()
                            connections.remove(connection)

        self._pid = in_namespace(fabric.namespace_fd(slot), receive)
        os.close(ready_write)
        with os.fdopen(ready) as lines:
            self.address = (fabric.address(slot), int(lines.readline()))

    def wait(self) -> None:
        assert exit_code(self._pid) == 0


class Source:
    """A process in a worker's namespace that connects, says so, and sends ``num_bytes`` once it is told to."""

    def __init__(self, fabric: Fabric, slot: int, address: tuple[str, int], num_bytes: int) -> None:
        up, up_write = os.pipe()
        go, self._go = os.pipe()

        def send() -> None:
            with socket.create_connection(address, timeout=20) as connection:
                os.write(up_write, b"1")
                os.read(go, 1)
                connection.sendall(bytes(num_bytes))

        self._pid = in_namespace(fabric.namespace_fd(slot), send)
        assert os.read(up, 1) == b"1"
        for fd in (up, up_write, go):
            os.close(fd)

    def start(self) -> None:
        os.write(self._go, b"1")
        os.close(self._go)

    def wait(self) -> None:
        assert exit_code(self._pid) == 0


SLOW_BITS_PER_S = 5e7
SENT_BYTES = 1_500_000
UNSHAPED_BYTES = 2 * (2 * 65536)
"""What two full token buckets let through at once, whatever the rate."""


@needs_netns
@pytest.mark.parametrize(("sources", "sinks"), [((0, 1), (2, 2)), ((0, 0), (1, 2))])
def test_two_transfers_at_once_share_the_cable_of_the_worker_they_have_in_common(
    sources: tuple[int, int], sinks: tuple[int, int]
) -> None:
    """Into one worker, or out of one: together they take as long as all of their bytes on one cable, at least."""
    fabric = Fabric.create(3)
    try:
        fabric.shape(LinkShape(bits_per_s=SLOW_BITS_PER_S))
        targets = {slot: Sink(fabric, slot, sinks.count(slot)) for slot in set(sinks)}
        transfers = [
            Source(fabric, source, targets[sink].address, SENT_BYTES)
            for source, sink in zip(sources, sinks, strict=True)
        ]
        began_at = time.monotonic()
        for transfer in transfers:
            transfer.start()
        for ended in (*transfers, *targets.values()):
            ended.wait()
        took_s = time.monotonic() - began_at
    finally:
        fabric.close()
    assert took_s >= (2 * SENT_BYTES - UNSHAPED_BYTES) * 8 / SLOW_BITS_PER_S
    assert took_s > SENT_BYTES * 8 / SLOW_BITS_PER_S, "or each could have had a cable of its own"


@needs_netns
def test_a_hot_change_holds_for_connections_that_are_up() -> None:
    fabric = Fabric.create(2)
    try:
        fabric.shape(LinkShape(bits_per_s=1e10))
        sink = Sink(fabric, 1, 1)
        source = Source(fabric, 0, sink.address, SENT_BYTES)
        fabric.shape(LinkShape(bits_per_s=SLOW_BITS_PER_S))
        began_at = time.monotonic()
        source.start()
        source.wait()
        sink.wait()
        took_s = time.monotonic() - began_at
    finally:
        fabric.close()
    assert took_s >= (SENT_BYTES - UNSHAPED_BYTES) * 8 / SLOW_BITS_PER_S


@needs_netns
def test_closed_fabric_leaves_nothing() -> None:
    things = named_things()
    fabric = Fabric.create(3)
    inodes = {os.fstat(fabric.namespace_fd(slot)).st_ino for slot in range(3)}
    assert len(inodes) == 3
    assert inodes <= namespaces()
    assert named_things() == things, "nothing of it is visible outside"
    fabric.close()
    assert not inodes & namespaces()
    assert named_things() == things


HOLDER = """
import os, sys, time
from cluster.netns import Fabric, LinkShape
from cluster.process_guard import enter_netns
fabric = Fabric.create(2)
fabric.shape(LinkShape(bits_per_s=1e9))
worker = os.fork()
enter_netns(fabric.namespace_fd(0 if worker else 1))
os.write(1, b"%d %d\\n" % (os.getpid(), os.stat("/proc/thread-self/ns/net").st_ino))  # one piece: two processes write
time.sleep(600)
"""


@needs_netns
def test_sigkill_of_everything_leaves_nothing() -> None:
    things = named_things()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder:
        lines = [holder.stdout.readline().split() for _ in range(2)]
        held = namespaces()
        for line in lines:
            os.kill(int(line[0]), signal.SIGKILL)
        holder.wait()
    inodes = {int(inode) for _, inode in lines}
    assert len(inodes) == 2
    assert inodes <= held
    until_now(lambda: not inodes & namespaces(), "the namespaces' end")
    assert named_things() == things
