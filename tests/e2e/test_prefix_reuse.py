"""Two requests with the same long beginning through a real cluster: the second moves only what decode does not hold."""

import json
import signal
from collections.abc import Callable

import pytest

from cluster.events import ModelDescribed, PrefillFinished, TransferCompleted
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_ids import resolve_model
from engine.request import Request, SamplingParams
from engine.tokenizer import load_tokenizer
from engine.weights import load_model
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

MODEL = "synthetic:nano"
PREFIX = [(7 * n + n // 256) % 256 for n in range(4096)]
PROMPTS = ([*PREFIX, *range(1, 30)], [*PREFIX, *range(200, 99, -1)])
NUM_TOKENS = 24


def by_engine(prompt: list[int]) -> str:
    """The text as one engine without any reuse gives it."""
    config = EngineConfig(num_blocks=300, dtype="float32", enable_prefix_caching=False)
    engine = Engine(config, load_model(MODEL, "float32"))
    engine.add(Request("r", tuple(prompt), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)))
    detokenizer = load_tokenizer(resolve_model(MODEL)).detokenizer()
    text = ""
    while engine.has_work():
        text += "".join(detokenizer.push(token.token_id) for token in engine.step().new_tokens)
    return text + detokenizer.flush()


def test_the_second_request_moves_only_the_rest_and_the_summary_adds_up(
    running_cluster: Callable[..., RunningCluster],
) -> None:
    cluster = running_cluster("--set", "model.dtype=float32", model=MODEL).wait_ready()
    with Client(cluster) as client:
        for prompt in PROMPTS:
            assert client.complete(prompt, max_tokens=NUM_TOKENS) == by_engine(prompt)
        second = cluster.wait_for(TransferCompleted, lambda event: event.skipped_tokens > 0)
        metrics = client.get("/metrics").text
    assert "pdconsole:kv_transfer_skipped_tokens_total 4096.0" in metrics
    ended = cluster.end(signal.SIGINT)
    assert ended.exit_code == 130, ended.stderr
    model = cluster.wait_for(ModelDescribed)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    kv = json.loads((cluster.run_dir / "summary.json").read_text())["kv"]
    moved = len(PROMPTS[0]) + len(PROMPTS[1]) - 4096
    assert (kv["transfers"], kv["tokens"], kv["skipped_tokens"]) == (2, moved, 4096)
    assert kv["wire_bytes"] == kv["raw_bytes"] == moved * per_token
    assert kv["skipped_bytes"] == 4096 * per_token
    assert kv["formula_ok"] is True
    assert (second.tokens, second.skipped_tokens) == (len(PROMPTS[1]) - 4096, 4096)
    computed = [event for event in cluster.events() if isinstance(event, PrefillFinished)][-1]
    assert (computed.request_id, computed.cached_tokens) == (second.request_id, 4096)
