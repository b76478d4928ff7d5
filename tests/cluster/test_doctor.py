import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.doctor import (
    MISSING,
    OK,
    WARN,
    Check,
    DoctorReport,
    data_dir_check,
    loopback_check,
    machine_checks,
    model_checks,
    port_check,
    run_checks,
    shaping_checks,
    torch_check,
    versions_check,
)
from cluster.http_listener import port_holder
from cluster.machine_probes import (
    ProbeError,
    ProcessLine,
    ask_torch,
    directory_problem,
    find_leftovers,
    loopback_bits_per_s,
    process_table,
)

SUPERVISOR, ROUTER, WORKER = "cluster.supervisor_main", "cluster.router_main", "cluster.worker_main"


def process(pid: int, parent_pid: int, module: str = "") -> ProcessLine:
    return ProcessLine(pid, parent_pid, ("python", "-m", module, "--fd", "3") if module else ("bash",))


def test_process_of_a_cluster_is_known_by_its_module() -> None:
    assert process(5, 1, WORKER).module == WORKER
    assert process(5, 1).module == ""
    assert ProcessLine(5, 1, ("vim", "cluster/worker_main.py")).module == ""


@pytest.mark.parametrize(
    ("table", "live", "leftover_pids"),
    [
        (
            [process(10, 1), process(20, 10, SUPERVISOR), process(30, 20, WORKER), process(31, 20, ROUTER)],
            [],
            [],
        ),
        (
            [process(20, 1, SUPERVISOR), process(30, 20, WORKER)],
            [20],
            [],
        ),  # its console has gone, its run is up
        ([process(20, 1, SUPERVISOR), process(30, 20, WORKER)], [], [20, 30]),
        ([process(30, 1, WORKER), process(31, 1, ROUTER)], [], [30, 31]),
        ([process(9, 1), process(30, 9, WORKER)], [20], [30]),  # adopted by somebody who is no supervisor
        ([process(20, 99, SUPERVISOR)], [], [20]),  # its parent is not there any more
        ([process(1, 0), process(9, 1)], [], []),
        ([process(30, 31, WORKER), process(31, 30, ROUTER)], [], [30, 31]),  # a cycle ends too
    ],
)
def test_leftovers_are_processes_whose_cluster_is_gone(
    table: list[ProcessLine], live: list[int], leftover_pids: list[int]
) -> None:
    assert [line.pid for line in find_leftovers(table, live)] == leftover_pids


def test_process_table_holds_this_process() -> None:
    found = next(line for line in process_table() if line.pid == os.getpid())
    assert found.parent_pid == os.getppid()


def test_orphaned_worker_is_found_and_gone_when_it_ends() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "-m", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        line = next(line for line in process_table() if line.pid == child.pid)
        (check,) = [check for check in run_checks([line]) if check.name == "leftovers"]
        assert (check.status, check.value) == (WARN, f"pid {child.pid} ({WORKER})")
        assert child.stdin is not None
        child.stdin.close()
    assert child.pid not in [line.pid for line in process_table()]


def test_missing_check_means_a_cluster_cannot_run() -> None:
    fine = DoctorReport((Check("a", OK, "x"), Check("b", WARN, "y")))
    broken = DoctorReport((Check("a", OK, "x"), Check("torch", MISSING, "no", "why")))
    assert fine.can_run
    assert not broken.can_run
    assert broken.document() == {
        "can_run": False,
        "missing": ["torch"],
        "checks": [
            {"name": "a", "status": "ok", "value": "x", "detail": ""},
            {"name": "torch", "status": "missing", "value": "no", "detail": "why"},
        ],
    }


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"version": "9.9", "threads": 1, "devices": ["H1"]}\'\n')
    fake.chmod(0o755)
    check = torch_check(lambda: ask_torch(str(fake)))
    assert (check.status, check.value, check.detail) == (OK, "9.9", "GPU: H1")


def test_torch_that_cannot_be_imported_is_missing_with_the_reason(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    check = torch_check(lambda: ask_torch(str(fake)))
    assert check.status == MISSING
    assert check.detail == "ModuleNotFoundError: No module named 'torch'"
    assert torch_check(lambda: ask_torch(str(tmp_path / "nowhere"))).status == MISSING


def test_machine_and_versions_are_told() -> None:
    checks = {check.name: check for check in machine_checks()}
    assert set(checks) == {"cores", "memory", "cpu flags", "dtype auto"}
    assert checks["dtype auto"].value in ("float32", "bfloat16")
    assert "msgspec " in versions_check().detail


def test_shaping_is_tried_and_the_backend_follows_from_it() -> None:
    checks = {check.name: check for check in shaping_checks()}
    expected = (
        "netns" if checks["netns"].value == "yes" else "pacing" if checks["pacing"].value == "yes" else "none"
    )
    assert checks["link backend auto"].value == expected
    assert ("netem" in checks) is (checks["netns"].value == "yes")
    assert MISSING not in {check.status for check in checks.values()}, "a cluster runs without shaping"


def test_loopback_is_measured() -> None:
    assert loopback_bits_per_s(tries=1, seconds=0.02) > 1e6


@pytest.mark.parametrize(
    ("bits_per_s", "status", "named"), [(2e9, WARN, ("10gbe", "25gbe", "100gbe")), (1e12, OK, ())]
)
def test_profiles_beyond_this_machine_are_named(
    bits_per_s: float, status: str, named: tuple[str, ...]
) -> None:
    check = loopback_check(lambda: bits_per_s)
    assert check.status == status
    found = check.detail.rpartition(": ")[2].split(", ") if check.detail else []
    assert set(found) == set(named)


def test_no_loopback_means_no_cluster() -> None:
    def fail() -> float:
        raise ProbeError("no TCP over 127.0.0.1: refused")

    assert loopback_check(fail).status == MISSING


def test_model_without_weights_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))

    def smollm2() -> Check:
        return next(check for check in model_checks() if check.name == "model smollm2-135m")

    assert (smollm2().status, smollm2().value) == (OK, "not here")
    directory = tmp_path / "models" / "smollm2-135m"
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    assert smollm2().value == "incomplete"
    (directory / "model.safetensors").touch()
    assert smollm2().value == str(directory)


def test_held_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check = port_check(port, port_holder)
    assert check.status == WARN
    assert f"{port} is held by pid {os.getpid()}" in check.value
    assert port_check(port, lambda _: "").status == OK


def test_data_directory_must_take_files(tmp_path: Path) -> None:
    assert data_dir_check(tmp_path / "new" / "home").status == OK
    assert list((tmp_path / "new" / "home").iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("x")
    assert data_dir_check(blocked / "home").status == MISSING
    assert "file" in directory_problem(blocked)
