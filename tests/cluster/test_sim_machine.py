"""Simulated workers that share the cores of one machine, against times computed by hand."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.sim_cluster import simulate, simulate_gaps
from cluster.sim_gaps import StepGaps
from cluster.sim_machine import Cores, SimMachine
from cluster.sim_pace import Pace
from cluster.sim_spec import SimOverheads, StepExcess
from cluster.trace import TraceRequest
from tests.cluster.sim_setup import NO_OVERHEADS, every, plain_costs, sim_spec

TWO_CORES = SimMachine((0, 1))


@given(
    st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.01, 4)), min_size=1, max_size=6), st.floats(0, 50)
)
def test_work_is_done_when_its_speeds_say(changes: list[tuple[float, float]], work: float) -> None:
    pace, at = Pace(5.0), 5.0
    for after, speed in changes:
        at += after
        pace.change(at, speed)
    when = pace.time_of(work)
    done, since, speed = 0.0, 5.0, 1.0
    for after, next_speed in changes:
        took = min(after, max(0.0, when - since))
        done, since, speed = done + took * speed, since + after, next_speed
    done += max(0.0, when - since) * speed
    assert done == pytest.approx(work, abs=1e-9)
    assert pace.done_at(at + 1) == pytest.approx(pace.done_at(at) + pace.speed)


def test_workers_share_the_cores_that_the_supervisor_gives_them() -> None:
    cores = Cores(TWO_CORES, ["prefill-0", "prefill-1"], ["decode-0"])
    assert cores.shares(["prefill-0", "decode-0"]) == {"prefill-0": 1.0, "decode-0": 1.0}
    assert cores.shares(["prefill-0", "prefill-1"]) == {"prefill-0": 0.5, "prefill-1": 0.5}
    assert not cores.are_full(["prefill-0", "prefill-1"]), "both on one core"
    assert cores.are_full(["prefill-0", "decode-0"])
    unpinned = Cores(SimMachine((0, 1), pin=False), ["prefill-0"], ["decode-0", "decode-1"])
    everyone = ["prefill-0", "decode-0", "decode-1"]
    assert unpinned.shares(everyone) == dict.fromkeys(everyone, pytest.approx(2 / 3))
    assert unpinned.shares(everyone[:2]) == dict.fromkeys(everyone[:2], 1.0)
    wide = Cores(SimMachine((0, 1, 2, 3), cores_per_worker=2), ["prefill-0"], ["decode-0"])
    assert wide.shares(["prefill-0", "decode-0"]) == {"prefill-0": 1.0, "decode-0": 1.0}
    assert wide.are_full(["prefill-0", "decode-0"])
    assert not wide.are_full(["decode-0"])
    assert cores.are_full(["decode-0", "decode-7"]), "one that was added later may be anywhere"


def test_more_cores_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed is 1 here"):
        simulate(sim_spec(machine=SimMachine((0, 1), cores_per_worker=2)), every(1.0, 1, 10, 1))


def test_two_prefill_workers_of_one_core_take_twice_as_long() -> None:
    """Two prompts of 1.001 s at once; then the second half a second later: 1.502 s and 1.502 s after its arrival."""
    spec = sim_spec(2, 1)
    apart = simulate(spec, every(0.0, 2, 1000, 1))
    together = simulate(dataclasses.replace(spec, machine=TWO_CORES), every(0.0, 2, 1000, 1))
    assert apart.ttft_ms["p50"] == pytest.approx(1001, rel=0.001)
    assert together.ttft_ms["p50"] == pytest.approx(2002, rel=0.001)
    later = simulate(dataclasses.replace(spec, machine=TWO_CORES), every(0.5, 2, 1000, 1))
    assert later.ttft_ms["p50"] == pytest.approx(1502, rel=0.001)


def test_steps_are_longer_while_no_core_is_idle() -> None:
    """Steps of 10 ms, 4 more while the prefill worker computes: it does for two of the four seconds."""
    over = dataclasses.replace(NO_OVERHEADS, full_step=StepExcess(0.004))
    spec = sim_spec(machine=TWO_CORES, overheads=over)
    requests = [TraceRequest(0.0, 10, 340), TraceRequest(1.0, 2000, 1)]
    figures, gaps = simulate_gaps(spec, requests)
    assert gaps.steps.percentile(50) == pytest.approx(0.010, rel=0.01)
    assert gaps.full_steps.percentile(50) == pytest.approx(0.014, rel=0.01)
    assert len(gaps.full_steps) == pytest.approx(2.004 / 0.014, abs=2)
    assert len(gaps.steps) + len(gaps.full_steps) == 339
    assert figures.itl_ms["p99"] == pytest.approx(14, rel=0.01)


def test_on_machines_of_their_own_workers_are_never_in_each_others_way() -> None:
    over = dataclasses.replace(NO_OVERHEADS, full_step=StepExcess(1.0))
    found = simulate(sim_spec(overheads=over), [TraceRequest(0.0, 10, 300), TraceRequest(1.0, 2000, 1)])
    assert found.itl_ms["p99"] == pytest.approx(10, rel=0.01)


def test_gaps_lie_about_their_mean_as_they_were_observed_to() -> None:
    spread = StepExcess(0.0, tuple(each / 1000 for each in (-4, -2, -1, 0, 7)))
    gaps = StepGaps(SimOverheads(step=spread))
    assert gaps.add(0.010, 12, has_prompts=False, in_full=False) == pytest.approx(0.017)
    for _ in range(13):
        gaps.add(0.010, 1, has_prompts=False, in_full=False)
    gaps.add(0.500, 1, has_prompts=True, in_full=False)
    assert len(gaps.every) == 26
    assert gaps.every.percentile(50) == pytest.approx(0.009, rel=0.01)
    assert gaps.every.percentile(90) == pytest.approx(0.017, rel=0.01)
    assert gaps.every.percentile(100) == pytest.approx(0.500, rel=0.01)
    assert gaps.steps.percentile(99) == pytest.approx(0.010, rel=0.01), "compared without the spread"
    assert gaps.worst_of(0.010, 1, in_full=False) == pytest.approx(0.009)
    assert gaps.worst_of(0.010, 100, in_full=False) == pytest.approx(0.017)
    assert gaps.worst_of(0.010, 100, in_full=True) == 0.010


def test_every_request_ends_once_on_shared_cores() -> None:
    requests = [TraceRequest(index * 0.004, 50 + 37 * index % 900, 1 + index % 40) for index in range(300)]
    costs = plain_costs(1e-5, 0.002)
    over = dataclasses.replace(
        NO_OVERHEADS, step=StepExcess(0.001), full_step=StepExcess(0.002, (-0.001, 0.001))
    )
    for prefill, decode in ((1, 1), (2, 3), (0, 3)):
        found = simulate(sim_spec(prefill, decode, costs=costs, machine=TWO_CORES, overheads=over), requests)
        assert found.finished == len(requests)
        assert found.output_tokens_per_s * found.duration_s == pytest.approx(
            sum(request.output_tokens for request in requests)
        )
