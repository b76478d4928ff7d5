"""What the break-even benchmark asks and finds, as plain data; and its inputs, measured by other benchmarks.

The comparison itself needs a cluster; who drives one folds its events into ``MeasuredRequest``.
"""

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from cluster.breakeven_bench_forecast import ForecastInputs, KVGeometry, calibration_tokens, fit_prefill
from cluster.codec_bench import codec_bench_spec, run_codec_bench
from cluster.engine_bench import benchmark_spec, run_benchmark
from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TransferCompleted,
    TransferFailed,
)
from cluster.measuring_process import BenchmarkFailed
from cluster.profile import Profile
from engine.benchmark_result import Progress
from engine.config import ModelConfig
from transport.codec import LOSSY_CODECS
from transport.codec_choice import CodecRate

OUTPUT_TOKENS = 2
"""Of every request: the first comes with the KV, the second needs it."""

_CALIBRATION_REPEATS = 2
_CODEC_KV_TOKENS = 1024
_CODEC_REPEATS = 5


@dataclass(frozen=True, slots=True)
class BreakevenSpec:
    """``links``: bits/s asked for, 0 = unlimited, slowest first. Every number is 1 or more."""

    tokens: tuple[int, ...]
    links: tuple[float, ...]
    codecs: tuple[str, ...]
    deliveries: tuple[str, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link as one cluster had it. ``rtt_ms`` is the shortest of a few round trips, ``limit`` as in the run's log."""

    delivery: str
    asked_bits_per_s: float
    achieved_bits_per_s: float
    back_bits_per_s: float  # from the decode worker to the prefill worker
    rtt_ms: float
    backend: str
    limit: str


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One request that was handed off. ``left_s``: from the end of prefill (a bulk transfer: from its first frame) to
    its acknowledgement."""

    delivery: str
    asked_bits_per_s: float
    codec: str
    tokens: int
    wire_bytes: int
    left_s: float
    duration_s: float
    prefill_s: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class RecomputeSample:
    """One request whose decode worker computed the prompt itself, beside the transfers of this delivery and link."""

    delivery: str
    asked_bits_per_s: float
    tokens: int
    compute_s: float
    ttft_ms: float


@dataclass(slots=True)
class BreakevenResult:
    """``runs``: delivery -> name of the run whose log holds every event behind these figures."""

    runs: dict[str, str] = dataclasses.field(default_factory=dict)
    links: list[MeasuredLink] = dataclasses.field(default_factory=list)
    transfers: list[TransferSample] = dataclasses.field(default_factory=list)
    recomputes: list[RecomputeSample] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured before the cluster came up. ``prefill_s``: tokens -> median seconds."""

    inputs: ForecastInputs
    prefill_s: dict[int, float]
    dtype: str
    torch_version: str
    kernels: str


@dataclass(slots=True)
class MeasuredRequest:
    """Fold over the events of one request, which is the only one in flight. None: not seen yet."""

    handed_off: bool
    request_id: str = ""
    compute_s: float | None = None
    transfer: TransferCompleted | None = None
    ttft_ms: float | None = None
    problem: str = ""  # it did not go the way that is measured

    _is_finished: bool = False
    _held: list[Event] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Everything is known; events of several processes come in any order."""
        return (
            self._is_finished
            and self.compute_s is not None
            and self.ttft_ms is not None
            and (self.transfer is not None or not self.handed_off)
        )

    def fold(self, event: Event) -> None:
        """A worker's event may come before the router's, which says whose it is."""
        if isinstance(event, RequestRejected):
            self.problem = f"the request was refused: {event.reason}"
        elif isinstance(event, RequestArrived):
            if event.label != "probe":
                self.request_id = event.request_id
                for earlier in self._held:
                    self._fold_own(earlier)
                self._held.clear()
        elif self.request_id:
            self._fold_own(event)
        else:
            self._held.append(event)

    def _fold_own(self, event: Event) -> None:
        if getattr(event, "request_id", "") != self.request_id:
            return
        match event:
            case PrefillFinished():
                self.compute_s = event.compute_s
                if event.cached_tokens:
                    self.problem = f"{event.cached_tokens} tokens came from a prefix cache"
            case TransferCompleted():
                self.transfer = event
            case FirstToken():
                self.ttft_ms = event.ttft_ms
            case RequestFinished():
                self._is_finished = True
            case TransferFailed() | FellBack():
                self.problem = f"the handoff failed: {event.reason} {event.detail}".rstrip()
            case RequestFailed():
                self.problem = self.problem or f"the request failed: {event.reason}"
            case RequestCancelled():
                self.problem = self.problem or "the request was cancelled"
            case _:
                pass


def calibrate(
    profile: Profile,
    config: ModelConfig,
    dtype: str,
    spec: BreakevenSpec,
    core: int,
    report: Callable[[Progress], None],
) -> Calibration:
    """Measure prefill and codecs alone on ``core``. Raises BenchmarkFailed, ValueError and ModelError as the two
    benchmarks do."""
    longest = max(spec.tokens)
    engine_spec = benchmark_spec(
        profile,
        config,
        dtype,
        prefill_tokens=calibration_tokens(longest),
        batches=(),
        contexts=(),
        repeats=_CALIBRATION_REPEATS,
        where=False,
        size_pool=False,
    )
    engine = run_benchmark(engine_spec, core, lambda step: report(_named("prefill alone", step)))
    if problems := [case.problem for case in engine.prefill if case.problem]:
        raise BenchmarkFailed(f"prefill cannot be measured: {problems[0]}")
    prefill_s = {case.case.prompt_tokens: statistics.median(case.ttft_s) for case in engine.prefill}
    rates = {"raw": CodecRate(float("inf"), float("inf"), 1.0)}
    if set(spec.codecs) - rates.keys():
        codec_spec = codec_bench_spec(
            profile,
            config,
            dtype,
            kv_tokens=min(_CODEC_KV_TOKENS, longest),
            prompts=1,
            prompt_tokens=16,
            output_tokens=2,
            repeats=_CODEC_REPEATS,
        )
        codecs = run_codec_bench(codec_spec, core, lambda step: report(_named("codecs alone", step)))
        for codec in codecs.codecs:
            if codec.name in spec.codecs and codec.name not in rates:
                rates[codec.name] = CodecRate(
                    encode_bytes_per_s=codecs.raw_bytes / statistics.median(codec.encode_s),
                    decode_bytes_per_s=codecs.raw_bytes / statistics.median(codec.decode_s),
                    ratio=codec.wire_bytes / codecs.raw_bytes,
                    is_lossy=codec.name in LOSSY_CODECS,
                )
    chunk_tokens = engine_spec.engine.prefill_chunk_tokens or engine_spec.engine.max_num_batched_tokens
    kv = KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, engine.dtype, chunk_tokens)
    curve = fit_prefill(list(prefill_s), list(prefill_s.values()))
    return Calibration(
        inputs=ForecastInputs(curve, rates, kv),
        prefill_s=prefill_s,
        dtype=engine.dtype,
        torch_version=engine.torch_version,
        kernels=engine.kernels,
    )


def _named(stage: str, step: Progress) -> Progress:
    return Progress(f"{stage}: {step.stage}", step.what, step.done, step.total)
