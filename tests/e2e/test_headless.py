"""``pdconsole up --headless`` from the outside: its output, its exit codes, and what is left when it dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.events import (
    LoadStarted,
    ModelDescribed,
    RequestFinished,
    RunStarted,
    RunStopped,
    WorkerStarting,
)
from tests.e2e.conftest import RunningCluster, processes_of, run_pdconsole, wait_until_none

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]


def test_a_timed_run_prints_one_json_document_that_adds_up(running_cluster: Start) -> None:
    cluster = running_cluster("--profile", "10gbe", "--duration", "4", "--load", "steady", "--json")
    ended = cluster.end()
    assert ended.exit_code == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["schema"] == 1
    assert (summary["profile"], summary["model"], summary["mode"]) == ("10gbe", "synthetic:nano", "disagg")
    assert summary == json.loads((cluster.run_dir / "summary.json").read_text())
    requests = summary["requests"]
    assert requests["finished"] > 0
    assert requests["failed"] == requests["rejected"] == requests["cancelled"] == 0
    streams = sum(isinstance(event, RequestFinished) for event in cluster.events())
    assert requests["finished"] + requests["probes"] == streams
    for latency in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms"):
        assert 0 < summary[latency]["p50"] <= summary[latency]["p99"] <= summary[latency]["max"]
    model = cluster.wait_for(ModelDescribed)
    dtype_bytes = {"float32": 4, "bfloat16": 2}[model.dtype]
    kv = summary["kv"]
    assert kv["tokens"] + kv["skipped_tokens"] == 128 * kv["transfers"]
    assert kv["transfers"] == requests["finished"]
    assert (
        kv["raw_bytes"]
        == 2 * model.num_layers * kv["tokens"] * model.num_kv_heads * model.head_dim * dtype_bytes
    )
    assert kv["wire_bytes"] == kv["raw_bytes"]
    assert {worker["role"] for worker in summary["workers"]} == {"prefill", "decode"}
    assert [worker["held_blocks"] for worker in summary["workers"]] == [0, 0]
    assert cluster.wait_for(RunStopped).orphans == 0
    assert "cluster READY" in ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        (
            "up",
            "--headless",
            "--model",
            "synthetic:nano",
            "--port",
            "0",
            "--duration",
            "1",
            "--load",
            "steady",
        ),
        ("bench", "transport", "--quick", "--no-steps", "--sizes", "1MB", "--rates", "none"),
    ],
    ids=["up", "bench"],
)
def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, pdconsole_home: Path, command: tuple[str, ...]
) -> None:
    """Files there are called as modules are that some process needs: theirs must be found, and these never run."""
    for name in ("html", "random", "torch", "numba", "cluster", "engine"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    script = Path(sys.executable).with_name("pdconsole")
    ran = subprocess.run([script, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "EXITED exit code 1" not in ran.stderr


def test_a_port_in_use_is_told_in_one_line_and_leaves_nothing(
    running_cluster: Start, pdconsole_home: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = running_cluster("--port", str(port), "--quiet", "--json").end()
    assert ended.exit_code == 3
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"pdconsole: error: port {port} on 127.0.0.1 is in use by ")
    assert ended.stderr.count("\n") == 1
    assert processes_of(pdconsole_home) == []


def test_ctrl_c_while_serving_prints_the_summary_and_exits_130(running_cluster: Start) -> None:
    cluster = running_cluster("--load", "steady").wait_ready()
    cluster.wait_for(RequestFinished)
    ended = cluster.end(signal.SIGINT)
    assert ended.exit_code == 130
    assert f"run {cluster.info.run}: ended (interrupted)" in ended.stdout
    assert "0 failed" in ended.stdout
    assert cluster.wait_for(RunStopped).orphans == 0


def test_ctrl_c_while_starting_stops_what_was_started(running_cluster: Start, pdconsole_home: Path) -> None:
    cluster = running_cluster()
    cluster.wait_for(WorkerStarting)
    ended = cluster.end(signal.SIGINT)
    assert ended.exit_code == 130
    assert "Traceback" not in ended.stderr
    assert processes_of(pdconsole_home) == []


def test_kill_9_of_pdconsole_leaves_nothing(running_cluster: Start, pdconsole_home: Path) -> None:
    cluster = running_cluster("--load", "steady").wait_ready()
    cluster.wait_for(LoadStarted)
    assert len(processes_of(pdconsole_home)) >= 5  # pdconsole, supervisor, router, two workers
    assert cluster.end(signal.SIGKILL).exit_code == -signal.SIGKILL
    assert wait_until_none(lambda: processes_of(pdconsole_home), timeout_s=15.0) == []
    stopped = [event for event in cluster.events() if isinstance(event, RunStopped)]
    assert [event.orphans for event in stopped] == [0]  # the supervisor ended the run in order


def test_kill_9_of_the_supervisor_is_told_and_leaves_nothing(
    running_cluster: Start, pdconsole_home: Path
) -> None:
    cluster = running_cluster().wait_ready()
    os.kill(cluster.info.supervisor_pid, signal.SIGKILL)
    ended = cluster.end()
    assert ended.exit_code == 1
    assert "pdconsole: error: the supervisor ended unexpectedly (signal 9)" in ended.stderr
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []


def test_hung_supervisor_is_noticed_and_leaves_nothing(running_cluster: Start, pdconsole_home: Path) -> None:
    cluster = running_cluster().wait_ready()
    os.kill(cluster.info.supervisor_pid, signal.SIGSTOP)
    ended = cluster.end()
    assert ended.exit_code == 1
    assert "did not answer for 5 s and was killed" in ended.stderr
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []


def test_kill_9_of_everything_at_once_leaves_no_worker(running_cluster: Start, pdconsole_home: Path) -> None:
    cluster = running_cluster().wait_ready()
    for pid in (cluster.process.pid, cluster.info.supervisor_pid):
        os.kill(pid, signal.SIGKILL)
    cluster.process.wait(10.0)
    assert wait_until_none(lambda: processes_of(pdconsole_home)) == []


def test_load_drives_a_running_cluster_and_shows_in_its_log(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    steady = run_pdconsole("load", "steady", "--url", cluster.url, "--duration", "1", "--rate", "8", "--json")
    assert steady.exit_code == 0, steady.stderr
    report = json.loads(steady.stdout)
    requests = report["requests"]
    assert requests["sent"] == requests["finished"] > 0
    assert requests["failed"] == requests["cancelled"] == 0
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"]
    assert 0 < report["itl_ms"]["p50"] <= report["e2el_ms"]["max"]
    assert 0 <= report["schedule_lag_ms"]["p99"] < 1000
    burst = run_pdconsole("load", "burst", "--url", cluster.url, "--prompts", "2", "--prompt-tokens", "900")
    assert burst.exit_code == 0, burst.stderr
    assert "2 sent, 2 finished, 0 failed" in burst.stdout
    cluster.wait_for(RequestFinished)
    ended = cluster.end(signal.SIGTERM)
    assert ended.exit_code == 130
    summary = json.loads((cluster.run_dir / "summary.json").read_text())
    assert summary["requests"]["finished"] == requests["sent"] + 2
    assert summary["kv"]["tokens"] == 128 * requests["sent"] + 2 * 900


def test_a_second_cluster_beside_the_first_has_its_own_port(running_cluster: Start) -> None:
    first = running_cluster().wait_ready()
    second = running_cluster("--set", "cluster.pin=false").wait_ready()
    assert second.url != first.url
    assert psutil.pid_exists(first.info.supervisor_pid)
    assert not first.worker_pids & second.worker_pids


def test_the_first_event_of_a_log_anchors_its_clock(running_cluster: Start) -> None:
    cluster = running_cluster()
    started = cluster.wait_for(RunStarted)
    assert started.index == 0
    assert abs(time.time() - started.wall_at - (time.monotonic() - started.at)) < 1.0
