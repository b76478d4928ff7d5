"""``pdconsole bench breakeven`` for real: two clusters, shaped links, transfers of both kinds; and interrupted."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from cluster.events import LinkConfigured, TransferCompleted
from cluster.run_dir import runs_home
from cluster.run_log import EVENTS_FILE, read_events
from tests.e2e.conftest import PDCONSOLE, ROOT, run_pdconsole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pdconsole_home"), pytest.mark.timeout(300)]

SMALL = ("bench", "breakeven", "--model", "synthetic:nano", "--tokens", "64,600")


def test_every_point_is_measured_on_the_link_it_names_and_can_be_found_in_a_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    links = ("--links", "unlimited,200mbit")
    ended = run_pdconsole(*SMALL, *links, "--repeats", "1", "--json", "--out", str(out), timeout_s=280.0)
    assert ended.exit_code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert sorted(path.name for path in out.iterdir()) == [
        f"breakeven.{end}" for end in ("json", "png", "svg", "txt")
    ]
    assert json.loads((out / "breakeven.json").read_text()) == document
    assert list(document["runs"]) == ["bulk", "stream"]
    points = document["transfers"]
    assert [(p["delivery"], p["asked_bits_per_s"], p["codec"], p["tokens"]) for p in points] == [
        (delivery, asked, codec, tokens)
        for delivery in ("bulk", "stream")
        for asked in (2e8, 0.0)
        for codec in ("raw", "int8")
        for tokens in (64, 600)
    ]
    bytes_per_token = document["model"]["kv_bytes_per_token"]
    for delivery, run in document["runs"].items():
        own = [point for point in points if point["delivery"] == delivery]
        events = list(read_events(runs_home() / run / EVENTS_FILE))
        asked = [event.asked_bits_per_s for event in events if isinstance(event, LinkConfigured)]
        assert set(asked) == {1e10, 2e8, 0.0}  # the profile's, then those of the bench
        done = [event for event in events if isinstance(event, TransferCompleted) and event.tokens >= 64]
        kept = done[-len(own) :]  # what came before was the warm-up
        assert [(event.codec, event.tokens, event.wire_bytes, event.exposed_s * 1e3) for event in kept] == [
            (point["codec"], point["tokens"], point["wire_bytes"], point["samples"][0]["left_ms"])
            for point in own
        ]
        assert all(event.skipped_tokens == 0 for event in done), "no prefix cache helps"
        for point in own:
            if point["codec"] == "raw":
                assert point["wire_bytes"] == point["tokens"] * bytes_per_token
            assert point["transfer_ms"]["median"] <= point["samples"][0]["duration_ms"]
    for link in document["links"]:
        assert link["achieved_bits_per_s"] > 0
        assert link["back_bits_per_s"] > 0
        assert link["rtt_ms"] > 0


def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path) -> None:
    """Interrupted while a cluster is up; the fixture looks for what is left."""
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*PDCONSOLE, *SMALL, "--repeats", "1000", "--out", str(tmp_path / "out")],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    try:
        while "link 50.00 Mb/s" not in (tmp_path / "err").read_text():
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
