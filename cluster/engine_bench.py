"""Runs the engine's benchmark in a fresh process on one core. Imports no torch: that process does."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import psutil

from cluster.engine_settings import engine_config
from cluster.machine_facts import cache_bytes
from cluster.measuring_process import MeasuringProcess
from cluster.profile import Profile
from engine.benchmark_plan import BenchmarkSpec, Room, blocks_needed, problem_of
from engine.benchmark_result import BenchmarkResult, Failed, Progress, decode_message
from engine.config import ModelConfig

_MODULE: Final = "engine.benchmark"

_SMALLEST_BUFFER_BYTES: Final = 256 * 2**20
_CACHES_IN_BUFFER: Final = 2
"""The buffer that is read to find the memory's rate holds the largest cache so often; all it can keep is half."""

_MEMORY_SHARE: Final = 0.5
"""Of the memory that is free: at most so much for a KV pool, and half of that for the buffer."""


Result = TypeVar("Result")


def benchmark_spec(
    profile: Profile,
    config: ModelConfig,
    dtype: str,
    *,
    prefill_tokens: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    where: bool,
    size_pool: bool,
) -> BenchmarkSpec:
    """The benchmark of a profile's model and engine. ``dtype`` is never auto.

    ``size_pool``: the KV pool is as large as the largest case that fits the model needs, within half of the free
    memory, and not what the profile says. Raises ValueError naming the field of a profile that no engine can have.
    """
    free_bytes = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    engine = dataclasses.replace(engine_config(profile), enable_prefix_caching=False, num_threads=1)
    largest_cache = max(cache_bytes().values(), default=0)
    buffer_bytes = max(_SMALLEST_BUFFER_BYTES, _CACHES_IN_BUFFER * largest_cache)
    spec = BenchmarkSpec(
        model=profile.model.id,
        dtype=dtype,
        engine=engine,
        prefill_tokens=tuple(prefill_tokens),
        batches=tuple(batches),
        contexts=tuple(contexts),
        repeats=repeats,
        memory_buffer_bytes=min(buffer_bytes, free_bytes // 2),
        where=where,
    )
    if not size_pool:
        return spec
    most_blocks = max(1, free_bytes // (engine.block_size * config.kv_bytes_per_token(dtype)))
    room = Room(config.max_model_len, most_blocks, engine.block_size, engine.max_num_seqs)
    fitting = (blocks_needed(case, engine.block_size) for case in spec.cases() if not problem_of(case, room))
    engine = dataclasses.replace(engine, num_blocks=max(fitting, default=1))
    return msgspec.structs.replace(spec, engine=engine)


def run_benchmark(spec: BenchmarkSpec, core: int, report: Callable[[Progress], None]) -> BenchmarkResult:
    """Measure on ``core``; ``report`` hears what is next. The process is gone when this returns or raises.

    Call it in the main thread: the process dies with the thread that started it. Raises BenchmarkRefused for a model
    that cannot be loaded, BenchmarkFailed for a process that ends without a result.
    """
    return run_measuring(_MODULE, spec, spec.model, core, decode_message, report)


def run_measuring(
    module: str,
    question: msgspec.Struct,
    model: str,
    core: int,
    decode: Callable[[bytes], Progress | Failed | Result],
    report: Callable[[Progress], None],
) -> Result:
    """``run_benchmark`` for any measuring program: it gets ``question`` on stdin, ``decode`` reads a line it says."""
    with MeasuringProcess(module, (core,)) as process:
        report(Progress("loading", model, 0, 1))
        process.say(question, is_last=True)
        while True:
            message = process.hear(decode)
            if isinstance(message, Progress):
                report(message)
            elif not isinstance(message, Failed):
                return message
