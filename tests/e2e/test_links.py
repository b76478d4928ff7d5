"""Links of a running cluster: probed both ways, and reshaped under connections that are up, by each backend."""

import json
import os
import signal
from collections.abc import Callable

import pytest

from cluster.events import LinkConfigured, LinkProbed, RunReady, TransferCompleted, TransferStarted
from cluster.run_dir import SUMMARY_FILE
from tests.cluster.test_netns import why_not
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = (
    *("--profile", "10gbe", "--codec", "lossless", "--set", "kv.delivery=bulk"),
    *("--set", "supervisor.start_timeout_s=200", "--set", "supervisor.heartbeat_timeout_s=20"),
)
PATIENCE_S = 200.0
SLOW_BITS_PER_S = 2e7
DELAY_MS, JITTER_MS = 30.0, 2.0
UNSHAPED_BYTES = 2 * (2 * 65536)
"""What token buckets let through at once; pacing lets less."""


@pytest.mark.parametrize(
    "backend",
    [
        "pacing",
        pytest.param(
            "netns", marks=pytest.mark.skipif(os.geteuid() != 0 or bool(why_not()), reason=why_not() or "-")
        ),
    ],
)
def test_a_hot_change_is_measured_both_ways_and_holds_on_connections_that_are_up(
    running_cluster: Callable[..., RunningCluster], backend: str
) -> None:
    cluster = running_cluster("--link-backend", backend, *OPTIONS)
    ready = cluster.wait_for(RunReady, timeout_s=PATIENCE_S)
    ways = {("prefill-0", "decode-0"), ("decode-0", "prefill-0")}
    before = [
        event for event in cluster.events() if isinstance(event, LinkProbed) and event.index < ready.index
    ]
    assert {way(event) for event in before} == ways
    with Client(cluster) as client:
        client.complete([9] * 64)  # the connection is up
        first = cluster.wait_for(TransferStarted, lambda event: event.tokens == 64)
        assert first.codec_reason.startswith("estimated"), "codecs were measured before the cluster was ready"
        change = {"bits_per_s": SLOW_BITS_PER_S, "delay_ms": DELAY_MS, "jitter_ms": JITTER_MS}
        assert client.command({"msg": "change_link", **change}).json()["ok"]
        changed = cluster.wait_for(
            LinkConfigured,
            lambda event: (event.asked_delay_ms, event.asked_jitter_ms) == (DELAY_MS, JITTER_MS),
        )
        for pair in ways:
            probed = cluster.wait_for(
                LinkProbed, lambda event, pair=pair: event.index > changed.index and way(event) == pair
            )
            assert probed.rtt_ms >= 2 * (DELAY_MS - JITTER_MS)
            assert 0 < probed.achieved_bits_per_s < 3 * SLOW_BITS_PER_S
        client.complete([token % 250 for token in range(2000)])
        moved = cluster.wait_for(TransferCompleted, lambda event: event.tokens == 2000)
    on_the_way_s = 2 * (DELAY_MS - JITTER_MS) / 1e3
    least_s = (moved.wire_bytes - UNSHAPED_BYTES) * 8 / SLOW_BITS_PER_S + on_the_way_s
    assert moved.wire_bytes > 2 * UNSHAPED_BYTES
    assert moved.duration_s >= least_s
    assert cluster.end(signal.SIGINT).exit_code == 130
    link = json.loads((cluster.run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))["link"]
    assert (link["backend"], link["asked_bits_per_s"]) == (backend, SLOW_BITS_PER_S)
    assert (link["asked_delay_ms"], link["asked_jitter_ms"]) == (DELAY_MS, JITTER_MS)
    assert link["achieved_bits_per_s"] > 0
    assert link["achieved_back_bits_per_s"] > 0
    assert link["achieved_rtt_ms"] >= 2 * (DELAY_MS - JITTER_MS)


def way(event: LinkProbed) -> tuple[str, str]:
    return event.from_worker, event.to_worker
