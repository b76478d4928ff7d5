"""What several engine tests need: small checkpoints, engines, and driving them to the end."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from engine.block_table import BlockTable
from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward_batch import ChunkRows, ForwardBatch
from engine.kv_cache import KEYS, VALUES, PagedKVCache
from engine.operations import choose_operations
from engine.outputs import StepOutput
from engine.request import FinishReason, Request, SamplingParams
from engine.sampler import gumbel_noise
from engine.weights import LoadedModel

VOCAB_SIZE = 199
EOS_ID = 2

CLEAR = 5e-4
"""A margin that rounding in float32 never uses up: batches, chunks and other orders of summing change logits that
spread by 2 by at most 6e-5."""

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama-bias": (LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 48}),
    "qwen3-bias": (Qwen3Config, {"attention_bias": True}),
}
"""Every kind of attention that the engine has: a transformers configuration and its changes to the usual shape."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
"""A context of 128 tokens stretched to four times as many."""


def write_checkpoint(
    path: Path,
    *,
    family: str = "llama",
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> PreTrainedModel:
    """A small random model with grouped-query attention, saved by transformers itself.

    Biases and norms, which transformers starts at 0 and 1, are random too: a model computed without them differs.
    """
    make_config, own_changes = FAMILIES[family]
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "initializer_range": 0.15,  # large enough that attention matters and greedy tokens vary
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        make_config(**(shape | own_changes | changes)), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.3)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(1.0, 2.5)  # below that, normed heads attend to everything alike
    model.eval().to(dtype).save_pretrained(path)
    return model


def full_logits(
    loaded: LoadedModel, tokens: tuple[int, ...], chunk: int, kernels: str = "auto"
) -> torch.Tensor:
    """Logits ``(len(tokens), vocab)``, the tokens given to the model in chunks."""
    config = loaded.config
    num_blocks = -(-len(tokens) // 16)
    cache = PagedKVCache(
        config.num_layers, num_blocks, 16, config.num_kv_heads, config.head_dim, loaded.model.dtype, "cpu"
    )
    operations = choose_operations(config, loaded.model.cos, loaded.model.sin, 16, kernels)
    table = BlockTable(range(num_blocks))
    rows = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        positions = np.arange(start, end)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens[start:end]),
            positions=positions,
            slots=positions,
            chunks=(ChunkRows(0, end - start, end - start, end, table, is_prefill=True),),
            logit_rows=torch.arange(end - start),
        )
        rows.append(loaded.model.forward(batch, cache, operations).clone())
    return torch.cat(rows)


def decision_margins(logits: torch.Tensor, request: Request) -> list[float]:
    """How clear each choice is, for ``logits (m, vocab)`` that the request's outputs 0 to m - 1 are chosen by.

    How much the best logit leads; at temperature 1, the best sum of logit and noise. Two correct computations may
    choose differently only where this is as small as twice their rounding.
    """
    scores = logits.double()
    if request.sampling.temperature > 0.0:
        assert request.sampling.temperature == 1.0
        ids = np.arange(logits.shape[-1])
        noise = [gumbel_noise(request.sampling.seed, position, ids) for position in range(len(logits))]
        scores = scores + torch.from_numpy(np.stack(noise))
    best = scores.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


def clear_answer(loaded: LoadedModel, make: Callable[[int], Request]) -> tuple[Request, list[int]]:
    """The first of ``make(0)``, ``make(1)``, ... that answers by clear choices only, and its answer.

    The answer of a request alone, its prompt computed at once. Such an answer can be asked for token by token, on any
    machine; most are (a test that finds none among eight is wrong about the model).
    """
    for number in range(8):
        request = make(number)
        engine = make_engine(loaded, max_num_batched_tokens=512, enable_prefix_caching=False)
        driven = drive(engine, [request])
        assert driven.steps[0].num_prefill_tokens == len(request.prompt_token_ids)
        answer = driven.tokens[request.request_id]
        if min(answer_margins(loaded, request, answer)) > CLEAR:
            return request, answer
    raise AssertionError("no answer is clear")


def answer_margins(loaded: LoadedModel, request: Request, answer: list[int]) -> list[float]:
    """The margins of the choices that led to ``answer``; give a float32 model."""
    tokens = (*request.prompt_token_ids, *answer[:-1])
    return decision_margins(full_logits(loaded, tokens, 512)[len(request.prompt_token_ids) - 1 :], request)


def make_engine(loaded: LoadedModel, **changes: object) -> Engine:
    """An engine over ``loaded`` with a cache of 128 blocks of 16 tokens, unless ``changes`` say otherwise."""
    settings: dict[str, object] = {"num_blocks": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return Engine(EngineConfig(**(settings | changes)), loaded)  # type: ignore[arg-type]


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids that are not special."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


def make_request(
    request_id: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 12,
    temperature: float = 0.0,
    seed: int = 7,
    ignore_eos: bool = True,
    output: tuple[int, ...] = (),
    top_p: float = 1.0,
    top_k: int = 0,
) -> Request:
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    return Request(request_id, prompt, sampling, output)


class Driven:
    """Everything an engine gave out while it was driven until it had no more work."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.positions: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.steps: list[StepOutput] = []

    def take(self, output: StepOutput) -> None:
        self.steps.append(output)
        for request_id, token_id, position in output.new_tokens:
            self.tokens.setdefault(request_id, []).append(token_id)
            self.positions.setdefault(request_id, []).append(position)
        self.finished.update(output.finished)


def drive(engine: Engine, requests: Iterable[Request] = (), *, max_steps: int = 2000) -> Driven:
    """Add ``requests`` and step until idle, checking every invariant after every step."""
    for request in requests:
        engine.add(request)
    driven = Driven()
    while engine.has_work():
        assert len(driven.steps) < max_steps, "the engine does not come to an end"
        output = engine.step()
        engine.check_integrity()
        assert output.num_batched_tokens > 0, "a step without work although has_work() was true"
        assert output.num_batched_tokens <= engine.config.max_num_batched_tokens
        driven.take(output)
    return driven


def send_kv(
    source: Engine, target: Engine, request_id: str, num_tokens: int, *, start: int = 0, source_id: str = ""
) -> int:
    """What a transfer does: bytes of every layer from one cache's blocks into the other's. Returns their number.

    ``start``: the first token whose KV moves. ``source_id``: the sequence's id in ``source``, if it is another one.
    """
    sent = 0
    source_blocks, target_blocks = source.kv_blocks(source_id or request_id), target.kv_blocks(request_id)
    for layer in range(source.cache.num_layers):
        for kv in (KEYS, VALUES):
            payload = b"".join(source.cache.block_bytes(layer, kv, source_blocks, start, num_tokens - start))
            position = 0
            for view in target.cache.block_bytes(layer, kv, target_blocks, start, num_tokens - start):
                view[:] = payload[position : position + len(view)]
                position += len(view)
            assert position == len(payload)
            sent += position
    return sent
