"""A run that took another time than simulated corrects the next forecast, by what it took."""

import dataclasses

import pytest

from cluster.events import Event
from cluster.sim_calibration import NothingToLearn, calibrated
from cluster.sim_cluster import simulate
from cluster.sim_machine import SimMachine
from cluster.trace import TraceRequest
from tests.cluster.histories import handed_off
from tests.cluster.sim_setup import plain_costs, sim_spec

TWO_CORES = SimMachine((0, 1))


def test_a_run_without_enough_answers_teaches_nothing() -> None:
    with pytest.raises(NothingToLearn, match="run r answered 1 of 1 requests"):
        calibrated(sim_spec(machine=TWO_CORES), "r", handed_off("a"))


def test_what_a_run_took_is_what_its_requests_then_take_when_simulated() -> None:
    """In the run a prompt of 100 tokens takes 50 ms, its way to the first token 35, the router 4; gaps are of 10, 10
    and 20 ms. The benchmark said 101 ms and 4 ms."""
    events: list[Event] = []
    for index in range(30):
        events += handed_off(f"r{index}", 10.0 + index)
    spec = sim_spec(machine=TWO_CORES, costs=plain_costs(decode_s=0.004))
    learned = calibrated(spec, "r", events)
    assert learned.correction.requests == 30
    assert learned.correction.prefill == pytest.approx(50 / 101, rel=0.01)
    assert learned.correction.step_ms == pytest.approx(40 / 3 - 4, rel=0.05)
    found = simulate(learned.applied(spec), [TraceRequest(float(index), 100, 4) for index in range(30)])
    assert found.ttft_parts_ms["prefill"] == pytest.approx(50, rel=0.01)
    assert found.ttft_parts_ms["transfer"] == pytest.approx(35, rel=0.01)
    assert found.itl_ms["p50"] == pytest.approx(10, rel=0.01)
    assert found.itl_ms["p90"] == pytest.approx(20, rel=0.02), "steps lie about their mean as in the run"


def test_steps_beside_a_busy_core_teach_their_own_excess() -> None:
    """Of each stream's gaps the first three are of 16 ms, while the prefill worker computes the next prompt; then of
    10. The benchmark said 4."""
    events: list[Event] = []
    for index in range(30):
        events += handed_off(f"a{index}", 10.0 + index, gaps_s=(0.016,) * 3 + (0.01,) * 6)
        events += handed_off(f"b{index}", 10.09 + index, gaps_s=(0.01,) * 3)
    spec = sim_spec(machine=TWO_CORES, costs=plain_costs(decode_s=0.004))
    learned = calibrated(spec, "r", events)
    assert learned.correction.full_step_ms == pytest.approx(12, abs=2), (
        "a step at the border is of both kinds"
    )
    assert learned.correction.step_ms == pytest.approx(6, abs=0.5)


def test_a_factor_slows_every_prefill_and_nothing_else() -> None:
    spec = sim_spec()
    slower = dataclasses.replace(spec, costs=spec.costs.with_slower_prefill(2.0))
    request = [TraceRequest(0.0, 1000, 5)]
    before, after = simulate(spec, request), simulate(slower, request)
    assert after.ttft_parts_ms["prefill"] == pytest.approx(2 * before.ttft_parts_ms["prefill"])
    assert after.itl_ms == before.itl_ms
