"""Every fault that can be injected, in one table: what it hits, how long it lasts, how it heals, the line for a shell.

Drills, the operator's commands and the console's list of actions are made from it. Pure data: nothing here acts.
"""

import difflib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from cluster.control import ChangeLink, Command, InjectLinkFault, KillWorker, RestartWorker

PROCESS: Final = "process"
WORKER: Final = "worker"
LINK: Final = "link"
CLIENT: Final = "client"

ARMED_S: Final = 30.0
"""A fault of the next frame that finds no frame for so long is forgotten."""


class UnknownFault(ValueError):
    """No fault has this name; the message is one line for the user, with the nearest valid name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault as asked for. ``target`` is a worker's id, ``router``, or "" for the link of all workers.

    ``seconds`` 0: as long as the kind lasts by itself. ``bits_per_s`` and ``delay_ms`` are of a slow link.
    """

    kind: str
    target: str = ""
    seconds: float = 0.0
    bits_per_s: float = 0.0
    delay_ms: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """``hits``: process (a worker or the router), worker (itself, or the KV that it sends), link (all of them), client.

    ``needs_seconds``: it would not end without. ``command`` None: it happens at the client, outside the cluster.
    ``shell`` is the same thing by hand, given the pid of the process; None: it goes through the operator's port.
    """

    name: str
    hits: str
    what: str
    heals: str
    command: Callable[[Fault], Command] | None
    shell: Callable[[Fault, int], str] | None = None
    takes_seconds: bool = False
    needs_seconds: bool = False


def _signals(name: str) -> Callable[[Fault], Command]:
    return lambda fault: KillWorker(
        worker_id=fault.target, signal=name, seconds=fault.seconds, cause=fault.cause
    )


def _hurts_link(kind: str) -> Callable[[Fault], Command]:
    return lambda fault: InjectLinkFault(
        worker_id=fault.target, kind=kind, seconds=fault.seconds, cause=fault.cause
    )


def _slows(fault: Fault) -> Command:
    return ChangeLink(
        bits_per_s=fault.bits_per_s, delay_ms=fault.delay_ms, seconds=fault.seconds, cause=fault.cause
    )


def _restarts(fault: Fault) -> Command:
    if fault.seconds:
        return RestartWorker(worker_id=fault.target, drain_s=fault.seconds, cause=fault.cause)
    return RestartWorker(worker_id=fault.target, cause=fault.cause)


def _stop_line(fault: Fault, pid: int) -> str:
    later = f"; sleep {fault.seconds:g}; kill -CONT {pid}" if fault.seconds else ""
    return f"kill -STOP {pid}{later}"


FAULT_KINDS: Final = (
    FaultKind(
        "kill", PROCESS, "SIGKILL: the process is gone at once", "the supervisor starts it again",
        _signals("KILL"), lambda fault, pid: f"kill -KILL {pid}",
    ),
    FaultKind(
        "terminate", PROCESS, "SIGTERM: the process ends", "the supervisor starts it again",
        _signals("TERM"), lambda fault, pid: f"kill -TERM {pid}",
    ),
    FaultKind(
        "hang", PROCESS, "SIGSTOP: the process lives and answers nothing",
        "SIGCONT after the time given, or SIGKILL and a new start after supervisor.heartbeat_timeout_s",
        _signals("STOP"), _stop_line, takes_seconds=True,
    ),
    FaultKind(
        "resume", PROCESS, "SIGCONT: a hanging process goes on", "nothing to heal",
        _signals("CONT"), lambda fault, pid: f"kill -CONT {pid}",
    ),
    FaultKind(
        "corrupt", WORKER, "one bit of the next KV frame that the worker sends is flipped on the wire; with a time, "
        "one of every frame", "with that frame, or after the time given", _hurts_link("corrupt"), takes_seconds=True,
    ),
    FaultKind(
        "cut", WORKER, "the worker's KV connection breaks in the middle of its next frame; with a time, of every frame",
        "the next transfer connects anew, or after the time given", _hurts_link("cut"), takes_seconds=True,
    ),
    FaultKind(
        "stall", WORKER, "the worker sends no KV for a time, from the middle of its next frame on",
        "after the time given", _hurts_link("stall"), takes_seconds=True, needs_seconds=True,
    ),
    FaultKind(
        "slow", LINK, "every link gets another rate and delay", "the shape of before, after the time given",
        _slows, takes_seconds=True, needs_seconds=True,
    ),
    FaultKind(
        "restart", WORKER, "the worker takes nothing new, finishes what it has, stops, and starts anew",
        "by itself; what is not finished in the time given goes on elsewhere", _restarts, takes_seconds=True,
    ),
    FaultKind("leave", CLIENT, "the client closes its connection", "nothing to heal", None),
)  # fmt: skip
"""Whatever is broken has a target and an end."""

_BY_NAME: Final = {kind.name: kind for kind in FAULT_KINDS}


def find_fault(name: str) -> FaultKind:
    """Raises UnknownFault."""
    kind = _BY_NAME.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownFault(f"{name!r} is not a fault; allowed: {', '.join(_BY_NAME)}{hint}")
    return kind


def command_of(fault: Fault) -> Command:
    """What to send to the supervisor. Raises UnknownFault, also for a fault that no command does."""
    kind = find_fault(fault.kind)
    if kind.command is None:
        raise UnknownFault(f"{fault.kind!r} happens at the {kind.hits}: the cluster cannot be told to do it")
    return kind.command(fault)


def shell_line(fault: Fault, *, pid: int, url: str, token_path: str) -> str:
    """The exact line that does this by hand: a signal to ``pid``, or the operator's command sent to ``url``.

    Raises UnknownFault as ``command_of``.
    """
    kind = find_fault(fault.kind)
    if kind.shell is not None:
        return kind.shell(fault, pid)
    return operator_line(command_of(fault), url=url, token_path=token_path)


def operator_line(command: Command, *, url: str, token_path: str) -> str:
    """The line that sends an operator's command by hand."""
    body = msgspec.json.encode(command).decode()
    header = f'"Authorization: Bearer $(cat {shlex.quote(token_path)})"'
    return f"curl -H {header} {shlex.quote(url + '/admin/command')} -d {shlex.quote(body)}"
