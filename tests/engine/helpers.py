"""What several engine tests need: small checkpoints, engines, and driving them to the end."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import StepOutput
from engine.request import FinishReason, Request, SamplingParams
from engine.weights import LoadedModel

VOCAB_SIZE = 199
EOS_ID = 2


def write_checkpoint(
    path: Path, *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> LlamaForCausalLM:
    """A small random Llama with grouped-query attention, saved by transformers itself."""
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
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes)))
    model.eval().to(dtype).save_pretrained(path)
    return model


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
