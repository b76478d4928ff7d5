"""``pdconsole bench interference`` for real: one cluster an arm, and what its log holds again; and interrupted."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from cluster.events import FirstToken, RequestArrived, RequestDispatched, TransferCompleted
from cluster.run_dir import runs_home
from cluster.run_log import EVENTS_FILE, read_events
from tests.e2e.conftest import PDCONSOLE, ROOT, run_pdconsole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pdconsole_home"), pytest.mark.timeout(300)]

SMALL = (
    "bench", "interference", "--model", "synthetic:nano", "--quick", "--handoffs", "always", "--seconds", "0.4",
    "--burst-tokens", "600", "--set", "load.mixed.burst_every_s=0.2", "--set", "load.mixed.max_tokens=40",
)  # fmt: skip


def test_each_arm_serves_its_way_and_its_figures_can_be_found_in_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run_pdconsole(*SMALL, "--json", "--out", str(out), timeout_s=280.0)
    assert ended.exit_code in (0, 1), ended.stderr  # 1: this machine was too busy for the load generator
    document = json.loads(ended.stdout)
    assert sorted(path.name for path in out.iterdir()) == [
        f"interference.{end}" for end in ("json", "png", "svg", "txt")
    ]
    assert json.loads((out / "interference.json").read_text()) == document
    assert [arm["max_num_batched_tokens"] for arm in document["arms"]] == [2 * 600 + 4 * 65, 512, 512]
    assert (ended.exit_code == 0) == all(arm["valid"] for arm in document["arms"])
    for arm in document["arms"]:
        (figures,) = arm["rounds"]
        assert figures["bursts"]["bursts"] >= 2, "the phase lasts until the burst is answered"
        assert figures["bursts"]["failed"] == {}
        assert figures["alone"]["stream_tokens_per_s"] > 0
        assert figures["alone"]["burst_seconds"] == 0
        assert 0 < figures["bursts"]["burst_seconds"] < figures["bursts"]["seconds"]
        events = list(read_events(runs_home() / figures["run"] / EVENTS_FILE))
        bursts = {e.request_id for e in events if isinstance(e, RequestArrived) and e.label == "burst"}
        ttfts = [e.ttft_ms for e in events if isinstance(e, FirstToken) and e.request_id in bursts]
        kept = ttfts[2:]  # those of before were the warm-up
        assert figures["bursts"]["prompt_ttft_ms"]["count"] == len(kept)
        assert figures["bursts"]["prompt_ttft_ms"]["max"] == max(kept)
        modes = {e.mode for e in events if isinstance(e, RequestDispatched) and e.request_id in bursts}
        assert modes == {arm["mode"]}
        moved = [e for e in events if isinstance(e, TransferCompleted) and e.request_id in bursts]
        assert bool(moved) == (arm["mode"] == "disagg")
        assert bool(figures["bursts"]["kv"]["wire_bytes"]) == (arm["mode"] == "disagg")


def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path) -> None:
    """Interrupted while a cluster serves; the fixture looks for what is left."""
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*PDCONSOLE, *SMALL, "--seconds", "100", "--out", str(tmp_path / "out")],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    try:
        while not any(
            "bench interference" in log.read_text() for log in runs_home().glob(f"*/{EVENTS_FILE}")
        ):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stdout == ""
    assert list((tmp_path / "out").iterdir()) == []
