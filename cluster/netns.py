"""A private network for the workers' KV sockets: one namespace each, joined by a bridge, shaped by ``tc``.

    worker 0 [kv0]--veth--[port0]  bridge  [port1]--veth--[kv0] worker 1

Namespaces have no name anywhere: only descriptors hold them. When the processes that hold the descriptors are gone,
even by SIGKILL, the kernel takes namespaces, devices and queues away, so there is nothing to clean up and nothing
that can be left behind.

Each worker has a cable of the asked rate: ``kv0`` shapes what leaves the worker, its bridge port what reaches it. Two
transfers into one worker therefore share its cable, as they would on a switch.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from cluster.process_guard import enter_netns, unshare_netns

MAX_WORKERS: Final = 250
MTU: Final = 9000  # jumbo frames: 0.7 % of the rate goes to headers, not 4 %
_SUBNET: Final = "10.77.0"
_TOOL_TIMEOUT_S: Final = 10.0


class NetnsError(Exception):
    """Namespaces or traffic control cannot be used here; the message says what is missing."""


class LinkShape(msgspec.Struct, frozen=True, kw_only=True):
    """Asked of every worker-to-worker path. Rate 0 = unlimited; delay is one way; loss is a share of packets."""

    bits_per_s: float
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0

    @property
    def needs_netem(self) -> bool:
        return self.delay_ms > 0 or self.jitter_ms > 0 or self.loss > 0


class Fabric:
    """The bridge and the workers' namespaces, held by descriptors. ``close`` (or death) ends all of it."""

    def __init__(self) -> None:
        self._bridge_fd = -1
        self._worker_fds: list[int] = []
        self.has_netem = False

    @classmethod
    def create(cls, num_workers: int) -> "Fabric":
        """Build the network, unshaped. Raises NetnsError with the reason it cannot be."""
        if num_workers > MAX_WORKERS:
            raise NetnsError(f"{num_workers} workers; the netns link holds {MAX_WORKERS}")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NetnsError(f"the command {tool} (iproute2) is not installed")
        fabric = cls()
        try:
            fabric._build(num_workers)
        except NetnsError:
            fabric.close()
            raise
        return fabric

    def namespace_fd(self, slot: int) -> int:
        """The namespace of one worker; pass it to the child, which enters it."""
        return self._worker_fds[slot]

    def address(self, slot: int) -> str:
        return f"{_SUBNET}.{slot + 1}"

    def shape(self, shape: LinkShape) -> None:
        """Give every cable this shape, also while bytes flow. Delay and loss are left out where netem is missing.

        Raises NetnsError when ``tc`` refuses.
        """
        self._shape(range(len(self._worker_fds)), shape)

    def add_worker(self, shape: LinkShape) -> None:
        """One more worker's namespace and cable, in the next slot. Raises NetnsError, and then adds none."""
        slot = len(self._worker_fds)
        if slot >= MAX_WORKERS:
            raise NetnsError(f"the netns link holds {MAX_WORKERS} workers")
        self._worker_fds.append(new_namespace())
        try:
            self._cable([slot])
            self._shape([slot], shape)
        except NetnsError:
            os.close(self._worker_fds.pop())
            raise

    @property
    def num_workers(self) -> int:
        return len(self._worker_fds)

    def _shape(self, slots: Sequence[int], shape: LinkShape) -> None:
        own_end = shape if self.has_netem else LinkShape(bits_per_s=shape.bits_per_s)
        at_port = LinkShape(bits_per_s=shape.bits_per_s)  # a delay is on the way once, not twice
        for slot in slots:
            _run_tool(self._worker_fds[slot], "tc", shaping_commands("kv0", own_end))
        lines = [line for slot in slots for line in shaping_commands(f"port{slot}", at_port)]
        _run_tool(self._bridge_fd, "tc", lines)

    def queues(self, slot: int) -> bytes:
        """``tc -json qdisc show`` of the worker's own end, for checks and the doctor."""
        return _run_tool(self._worker_fds[slot], "tc", [], "-json", "qdisc", "show", "dev", "kv0")

    def port_queues(self, slot: int) -> bytes:
        """The same of the worker's bridge port."""
        return _run_tool(self._bridge_fd, "tc", [], "-json", "qdisc", "show", "dev", f"port{slot}")

    def close(self) -> None:
        """Let go; the kernel removes what no process holds any more."""
        for fd in (self._bridge_fd, *self._worker_fds):
            if fd >= 0:
                os.close(fd)
        self._bridge_fd = -1
        self._worker_fds = []

    def _build(self, num_workers: int) -> None:
        self._bridge_fd = new_namespace()
        for _ in range(num_workers):
            self._worker_fds.append(new_namespace())
        bridge = ["link set lo up", "link add name kvbridge type bridge", "link set kvbridge up"]
        _run_tool(self._bridge_fd, "ip", bridge)
        self._cable(range(num_workers))
        self.has_netem = _can_queue(self._bridge_fd, "netem delay 1ms")
        if not _can_queue(self._bridge_fd, "tbf rate 1gbit burst 128kb latency 50ms"):
            raise NetnsError("this kernel has no tbf queue (module sch_tbf)")

    def _cable(self, slots: Sequence[int]) -> None:
        """Join these workers' namespaces to the bridge."""
        commands = []
        for slot in slots:
            peer = f"name kv0 mtu {MTU} netns /proc/self/fd/{self._worker_fds[slot]}"
            commands.append(f"link add name port{slot} mtu {MTU} type veth peer {peer}")
            commands.append(f"link set port{slot} master kvbridge up")
        _run_tool(self._bridge_fd, "ip", commands, pass_fds=tuple(self._worker_fds))
        for slot in slots:
            own = ["link set lo up", f"addr add {self.address(slot)}/24 dev kv0", "link set kv0 up"]
            _run_tool(self._worker_fds[slot], "ip", own)


def shaping_commands(device: str, shape: LinkShape) -> list[str]:
    """``tc -batch`` lines that give ``device`` this shape, whatever it had.

    Each arrangement of queues has its own handle, so that a change of numbers alone is made in place and loses no
    packet, and a change of arrangement replaces the whole.
    """
    has_rate = shape.bits_per_s > 0
    if not shape.needs_netem:
        queue = f"handle 2: {token_bucket(shape.bits_per_s)}" if has_rate else "handle 1: pfifo limit 1000"
        return [f"qdisc replace dev {device} root {queue}"]
    # The queue must hold a full rate x delay, counted in packets.
    in_flight_bytes = (shape.bits_per_s or 25e9) / 8 * (shape.delay_ms + shape.jitter_ms) / 1e3
    words = [f"netem limit {1000 + int(in_flight_bytes / 1500)}"]
    if shape.delay_ms > 0 or shape.jitter_ms > 0:
        words.append(f"delay {shape.delay_ms:g}ms {shape.jitter_ms:g}ms")
    words.append(f"loss {shape.loss * 100:g}%")
    root = 3 if has_rate else 5
    lines = [f"qdisc replace dev {device} root handle {root}: {' '.join(words)}"]
    if has_rate:
        lines.append(f"qdisc replace dev {device} parent 3:1 handle 4: {token_bucket(shape.bits_per_s)}")
    return lines


def token_bucket(bits_per_s: float) -> str:
    """The tbf words for a rate.

    The burst is 2 ms of the rate, but at least two 64 KiB packets (a smaller one would have every packet cut up in
    software) and at most 4 MiB; the queue holds 50 ms more, as a switch port does.
    """
    burst = min(max(int(bits_per_s / 8 * 0.002), 2 * 65536), 4 * 2**20)
    return f"tbf rate {bits_per_s:.0f}bit burst {burst} latency 50ms"


def new_namespace() -> int:
    """A descriptor of a new network namespace. Raises NetnsError (not root, or no namespaces here)."""
    found: list[int] = []

    def work() -> None:
        unshare_netns()
        found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    try:
        _in_thread(work)
    except PermissionError as error:
        raise NetnsError("network namespaces need root (CAP_SYS_ADMIN)") from error
    except OSError as error:
        raise NetnsError(f"a network namespace cannot be made: {error.strerror}") from error
    return found[0]


def _can_queue(fd: int, kind: str) -> bool:
    try:
        _run_tool(fd, "tc", [f"qdisc add dev lo root {kind}", "qdisc del dev lo root"])
    except NetnsError:
        return False
    return True


def _run_tool(fd: int, tool: str, lines: list[str], *arguments: str, pass_fds: tuple[int, ...] = ()) -> bytes:
    """Run ``ip`` or ``tc`` inside a namespace, with ``lines`` as its batch. Raises NetnsError with its complaint."""
    command = [tool, "-batch", "-"] if lines else [tool, *arguments]
    output: list[bytes] = []

    def work() -> None:
        enter_netns(fd)
        done = subprocess.run(
            command,
            input=("\n".join(lines) + "\n").encode(),
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
            pass_fds=pass_fds,
        )
        if done.returncode != 0:
            complaint = " ".join(done.stderr.decode(errors="replace").split())
            raise NetnsError(f"{tool}: {complaint}")
        output.append(done.stdout)

    try:
        _in_thread(work)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetnsError(f"{tool}: {error}") from error
    return output[0]


def _in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in its own thread: entering a namespace changes a thread for good. Its error is raised here."""
    raised: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except (OSError, NetnsError, subprocess.TimeoutExpired) as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, name="netns")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
