"""The table of faults: what each sends to the supervisor, and the same by hand."""

import shlex

import msgspec
import pytest

from cluster.control import ChangeLink, Command, InjectLinkFault, KillWorker, RestartWorker
from cluster.fault_injection import LINK_FAULTS, SIGNALS
from cluster.fault_kinds import (
    CLIENT,
    FAULT_KINDS,
    Fault,
    FaultKind,
    UnknownFault,
    command_of,
    find_fault,
    shell_line,
)

BY_COMMAND = [kind for kind in FAULT_KINDS if kind.hits != CLIENT]


def by_hand(fault: Fault) -> str:
    return shell_line(fault, pid=42, url="http://127.0.0.1:1", token_path="/run dir/token")


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        (Fault("kill", "decode-0", cause="c"), KillWorker(worker_id="decode-0", signal="KILL", cause="c")),
        (Fault("hang", "router", 1.5), KillWorker(worker_id="router", signal="STOP", seconds=1.5)),
        (Fault("cut", "prefill-1", 2.0), InjectLinkFault(worker_id="prefill-1", kind="cut", seconds=2.0)),
        (Fault("slow", "link", 3.0, 1e6, 5.0), ChangeLink(bits_per_s=1e6, delay_ms=5.0, seconds=3.0)),
        (Fault("restart", "decode-0"), RestartWorker(worker_id="decode-0")),
        (Fault("restart", "decode-0", 7.0), RestartWorker(worker_id="decode-0", drain_s=7.0)),
    ],
)
def test_a_fault_is_a_command(fault: Fault, command: Command) -> None:
    assert command_of(fault) == command


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Fault("kill", "decode-0"), "kill -KILL 42"),
        (Fault("terminate", "decode-0"), "kill -TERM 42"),
        (Fault("resume", "decode-0"), "kill -CONT 42"),
        (Fault("hang", "decode-0"), "kill -STOP 42"),
        (Fault("hang", "decode-0", 0.5), "kill -STOP 42; sleep 0.5; kill -CONT 42"),
    ],
)
def test_a_signal_by_hand_is_kill(fault: Fault, line: str) -> None:
    assert by_hand(fault) == line


@pytest.mark.parametrize(
    "kind", [kind for kind in BY_COMMAND if kind.shell is None], ids=lambda kind: kind.name
)
def test_everything_else_by_hand_is_the_operators_command(kind: FaultKind) -> None:
    fault = Fault(kind.name, "prefill-0", 1.0, 1e6)
    program, *arguments = shlex.split(by_hand(fault))
    assert program == "curl"
    assert arguments[:3] == [
        "-H",
        "Authorization: Bearer $(cat '/run dir/token')",
        "http://127.0.0.1:1/admin/command",
    ]
    assert msgspec.json.decode(arguments[4], type=Command) == command_of(fault)


def test_every_fault_says_what_it_does_and_how_it_heals() -> None:
    assert len({kind.name for kind in FAULT_KINDS}) == len(FAULT_KINDS)
    for kind in FAULT_KINDS:
        assert kind.what
        assert kind.heals
        assert kind.takes_seconds or not kind.needs_seconds


def test_the_table_has_every_fault_that_can_be_injected() -> None:
    assert {*SIGNALS.values(), *LINK_FAULTS, "slow", "restart", "leave"} == {
        kind.name for kind in FAULT_KINDS
    }


def test_an_unknown_fault_names_the_nearest() -> None:
    with pytest.raises(
        UnknownFault, match=r"'corupt' is not a fault; allowed: kill, .*; did you mean corrupt\?"
    ):
        find_fault("corupt")


def test_no_command_makes_a_client_leave() -> None:
    with pytest.raises(UnknownFault, match="'leave' happens at the client"):
        command_of(Fault("leave"))
