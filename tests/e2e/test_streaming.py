"""A long prompt through real clusters, its KV streamed and in bulk: what is left to move after the prompt's end."""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from cluster.events import FirstToken, PrefillFinished, TransferCompleted, TransferStarted
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

PROMPT = [(7 * n + n // 256) % 256 for n in range(8000)]


def test_a_streamed_transfer_is_hidden_behind_the_prompt(
    running_cluster: Callable[..., RunningCluster],
) -> None:
    kv: dict[str, dict[str, Any]] = {}
    texts = set()
    for delivery in ("bulk", "stream"):
        cluster = running_cluster(
            "--profile", "1gbe", "--set", f"kv.delivery={delivery}", model="tiny"
        ).wait_ready()
        with Client(cluster) as client:
            texts.add(client.complete(PROMPT, max_tokens=8))
            done = cluster.wait_for(TransferCompleted, lambda event: event.tokens == len(PROMPT))
        assert cluster.end(signal.SIGINT).exit_code == 130
        (first,) = [
            e for e in cluster.events() if isinstance(e, FirstToken) and e.request_id == done.request_id
        ]
        assert abs(first.residual_ms) < max(1.0, 0.02 * first.ttft_ms)
        (started,) = [
            e for e in cluster.events() if isinstance(e, TransferStarted) and e.request_id == done.request_id
        ]
        (computed,) = [
            e for e in cluster.events() if isinstance(e, PrefillFinished) and e.request_id == done.request_id
        ]
        assert (started.at < computed.at) == (delivery == "stream")
        kv[delivery] = json.loads((cluster.run_dir / "summary.json").read_text())["kv"]
        assert kv[delivery]["transfers"] == 1
        assert kv[delivery]["formula_ok"] is True
    assert len(texts) == 1
    bulk, stream = kv["bulk"], kv["stream"]
    assert stream["wire_bytes"] == bulk["wire_bytes"]
    assert (bulk["hidden_share"], bulk["hidden_busy_share"]) == (0.0, 0.0)
    assert stream["hidden_share"] > 0.9
    assert stream["hidden_busy_share"] > 0.5
    assert stream["exposed_ms"]["p50"] < bulk["exposed_ms"]["p50"] / 2
