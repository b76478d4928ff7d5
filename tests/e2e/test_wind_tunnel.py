"""``pdconsole up --target``: the link gets the ratio of another system, from what this machine just measured."""

import json
from collections.abc import Callable

import pytest

from cluster.events import LinkConfigured, LinkTuned, ModelDescribed, PrefillFinished, RunReady
from cluster.targets import all_targets
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]


def test_a_target_shapes_the_link_by_the_measured_prefill_rate(running_cluster: Start) -> None:
    cluster = running_cluster(
        "--target", "a100-7b@10gbe", "--link-backend", "pacing", "--duration", "2", "--load", "steady", "--json"
    )  # fmt: skip
    ended = cluster.end()
    assert ended.exit_code == 0, ended.stderr
    tuned, ready = cluster.wait_for(LinkTuned), cluster.wait_for(RunReady)
    assert tuned.index < ready.index
    target = all_targets()["a100-7b"]
    assert (tuned.target, tuned.target_rho) == ("a100-7b@10gbe", target.rho(1e10))

    kv_bytes = cluster.wait_for(ModelDescribed).kv_bytes_per_token
    prompts = [
        event
        for event in cluster.events()
        if isinstance(event, PrefillFinished) and event.index < tuned.index and event.prompt_tokens == 1024
    ]
    assert {event.worker_id for event in prompts} == {"prefill-0"}
    assert {event.cached_tokens for event in prompts} == {0}
    rate = sum(event.prompt_tokens for event in prompts) / sum(event.compute_s for event in prompts)
    assert tuned.prefill_tokens_per_s == pytest.approx(rate)
    assert tuned.b_star_bytes_per_s == pytest.approx(rate * kv_bytes)

    links = [event for event in cluster.events() if isinstance(event, LinkConfigured)]
    assert (links[0].asked_bits_per_s, links[-1].asked_bits_per_s) == (1e10, tuned.asked_bits_per_s)
    assert tuned.asked_bits_per_s == pytest.approx(tuned.target_rho * tuned.b_star_bytes_per_s * 8)
    assert tuned.achieved_bits_per_s == pytest.approx(tuned.asked_bits_per_s, rel=0.3)
    assert tuned.rho == pytest.approx(tuned.achieved_bits_per_s / 8 / tuned.b_star_bytes_per_s)

    summary = json.loads(ended.stdout)
    assert summary["target"] == "a100-7b@10gbe"
    assert summary["target_rho"] == pytest.approx(tuned.target_rho, abs=1e-6)
    assert summary["rho_at_start"] == pytest.approx(tuned.rho, abs=1e-6)
    assert summary["link"]["asked_bits_per_s"] == tuned.asked_bits_per_s
    assert summary["requests"]["finished"] > 0
    assert summary["requests"]["failed"] == 0
    assert summary["requests"]["probes"] == 1 + 4, "the pair's own and the measured prompts, in no latency"
    assert "link tuned for rho 0.65 of a100-7b@10gbe: asked " in ended.stderr


def test_a_link_that_nothing_can_shape_is_told_before_anything_starts(running_cluster: Start) -> None:
    ended = running_cluster("--set", "link.rho=0.4", "--link-backend", "none").end()
    assert ended.exit_code == 2
    assert "link.backend is 'none' and link.rho is set" in ended.stderr
    assert ended.stderr.count("\n") == 1
