"""Which split is best, whether to split at all, and what is said of it."""

import dataclasses
import json
from typing import Any

import pytest

from cluster.engine_settings import engine_config
from cluster.metrics import Slos
from cluster.planner import PlanLink
from cluster.profile import load_profile
from cluster.sim_cluster import simulate
from cluster.sim_figures import SimFigures
from cluster.sim_profile import MANY_REQUESTS, sim_spec, sweep_document
from cluster.sim_sweep import Sweep, smallest_enough, sweep, verdict, when_not
from cluster.trace import ScaledTrace, TraceRequest
from engine.model_ids import resolve_model
from tests.cluster.sim_setup import every, plain_costs
from tests.cluster.sim_setup import sim_spec as plain_spec

SLOS = Slos(ttft_ms=2000.0, itl_ms=50.0)


def figures(prefill: int, decode: int, goodput: float, **changes: Any) -> SimFigures:
    given: dict[str, Any] = {
        "requests": 100,
        "finished": 100,
        "refused": {},
        "duration_s": 10.0,
        "ttft_ms": {"p50": 100.0, "p90": 200.0, "p99": 300.0},
        "itl_ms": {"p50": 10.0, "p90": 20.0, "p99": 30.0},
        "ttft_parts_ms": {},
        "good": 100,
        "goodput_per_s": goodput,
        "output_tokens_per_s": 1.0,
        "prefill_utilisation": 0.5,
        "decode_utilisation": 0.5,
        "link_utilisation": 0.1,
        "preemptions": 0,
        "steps": 1,
        "bottleneck": "none",
    }
    return SimFigures(prefill=prefill, decode=decode, **(given | changes))


def test_every_split_of_few_workers_is_tried() -> None:
    found = sweep(4, SLOS, lambda prefill, decode: figures(prefill, decode, goodput=prefill))
    assert [split.name for split in found.splits] == ["1:3", "2:2", "3:1"]
    assert found.best.name == "3:1"
    assert found.colocated.name == "4 co-located"


@pytest.mark.parametrize("peak", [1, 37, 300, 700, 999])
def test_of_many_splits_the_best_is_found_with_few_tries(peak: int) -> None:
    tried: list[int] = []

    def hill(prefill: int, decode: int) -> SimFigures:
        tried.append(prefill)
        return figures(
            prefill, decode, goodput=1000.0 - abs(prefill - peak), stress=abs(prefill - peak) / 1000
        )

    found = sweep(1000, SLOS, hill)
    assert abs(found.best.prefill - peak) <= 1
    assert len(tried) < 40


def test_among_equal_goodputs_the_one_further_from_its_limits_wins() -> None:
    found = sweep(
        4, SLOS, lambda prefill, decode: figures(prefill, decode, 10.0, stress=abs(prefill - 2) + 0.1)
    )
    assert found.best.name == "2:2"


def test_the_verdict_may_say_no() -> None:
    apart = tuple(figures(prefill, 4 - prefill, 5.0) for prefill in (1, 2, 3))
    yes = Sweep(4, SLOS, apart, figures(0, 4, 3.0))
    no = Sweep(4, SLOS, apart, figures(0, 4, 8.0))
    alike = Sweep(4, SLOS, apart, figures(0, 4, 5.0))
    assert verdict(yes).startswith("disaggregate as 1:3: 5 good requests/s against 3")
    assert verdict(no).startswith(
        "do not disaggregate: 4 co-located workers give 8 good requests/s against 5"
    )
    assert verdict(alike).startswith("do not disaggregate: both ways give 5 good requests/s")


def test_what_is_not_enough_is_called_so() -> None:
    poor = figures(1, 1, 1.0, good=40)
    said = verdict(Sweep(2, SLOS, (poor,), figures(0, 2, 0.5, good=20)))
    assert said.endswith("; at best 40.0% of the requests are good, 99% are wanted")


def test_when_not_to_is_said_with_figures() -> None:
    mixed = figures(0, 2, 1.0, itl_ms={"p50": 10.0, "p90": 20.0, "p99": 400.0})
    said = when_not(
        Sweep(2, SLOS, (figures(1, 1, 2.0, ttft_ms={"p50": 1.0, "p90": 900.0, "p99": 950.0}),), mixed)
    )
    assert "gaps of 400 ms" in said
    assert "200 ms co-located, 900 ms as 1:1" in said


def test_the_smallest_number_that_is_enough_is_taken() -> None:
    requests = every(0.25, 40, 1000, 5)
    spec = plain_spec(slos=Slos(ttft_ms=1500.0))
    found = smallest_enough(
        spec.slos,
        lambda prefill, decode: simulate(dataclasses.replace(spec, prefill=prefill, decode=decode), requests),
    )
    assert found.nodes in (4, 6), "four prompts of a second each arrive every second"
    assert max(found.best.good_share, found.colocated.good_share) >= 0.99


def test_more_workers_that_do_not_help_are_not_tried() -> None:
    tried: set[int] = set()

    def slow(prefill: int, decode: int) -> SimFigures:
        tried.add(prefill + decode)
        return figures(prefill, decode, 1.0, good=60)

    assert smallest_enough(SLOS, slow).nodes == 3
    assert tried == {2, 3}


def test_a_long_trace_books_kv_in_larger_blocks_of_the_same_pool() -> None:
    profile = load_profile("10gbe")
    request = TraceRequest(0.0, 4096, 8)
    for count, block_size in ((10, 16), (MANY_REQUESTS, 512)):
        trace = ScaledTrace((request,) * count, count, 0, 0, "")
        spec = sim_spec(
            profile,
            engine_config(profile),
            resolve_model("tiny").config,
            "float32",
            16_384,
            plain_costs(),
            PlanLink("10gbit", 1e10),
            SLOS,
            trace,
        )
        assert spec.block_size == block_size
        assert spec.num_blocks * spec.block_size == 16_384 * 16
        assert not spec.prefix_caching, "the trace says nothing of shared prompts"


def test_the_document_is_json_and_adds_up() -> None:
    requests = tuple(every(0.2, 30, 500, 5))
    spec = plain_spec(slos=SLOS)
    trace = ScaledTrace(requests, 30, 0, 0, "30 requests")
    found = sweep(
        3,
        SLOS,
        lambda prefill, decode: simulate(dataclasses.replace(spec, prefill=prefill, decode=decode), requests),
    )
    document = sweep_document(found, spec, trace, "10gbit", {"id": "m"}, "here", 1.0)
    assert json.loads(json.dumps(document)) == document
    assert {row["name"] for row in document["splits"]} == {"1:2", "2:1"}
    assert document["best"] in {"1:2", "2:1"}
    assert all(row["finished"] == 30 for row in [*document["splits"], document["colocated"]])
