"""``--codec auto`` on a real cluster: the worker chooses by what it measured, says why, and no text changes."""

import json
import signal
from collections.abc import Callable

import pytest

from cluster.events import LinkProbed, TransferCompleted, TransferStarted
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

PROMPT = [(7 * n + n // 256) % 256 for n in range(2000)]
MOST_REQUESTS = 60
"""The codecs are measured beside the first requests, and compiled first where nobody has used them yet."""


def test_auto_on_a_slow_link_compresses_without_loss(running_cluster: Callable[..., RunningCluster]) -> None:
    cluster = running_cluster(
        *("--profile", "1gbe", "--codec", "auto", "--load", "none"),
        *("--set", "link.bandwidth=50mbit", "--set", "engine.prefix_caching=false"),
    ).wait_ready()
    cluster.wait_for(LinkProbed)
    texts = set()
    with Client(cluster) as client:
        for _ in range(MOST_REQUESTS):
            texts.add(client.complete(PROMPT, max_tokens=8))
            started = [
                e for e in cluster.events() if isinstance(e, TransferStarted) and e.tokens == len(PROMPT)
            ]
            if started and started[-1].codec_reason.startswith("estimated"):
                break
        done = cluster.wait_for(TransferCompleted, lambda e: e.request_id == started[-1].request_id)
    assert cluster.end(signal.SIGINT).exit_code == 130
    assert started[-1].codec == done.codec == "lossless"
    assert started[-1].codec_reason.startswith("estimated lossless ")
    assert started[-1].codec_reason.endswith("int8 may lose and is not allowed")
    assert 0.5 < done.wire_bytes / done.raw_bytes < 0.9
    assert len(texts) == 1
    summary = json.loads((cluster.run_dir / "summary.json").read_text())
    assert summary["kv"]["formula_ok"] is True
    assert summary["codec"] == "auto"
