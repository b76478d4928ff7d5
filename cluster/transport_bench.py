"""Runs the transport's benchmark: two real processes over real TCP, and the yardsticks between the same two.

Imports no torch: the two ends (``transport_measuring``) do. First over bare loopback, then, where it can be had,
between two of the product's own network namespaces. Ways take turns in every round, so that a machine that drifts
drifts for all of them; the first round is not kept.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psutil

from cluster import iperf3
from cluster.cpu_plan import plan_cpus
from cluster.engine_settings import engine_config
from cluster.netns import Fabric, NetnsError
from cluster.profile import Profile
from cluster.transport_bench_messages import (
    IPERF3,
    OUR_WAYS,
    Case,
    Measured,
    Sample,
    Stepped,
    StepsMeasured,
    TakeSteps,
    TransportBenchResult,
    TransportBenchSpec,
)
from cluster.transport_pair import TransportPair
from cluster.units import format_bits_per_s
from engine.benchmark_result import Progress
from engine.config import ModelConfig
from transport.link import congestion_control

SHAPED_FROM_BYTES: Final = 8_000_000
"""Smaller transfers are over before a limited rate means anything."""

LOOPBACK: Final = "loopback"
NETNS: Final = "netns"
_MEMORY_SHARE: Final = 0.5


def transport_bench_spec(
    profile: Profile,
    config: ModelConfig,
    dtype: str,
    *,
    sizes_bytes: Sequence[int],
    rates_bits_per_s: Sequence[float],
    repeats: int,
    steps_repeats: int,
    steps_bits_per_s: float,
) -> TransportBenchSpec:
    """KV of a profile's model in transfers of about these sizes. ``steps_repeats`` 0: without the engine.

    Raises ValueError for sizes that need more than half of the free memory, and as ``engine_config`` does.
    """
    bytes_per_token = config.kv_bytes_per_token(dtype)
    free_bytes = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if 2 * max(sizes_bytes) > free_bytes:
        raise ValueError(
            f"a transfer of {max(sizes_bytes) / 1e6:g} MB needs as much memory at either end; "
            f"allowed here is up to {free_bytes / 2e6:.0f} MB"
        )
    prompt_tokens = min(4 * profile.engine.max_num_batched_tokens, config.max_model_len - 2)
    engine = engine_config(profile)
    engine = dataclasses.replace(
        engine,
        enable_prefix_caching=False,
        num_threads=1,
        num_blocks=-(-(prompt_tokens + 2) // engine.block_size) + 1,
    )
    tokens = {size: max(1, round(size / bytes_per_token)) for size in sorted(sizes_bytes)}
    sizes = tuple(dict.fromkeys(tokens.values()))
    beside_tokens = min(max(sizes), max(1, 16_000_000 // bytes_per_token))
    return TransportBenchSpec(
        model=profile.model.id,
        dtype=dtype,
        engine=engine,
        bytes_per_token=bytes_per_token,
        sizes=sizes,
        rates_bits_per_s=tuple(rates_bits_per_s),
        shaped_sizes=tuple(
            dict.fromkeys(count for size, count in tokens.items() if size >= SHAPED_FROM_BYTES)
        ),
        repeats=repeats,
        steps=TakeSteps(prompt_tokens, beside_tokens, steps_repeats) if steps_repeats else None,
        steps_bits_per_s=steps_bits_per_s,
    )


def run_transport_bench(
    spec: TransportBenchSpec, cpus: Sequence[int], report: Callable[[Progress], None]
) -> TransportBenchResult:
    """Measure with the ends on the cores that one prefill and one decode worker would have.

    Call it in the main thread. Raises BenchmarkRefused for a model that cannot be loaded, BenchmarkFailed for an end
    that stops without a result.
    """
    planned = plan_cpus(["sender"], ["receiver"], cpus)
    bench = _Bench(spec, planned, report)
    bench.run(LOOPBACK, None)
    try:
        fabric = Fabric.create(2)
    except NetnsError as error:
        bench.missing.append(f"between namespaces: {error}")
    else:
        with contextlib.closing(fabric):
            bench.run(NETNS, fabric)
    return TransportBenchResult(
        torch_version=bench.torch_version,
        iperf3_version=iperf3.version(),
        congestion_control=congestion_control(),
        cores=planned,
        measured=[Measured(case, samples) for case, samples in bench.samples.items()],
        steps=bench.steps,
        missing=bench.missing,
    )


class _Bench:
    """Collects samples over all places."""

    def __init__(
        self,
        spec: TransportBenchSpec,
        cores: dict[str, tuple[int, ...]],
        report: Callable[[Progress], None],
    ) -> None:
        self.torch_version = ""
        self.samples: dict[Case, list[Sample]] = {}
        self.steps: list[StepsMeasured] = []
        self.missing: list[str] = []
        self._spec = spec
        self._cores = cores
        self._report = report

    def run(self, place: str, fabric: Fabric | None) -> None:
        """All rounds over one path; ``fabric`` None = loopback."""
        spec = self._spec
        self._report(Progress(f"{place}: loading", spec.model, 0, 1))
        with TransportPair(spec, self._cores, fabric) as pair:
            self.torch_version = pair.torch_version
            cases = [*self._cases(place, pair)]
            total = (spec.repeats + 1) * len(cases)
            for number in range(spec.repeats + 1):
                stage = f"{place}: round {number} of {spec.repeats}" if number else f"{place}: warm-up"
                for index, case in enumerate(cases):
                    self._report(Progress(stage, _in_words(case, spec), number * len(cases) + index, total))
                    sample = pair.sample(case)
                    if number:
                        self.samples.setdefault(case, []).append(sample)
            if spec.steps is not None:
                self._report(Progress(f"{place}: engine steps", spec.model, 0, 1))
                pair.shape(spec.steps_bits_per_s)
                stepped = pair.ask_sender(spec.steps, Stepped)
                self.steps.append(StepsMeasured(place, pair.bits_per_s, stepped))

    def _cases(self, place: str, pair: TransportPair) -> Iterator[Case]:
        """In the order of a round: unlimited first, then each rate; yardsticks beside what is compared with them."""
        spec = self._spec
        others = self._yardsticks(pair)
        for num_tokens in spec.sizes:
            for way in (*OUR_WAYS, *(way for way in others if way != IPERF3)):
                yield Case(place, way, num_tokens, 0.0)
        if IPERF3 in others:
            yield Case(place, IPERF3, 0, 0.0)
        if spec.rates_bits_per_s and (problem := pair.shaping_problem):
            self._leave_out(f"limited rates over {place}: {problem}")
            return
        for rate in spec.rates_bits_per_s:
            for num_tokens in spec.shaped_sizes:
                yield Case(place, "v2", num_tokens, rate)
            if IPERF3 in others:
                yield Case(place, IPERF3, 0, rate)

    def _yardsticks(self, pair: TransportPair) -> list[str]:
        found = ["gloo"]
        if pair.gpus >= 2:
            found.append("nccl")
        else:
            self._leave_out(
                "nccl: " + ("no GPU" if not pair.gpus else "one GPU; it needs one for each process")
            )
        if iperf3.is_installed():
            found.append(IPERF3)
        else:
            self._leave_out(iperf3.NOT_INSTALLED)
        return found

    def _leave_out(self, reason: str) -> None:
        if reason not in self.missing:
            self.missing.append(reason)


def _in_words(case: Case, spec: TransportBenchSpec) -> str:
    size = f" {case.num_tokens * spec.bytes_per_token / 1e6:.0f} MB" if case.num_tokens else ""
    rate = f" at {format_bits_per_s(case.bits_per_s)}" if case.bits_per_s else ""
    return f"{case.way}{size}{rate}"
