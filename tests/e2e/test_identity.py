"""One prompt, many ways, the same tokens: ``transformers``, one engine, the router in both modes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.events import ModeChanged, RequestFinished
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_ids import resolve_model
from engine.request import Request, SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_model
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

PROMPTS = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "Return the absolute path of ",
    "for name in sorted(names):\n    print(",
)
NUM_TOKENS = 48


def by_transformers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generated = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        generated.append(output[0, len(prompt) :].tolist())
    return generated


def by_engine(prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one batch."""
    engine = Engine(EngineConfig(num_blocks=64, dtype="float32"), load_model("tiny", "float32"))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), sampling))
    generated: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for token in engine.step().new_tokens:
            generated[int(token.request_id)].append(token.token_id)
    return generated


def by_router(client: Client, prompts: list[list[int]]) -> list[str]:
    return [client.complete(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]


def texts(tokenizer: Tokenizer, generated: list[list[int]]) -> list[str]:
    """As the router writes them: token by token, special tokens left out."""
    found = []
    for token_ids in generated:
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(token) for token in token_ids if token not in tokenizer.eos_token_ids]
        found.append("".join(pieces) + detokenizer.flush())
    return found


def test_greedy_tokens_are_the_same_everywhere(running_cluster: Callable[..., RunningCluster]) -> None:
    cluster = running_cluster("--set", "model.dtype=float32", model="tiny")
    source = resolve_model("tiny")
    assert source.path is not None
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = by_transformers(source.path, prompts)
    assert by_engine(prompts) == expected
    cluster.wait_ready()
    with Client(cluster) as client:
        disagg = by_router(client, prompts)
        assert disagg == texts(tokenizer, expected)
        client.command({"msg": "set_mode", "mode": "colocated"})
        cluster.wait_for(ModeChanged, lambda event: event.mode == "colocated")
        assert by_router(client, prompts) == disagg
    finished = [event for event in cluster.events() if isinstance(event, RequestFinished)]
    assert all(event.output_tokens == NUM_TOKENS for event in finished if event.output_tokens > 2)
