"""Several forecasts and runs of one split come to medians, and the goal is judged by them."""

import pytest

from cluster.metrics import Slos
from cluster.sim_cluster import simulate
from cluster.sim_validation import Trial, fold_run, split_document
from tests.cluster.histories import handed_off
from tests.cluster.sim_setup import every, plain_costs, sim_spec


def trial(run: str, decode_s: float, gap_s: float) -> Trial:
    events = handed_off("p", 1.0, label="probe")
    for index in range(3):
        events += handed_off(f"r{index}", 10.0 + index, gaps_s=(gap_s,) * 3)
    measured, duration_s = fold_run(events)
    asked = every(1.0, 3, 100, 4)
    forecast, alone = (
        simulate(sim_spec(costs=plain_costs(1e-3, seconds)), asked) for seconds in (decode_s, 0.001)
    )
    return Trial(run, forecast, alone, measured, duration_s, 0.002, "here", f"run of {run}")


def test_probes_are_no_part_of_a_run() -> None:
    log = handed_off("p", 1.0, label="probe") + handed_off("a", 10.0) + handed_off("b", 11.0)
    measured, duration_s = fold_run(log)
    assert measured.finished == 2
    assert duration_s == pytest.approx(1.14)
    assert fold_run([])[1] == 0.0


def test_medians_are_compared() -> None:
    """Forecast 10, 11 and 40 ms, measured 10, 10 and 20."""
    found = split_document(
        [trial("a", 0.010, 0.010), trial("b", 0.040, 0.020), trial("c", 0.011, 0.010)], Slos()
    )
    row = next(row for row in found["rows"] if (row["figure"], row["q"]) == ("itl_ms", "p50"))
    assert row["forecast"] == pytest.approx(11, rel=0.01)
    assert row["measured"] == pytest.approx(10)
    assert sorted(row["measurements"]) == pytest.approx([10, 10, 20])
    assert row["error"] == pytest.approx(0.1, abs=0.01)
    assert row["alone"] == pytest.approx(1, rel=0.01)
    assert row["alone_error"] == pytest.approx(-0.9, abs=0.01)
    assert found["runs"] == ["a", "b", "c"]
    assert found["finished"] == {"forecast": [3, 3, 3], "measured": [3, 3, 3]}


def test_the_goal_is_on_p50_p90_and_goodput() -> None:
    near = split_document([trial("a", 0.011, 0.010)], Slos())
    assert near["goal_met"], near["rows"]
    assert near["worst_error"] == pytest.approx(0.1, abs=0.02)
    assert not split_document([trial("a", 0.012, 0.010)], Slos())["goal_met"]


def test_nothing_measured_is_no_success() -> None:
    first = trial("a", 0.01, 0.01)
    empty = Trial("e", first.forecast, first.alone, fold_run([])[0], 0.0, 0.0, "", "")
    assert split_document([empty], Slos())["worst_error"] is None
    assert not split_document([empty], Slos())["goal_met"]
