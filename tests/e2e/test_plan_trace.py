"""``pdconsole plan --trace --validate`` for real: the same requests simulated and through one cluster."""

import json
from pathlib import Path

import pytest

from cluster.events import RequestFinished
from cluster.run_dir import runs_home
from cluster.run_log import EVENTS_FILE, read_events
from tests.console.test_plan_trace import ENGINE
from tests.e2e.conftest import run_pdconsole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pdconsole_home"), pytest.mark.timeout(200)]


def test_a_forecast_is_shown_beside_what_a_real_run_measured(tmp_path: Path) -> None:
    engine, trace = tmp_path / "engine.json", tmp_path / "trace.csv"
    engine.write_text(json.dumps(ENGINE))
    rows = [f"2023-11-16 18:15:0{index // 10}.{index % 10},{100 + 20 * (index % 4)},6" for index in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    ended = run_pdconsole(
        "plan", "--trace", str(trace), "--engine", str(engine), "--validate", "1:1", "--json", timeout_s=180.0
    )
    document = json.loads(ended.stdout)
    assert ended.exit_code == (0 if document["goal_met"] else 1), ended.stderr
    assert document["finished"] == {"forecast": 30, "measured": 30}
    rows_by_name = {(row["figure"], row["q"]): row for row in document["rows"]}
    assert set(rows_by_name) == {(f, q) for f in ("ttft_ms", "itl_ms") for q in ("p50", "p90", "p99")} | {
        ("goodput_per_s", "")
    }
    assert all(row["error"] == row["forecast"] / row["measured"] - 1 for row in document["rows"])
    log = read_events(runs_home() / document["run"] / EVENTS_FILE)
    asked = sorted(event.output_tokens for event in log if isinstance(event, RequestFinished))
    assert asked.count(6) == 30
