"""Simulated clusters against times computed by hand, and against what must hold whatever the figures."""

import random

import pytest

from cluster.metrics import Slos
from cluster.sim_cluster import simulate
from cluster.sim_cost import DecodePoint, PrefillPoint, StepCosts
from cluster.sim_spec import SimLink, SimOverheads
from cluster.trace import TraceRequest
from tests.cluster.sim_setup import NO_OVERHEADS, every, plain_costs, sim_spec


def poisson(count: int, rate_per_s: float, seed: int = 1, most_tokens: int = 3000) -> list[TraceRequest]:
    rng = random.Random(seed)
    at_s, requests = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        requests.append(TraceRequest(at_s, rng.randint(1, most_tokens), rng.randint(1, 60)))
    return requests


def test_one_request_alone_takes_what_arithmetic_says() -> None:
    """1,000 tokens in 1,001 ms, 1 MB at 10 MB/s in one piece after it, then 9 steps of 10 ms."""
    link = SimLink(bytes_per_s=1e7, delay_s=0.003, stream_from_tokens=0)
    overheads = SimOverheads(router_s=0.002, answer_s=0.001, handoff_s=0.004)
    found = simulate(sim_spec(link=link, overheads=overheads), every(1.0, 1, 1000, 10))
    assert found.ttft_ms["p50"] == pytest.approx(2 + 1001 + 100 + 3 + 4 + 1)
    assert found.itl_ms["p99"] == pytest.approx(10, rel=0.002)
    assert found.duration_s == pytest.approx(1.111 + 9 * 0.010)
    assert found.steps == 2 + 9


def test_streamed_kv_leaves_only_its_last_piece_to_wait_for() -> None:
    link = SimLink(bytes_per_s=1e7, stream_from_tokens=1)
    found = simulate(sim_spec(link=link), every(1.0, 1, 1000, 2))
    assert found.ttft_ms["p50"] == pytest.approx(1001 + 512 * 1024 / 1e7 * 1e3)


def test_a_slow_link_bounds_a_streamed_handoff() -> None:
    """10 MB at 5 MB/s take 2 s from the start of the prefill, which takes 1."""
    spec = sim_spec(link=SimLink(bytes_per_s=5e6), kv_bytes_per_token=10_000)
    found = simulate(spec, every(1.0, 1, 1000, 2))
    assert found.ttft_ms["p50"] == pytest.approx(2000)


def test_transfers_of_one_prefill_worker_share_its_link() -> None:
    """Two prompts of 100 tokens at once: computed after 0.101 and 0.202 s, and 1 s each on the wire."""
    link = SimLink(bytes_per_s=1e5, stream_from_tokens=0)
    found = simulate(sim_spec(link=link), every(0.0, 2, 100, 2))
    assert found.ttft_ms["p50"] == pytest.approx((1101 + 2101) / 2)
    assert found.link_utilisation == pytest.approx(2 / found.duration_s)


def test_deterministic_arrivals_queue_as_for_one_server() -> None:
    """D/D/1: prompts of two full steps, 1.025 s, come every 0.925 s: each waits 0.1 s longer than the one before."""
    found = simulate(sim_spec(), every(0.925, 21, 1024, 1))
    assert found.ttft_ms["p50"] == pytest.approx(1025 + 10 * 100)
    assert found.ttft_parts_ms["prefill_queue"] == pytest.approx(1000)


def test_poisson_arrivals_wait_as_queueing_theory_says() -> None:
    """M/D/1 at load 0.5: the mean wait is rho / (2 (1 - rho)) service times."""
    rng = random.Random(3)
    at_s, requests = 0.0, []
    for _ in range(6_000):
        at_s += rng.expovariate(0.5 / 1.025)
        requests.append(TraceRequest(at_s, 1024, 1))
    found = simulate(sim_spec(), requests)
    assert found.ttft_parts_ms["prefill_queue"] == pytest.approx(512.5, rel=0.05)
    assert found.prefill_utilisation == pytest.approx(0.5, rel=0.03)


def test_colocated_streams_are_stalled_by_a_prompt_and_disaggregated_ones_are_not() -> None:
    requests = [TraceRequest(0.0, 10, 200), TraceRequest(0.5, 5000, 1)]
    mixed, apart = (simulate(sim_spec(prefill, 1), requests) for prefill in (0, 1))
    assert mixed.itl_ms["p99"] == pytest.approx(512, rel=0.05), "a whole step's budget of 1 ms tokens"
    assert apart.itl_ms["p99"] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 3), (0, 3)])
def test_every_request_ends_once(prefill: int, decode: int) -> None:
    requests = poisson(400, 20.0)
    found = simulate(sim_spec(prefill, decode, costs=plain_costs(1e-5, 0.002)), requests)
    assert found.finished == found.requests == len(requests)
    assert found.refused == {}
    assert found.output_tokens_per_s * found.duration_s == pytest.approx(
        sum(r.output_tokens for r in requests)
    )


def test_every_request_ends_once_where_kv_is_scarce() -> None:
    """The pool holds four of the longest requests: they wait, are preempted, and are refused by a full queue."""
    requests = poisson(400, 50.0, most_tokens=900)
    for prefill in (0, 1):
        spec = sim_spec(prefill, 1, costs=plain_costs(1e-5, 0.002), num_blocks=256)
        found = simulate(spec, requests)
        assert found.finished + sum(found.refused.values()) == len(requests)
        assert found.finished > 0


def test_what_can_never_fit_is_refused() -> None:
    found = simulate(
        sim_spec(num_blocks=10, max_model_len=160), [TraceRequest(0.0, 100, 20), TraceRequest(1, 5, 5)]
    )
    assert found.finished == 2, "120 tokens fit 160"


def test_a_full_queue_refuses() -> None:
    limits = sim_spec().limits
    short = type(limits)(2, 1e9, 5, fallback=True, handoff="always", kv_path="v2")
    found = simulate(sim_spec(limits=short, max_num_seqs=1), every(0.0, 10, 100, 50))
    assert found.refused == {"429": 7}
    assert found.finished == 3
    assert "1 decode worker" in found.bottleneck


def test_the_same_trace_gives_the_same_figures() -> None:
    requests = poisson(300, 10.0)
    assert simulate(sim_spec(2, 2), requests) == simulate(sim_spec(2, 2), requests)


def test_more_prefill_workers_never_worsen_ttft() -> None:
    requests = every(0.3, 60, 1000, 5)
    medians = [simulate(sim_spec(prefill, 2), requests).ttft_ms["p99"] for prefill in (1, 2, 3, 4)]
    assert medians == sorted(medians, key=lambda value: -(value or 0.0))
    assert medians[-1] == pytest.approx(1001, rel=0.01), "four workers of 1 s for a prompt every 0.3 s"


def test_jumping_over_steps_changes_nothing() -> None:
    """A scheduler asked at every step gives the same times as one asked at changes only."""
    requests = poisson(120, 8.0, most_tokens=1500)
    decodes = [DecodePoint(b, c, 0.002 + 1e-4 * b + 1e-7 * b * c) for b in (1, 32) for c in (10, 1000)]
    prefills = [PrefillPoint(n, 1e-4 * n + 1e-8 * n * n) for n in (1, 100, 1000)]
    for prefill in (0, 1):
        spec = sim_spec(prefill, 2, costs=StepCosts(prefills, decodes, 32))
        jumped = simulate(spec, requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cluster.sim_worker.MAX_STEPS", 1)
            stepped = simulate(spec, requests)
        assert stepped.steps == jumped.steps
        assert stepped.ttft_ms == {name: pytest.approx(value) for name, value in jumped.ttft_ms.items()}
        assert stepped.duration_s == pytest.approx(jumped.duration_s)
        assert stepped.itl_ms["p50"] == pytest.approx(jumped.itl_ms["p50"], rel=0.02)


def test_equal_prefixes_are_computed_once() -> None:
    shared = [TraceRequest(2.0 * index, 1024, 2, (7, 8), 512) for index in range(3)]
    different = [TraceRequest(2.0 * index, 1024, 2, (index, 9 + index), 512) for index in range(3)]
    reused, computed = (simulate(sim_spec(prefix_caching=True), each) for each in (shared, different))
    assert computed.ttft_ms["p50"] == pytest.approx(1025)
    assert reused.ttft_ms["p50"] == pytest.approx(16, abs=1), "all but the last block are there"


def test_goodput_counts_who_keeps_every_limit() -> None:
    requests = [TraceRequest(0.0, 1000, 1), TraceRequest(0.0, 1000, 1), TraceRequest(5.0, 1000, 1)]
    found = simulate(sim_spec(slos=Slos(ttft_ms=1500)), requests)
    assert found.good == 2
    assert found.goodput_per_s == pytest.approx(2 / 6.001, rel=1e-3)
    assert found.bottleneck == "the 1 prefill worker: prompts take as long as the limit"


def test_nothing_to_do_is_no_error() -> None:
    found = simulate(sim_spec(overheads=NO_OVERHEADS), [])
    assert (found.finished, found.goodput_per_s, found.ttft_ms["p50"]) == (0, 0.0, None)
