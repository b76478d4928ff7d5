"""``pdconsole plan --trace --validate`` for real: the same requests simulated and through one cluster."""

import json
from pathlib import Path

import pytest

from cluster.events import RequestFinished, RunStarted
from cluster.run_dir import runs_home
from cluster.run_log import EVENTS_FILE, read_events
from tests.console.test_plan_trace import ENGINE
from tests.e2e.conftest import run_pdconsole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pdconsole_home"), pytest.mark.timeout(200)]


def test_forecasts_are_shown_beside_what_real_runs_measured(tmp_path: Path) -> None:
    engine, trace = tmp_path / "engine.json", tmp_path / "trace.csv"
    engine.write_text(json.dumps(ENGINE))
    rows = [f"2023-11-16 18:15:0{index // 10}.{index % 10},{100 + 20 * (index % 4)},6" for index in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    ended = run_pdconsole(
        *("plan", "--trace", str(trace), "--engine", str(engine), "--json"),
        *("--validate", "1:1,0:1", "--rounds", "1"),
        timeout_s=180.0,
    )
    document = json.loads(ended.stdout)
    assert ended.exit_code == (0 if document["goal_met"] else 1), ended.stderr
    assert [split["split"] for split in document["splits"]] == ["1:1", "1 co-located"]
    for split, mode in zip(document["splits"], ("disagg", "colocated"), strict=True):
        assert split["finished"] == {"forecast": [30], "measured": [30]}
        rows_by_name = {(row["figure"], row["q"]): row for row in split["rows"]}
        assert set(rows_by_name) == {(f, q) for f in ("ttft_ms", "itl_ms") for q in ("p50", "p90", "p99")} | {
            ("goodput_per_s", "")
        }
        assert all(row["error"] == row["forecast"] / row["measured"] - 1 for row in split["rows"])
        (run,) = split["runs"]
        log = list(read_events(runs_home() / run / EVENTS_FILE))
        answers = [event.output_tokens for event in log if isinstance(event, RequestFinished)]
        assert answers.count(6) == 30
        (calibration,) = (text.split()[1] for text in split["corrected_by"])
        started = next(
            event
            for event in read_events(runs_home() / calibration / EVENTS_FILE)
            if isinstance(event, RunStarted)
        )
        assert started.mode == mode, "a split is corrected by a run of its own mode"
