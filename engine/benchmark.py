"""``python -m engine.benchmark``: measure one engine, alone in its process. Knows no console and no cluster.

A BenchmarkSpec comes as JSON on stdin; Progress lines and at last a BenchmarkResult (or Failed) go to stdout. Which
core it runs on is up to who starts it.

Cases take turns: one sample of each in a round, so that a machine that drifts drifts for all of them. The first round
is not kept.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from engine.benchmark_child import run_child
from engine.benchmark_plan import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    BenchmarkSpec,
    Case,
    DecodeCase,
    PrefillCase,
    Room,
    problem_of,
)
from engine.benchmark_result import (
    BenchmarkResult,
    DecodeSamples,
    PartTimes,
    PrefillSamples,
    Progress,
)
from engine.core_limits import CoreLimits
from engine.engine import Engine
from engine.operations import choose_operations
from engine.part_timers import Stopwatch, part_timers
from engine.request import Request, SamplingParams
from engine.torch_operations import TorchOperations
from engine.weights import TORCH_DTYPES, load_model

_PREFILL_PASSES: Final = 3


@dataclass(slots=True)
class _Samples:
    """Samples of one case; the time they took, and how much of it this process had the core."""

    case: Case
    problem: str
    repeats: list[tuple[float, ...]] = field(default_factory=list)  # seconds
    elapsed_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def cpu_share(self) -> float | None:
        return self.cpu_s / self.elapsed_s if self.elapsed_s else None


class EngineBenchmark:
    """An engine and the cases of one spec. Raises ModelError or ValueError for what cannot be loaded."""

    def __init__(self, spec: BenchmarkSpec) -> None:
        if spec.engine.enable_prefix_caching:
            raise ValueError(
                "engine.prefix_caching is true; a benchmark computes every token: allowed is false"
            )
        self._spec = spec
        self._loaded = load_model(spec.model, spec.dtype, spec.engine.device, spec.engine.kernels_in_use)
        self._engine = Engine(spec.engine, self._loaded)
        _fill(self._engine)
        room = Room(
            max_model_len=self._loaded.config.max_model_len,
            num_blocks=self._engine.cache.num_blocks,
            block_size=spec.engine.block_size,
            max_num_seqs=spec.engine.max_num_seqs,
        )
        self._samples = [_Samples(case, problem_of(case, room)) for case in spec.cases()]
        self._limits = CoreLimits(
            self._loaded.config,
            TORCH_DTYPES[self._loaded.dtype],
            spec.engine.max_num_batched_tokens,
            spec.memory_buffer_bytes,
        )

    def run(self, report: Callable[[Progress], None]) -> BenchmarkResult:
        """Measure everything; ``report`` hears before each case what is next."""
        todo = [samples for samples in self._samples if not samples.problem]
        parts = self._cases_of_interest() if self._spec.where else []
        total = (self._spec.repeats + 1) * len(todo) + len(parts)
        done = 0
        for number in range(self._spec.repeats + 1):
            stage = f"round {number} of {self._spec.repeats}" if number else "warm-up"
            self._limits.sample(keep=number > 0)
            for samples in todo:
                report(Progress(stage, str(samples.case), done, total))
                self._measure(samples, number)
                done += 1
        where = []
        for case in parts:
            report(Progress("parts", str(case), done, total))
            where.append(self._time_parts(case))
            done += 1
        return self._result(where)

    def _result(self, where: list[PartTimes]) -> BenchmarkResult:
        prefill: list[PrefillSamples] = []
        decode: list[DecodeSamples] = []
        for samples in self._samples:
            problem, share = samples.problem, samples.cpu_share
            match samples.case:
                case PrefillCase() as case:
                    ttft_s = tuple(repeat[0] for repeat in samples.repeats)
                    prefill.append(PrefillSamples(case, problem, ttft_s, share))
                case DecodeCase() as case:
                    decode.append(DecodeSamples(case, problem, tuple(samples.repeats), share))
        return BenchmarkResult(
            model=self._loaded.model_id,
            dtype=self._loaded.dtype,
            kernels="torch" if isinstance(self._operations(), TorchOperations) else "compiled",
            torch_version=str(torch.__version__),
            num_blocks=self._engine.cache.num_blocks,
            limits=self._limits.samples(),
            prefill=prefill,
            decode=decode,
            where=where,
        )

    def _operations(self) -> object:
        """What the engine's runner chose."""
        model, spec = self._loaded.model, self._spec.engine
        return choose_operations(model.config, model.cos, model.sin, spec.block_size, spec.kernels)

    def _measure(self, samples: _Samples, number: int) -> None:
        """One repeat; number 0 is not kept."""
        began, cpu_began = time.monotonic(), time.process_time()
        match samples.case:
            case PrefillCase() as case:
                seconds: tuple[float, ...] = (self._prefill(case, seed=number),)
            case DecodeCase() as case:
                seconds = self._decode(case)
        if number:
            samples.repeats.append(seconds)
            samples.elapsed_s += time.monotonic() - began
            samples.cpu_s += time.process_time() - cpu_began

    def _prefill(self, case: PrefillCase, seed: int) -> float:
        """Seconds from ``add`` to the first token of a prompt that no other repeat has."""
        vocabulary = range(self._loaded.config.vocab_size)
        token_ids = random.Random(f"{case.prompt_tokens} {seed}").choices(vocabulary, k=case.prompt_tokens)
        request = Request("prefill", tuple(token_ids), SamplingParams(max_tokens=1, ignore_eos=True))
        began = time.monotonic()
        self._engine.add(request)
        while not self._engine.step().new_tokens:
            pass
        return time.monotonic() - began

    def _decode(self, case: DecodeCase) -> tuple[float, ...]:
        """Seconds of each measured step."""
        with self._decoding(case):
            return tuple(self._decode_step(case) for _ in range(MEASURED_STEPS))

    @contextlib.contextmanager
    def _decoding(self, case: DecodeCase) -> Iterator[None]:
        """The case's sequences run, past the warm-up steps.

        They come as from another worker, with their KV in place (whatever the blocks hold): a context costs no
        prefill, and the steps are the decode role's own.
        """
        engine = self._engine
        sampling = SamplingParams(max_tokens=case.max_tokens, ignore_eos=True)
        names = [f"decode-{index}" for index in range(case.batch)]
        try:
            for index, name in enumerate(names):
                token_id = index % self._loaded.config.vocab_size
                engine.reserve(Request(name, (token_id,) * case.context, sampling))
                engine.adopt(name, token_id)
            for _ in range(WARM_UP_STEPS):
                self._decode_step(case)
            yield
        finally:
            for name in names:
                engine.abort(name)

    def _decode_step(self, case: DecodeCase) -> float:
        output = self._engine.step()
        assert len(output.new_tokens) == output.num_batched_tokens == case.batch, "a step left a sequence out"
        return output.duration_s

    def _cases_of_interest(self) -> list[Case]:
        """The longest prefill, and the largest batch in every context, of those that can be measured."""
        fitting = [samples.case for samples in self._samples if not samples.problem]
        prefills = [case for case in fitting if isinstance(case, PrefillCase)]
        decodes = [case for case in fitting if isinstance(case, DecodeCase)]
        longest = max(prefills, key=lambda case: case.prompt_tokens, default=None)
        largest = {case.context: case for case in sorted(decodes, key=lambda case: case.batch)}
        return [*([longest] if longest else []), *largest.values()]

    def _time_parts(self, case: Case) -> PartTimes:
        """Passes of their own, since timers cost time: the median of a few prefills, or of a repeat's steps."""
        with part_timers(self._loaded.model) as stopwatch:
            if isinstance(case, PrefillCase):
                passes = [
                    _parts_of(stopwatch, lambda: self._prefill(case, seed=0)) for _ in range(_PREFILL_PASSES)
                ]
            else:
                with self._decoding(case):
                    passes = [
                        _parts_of(stopwatch, lambda: self._decode_step(case)) for _ in range(MEASURED_STEPS)
                    ]
        parts_s = sorted(passes, key=lambda parts: sum(parts.values()))[len(passes) // 2]
        return PartTimes(case, sum(parts_s.values()), parts_s)


def _parts_of(stopwatch: Stopwatch, run: Callable[[], float]) -> dict[str, float]:
    stopwatch.reset()
    run()
    return stopwatch.read()


def _fill(engine: Engine) -> None:
    """Plausible numbers in every block: what memory holds by chance may be slow to compute with."""
    generator = torch.Generator().manual_seed(0)
    for layer in engine.cache.layers:
        layer.copy_(torch.randn(layer.shape[2:], generator=generator))


def main() -> int:
    """Returns the exit code: 0, or 2 after Failed."""
    return run_child(BenchmarkSpec, EngineBenchmark)


if __name__ == "__main__":
    sys.exit(main())
