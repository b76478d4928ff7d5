"""Runs the codecs' benchmark in a fresh process on one core. Imports no torch: that process (``codec_measuring``) does.

Plain data of both: what is asked and every raw sample that comes back.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.engine_bench import run_measuring
from cluster.engine_settings import engine_config
from cluster.load import model_corpus
from cluster.profile import Profile
from engine.benchmark_result import Failed, Progress
from engine.config import EngineConfig, ModelConfig

_MODULE: Final = "cluster.codec_measuring"


class CodecBenchSpec(msgspec.Struct, frozen=True):
    """``kv_prompt`` gives the KV that is measured, ``prompts`` the outputs that are compared; all are token ids."""

    model: str
    dtype: str
    engine: EngineConfig
    kv_prompt: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int  # of each prompt, the first one included
    repeats: int


class LayerError(msgspec.Struct, frozen=True):
    """How far one layer's keys (or values) are from what was encoded; ``rms`` is their own size."""

    mean: float
    max: float
    rms: float


class CodecSamples(msgspec.Struct, frozen=True):
    """One codec. Seconds of each repeat are for all of the KV, frame by frame; ``cpu_share`` as in an engine's case.

    Per prompt: how many of its tokens after the first equal those that raw KV gives, and the position of the first
    that differs, counted from the first output token = 0; None = no difference.
    """

    name: str
    wire_bytes: int
    encode_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    cpu_share: float
    key_errors: tuple[LayerError, ...]  # by layer
    value_errors: tuple[LayerError, ...]
    agreeing: tuple[int, ...]
    first_divergence: tuple[int | None, ...]


class CodecBenchResult(msgspec.Struct, frozen=True, tag="codec_result"):
    dtype: str
    raw_bytes: int
    frame_bytes: int  # the largest frame, as stored
    torch_version: str
    codecs: list[CodecSamples]


_DECODER: Final = msgspec.json.Decoder(Progress | Failed | CodecBenchResult)


def codec_bench_spec(
    profile: Profile,
    config: ModelConfig,
    dtype: str,
    *,
    kv_tokens: int,
    prompts: int,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
) -> CodecBenchSpec:
    """The benchmark of a profile's model. Every number is 1 or more, ``output_tokens`` 2 or more.

    Raises ValueError for prompts beyond the model's context, and as ``engine_config`` does; ModelError for a model
    whose tokenizer cannot be read.
    """
    longest = max(kv_tokens + 1, prompt_tokens + output_tokens)
    if longest > config.max_model_len:
        raise ValueError(
            f"a prompt and its output are {longest:,} tokens; the model's context is {config.max_model_len:,}"
        )
    engine = engine_config(profile)
    engine = dataclasses.replace(
        engine,
        enable_prefix_caching=False,
        num_threads=1,
        num_blocks=2 * -(-longest // engine.block_size) + 2,  # one sequence as sent, one as received
    )
    corpus = model_corpus(profile.model.id)
    rng = random.Random("codec benchmark")
    return CodecBenchSpec(
        model=profile.model.id,
        dtype=dtype,
        engine=engine,
        kv_prompt=corpus.cut(rng, kv_tokens),
        prompts=tuple(corpus.cut(rng, prompt_tokens) for _ in range(prompts)),
        output_tokens=output_tokens,
        repeats=repeats,
    )


def run_codec_bench(spec: CodecBenchSpec, core: int, report: Callable[[Progress], None]) -> CodecBenchResult:
    """Measure on ``core``, as ``run_benchmark`` does, with its errors."""
    result: CodecBenchResult = run_measuring(_MODULE, spec, spec.model, core, _DECODER.decode, report)
    return result
