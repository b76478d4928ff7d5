"""What a benchmark of one engine found: every raw sample, and no summary. Plain data without torch.

The messages of the process that measures are here too; each is one line of JSON that names its type.
"""

import msgspec

from engine.benchmark_plan import DecodeCase, PrefillCase


class MatmulSamples(msgspec.Struct, frozen=True):
    """One product ``(rows, in) @ (in, out)`` in the model's dtype; each sample is that of the fastest kernel."""

    name: str
    shape: tuple[int, int, int]  # rows, in, out
    flops_per_s: list[float]


class LimitSamples(msgspec.Struct, frozen=True):
    """What the core can do at best, sampled in every round beside the cases."""

    matmul: list[MatmulSamples]
    memory_buffer_bytes: int
    memory_bytes_per_s: list[float]


class PrefillSamples(msgspec.Struct, frozen=True):
    """``ttft_s``: one sample a repeat. Nothing was measured where ``problem`` is not empty.

    ``cpu_share``: CPU time over elapsed time; below 1, other processes had the core.
    """

    case: PrefillCase
    problem: str = ""
    ttft_s: tuple[float, ...] = ()
    cpu_share: float | None = None


class DecodeSamples(msgspec.Struct, frozen=True):
    """``step_s``: for each repeat, its measured steps in order. ``problem`` and ``cpu_share`` as in a prefill."""

    case: DecodeCase
    problem: str = ""
    step_s: tuple[tuple[float, ...], ...] = ()
    cpu_share: float | None = None


class PartTimes(msgspec.Struct, frozen=True):
    """Where the time of one prefill, or of one decode step, went; of several passes the one with the median time.

    ``parts_s`` sum to ``total_s``; their names are those of ``engine.step_cost`` and ``engine.part_timers``.
    """

    case: PrefillCase | DecodeCase
    total_s: float
    parts_s: dict[str, float]


class BenchmarkResult(msgspec.Struct, frozen=True, tag="result"):
    """A finished benchmark. ``dtype`` is never auto; ``num_blocks`` is the size of the KV pool."""

    model: str
    dtype: str
    kernels: str  # compiled | torch: what the model ran on
    torch_version: str
    num_blocks: int
    limits: LimitSamples
    prefill: list[PrefillSamples]
    decode: list[DecodeSamples]
    where: list[PartTimes]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """About to measure ``what`` in a round, as number ``done`` + 1 of ``total`` things."""

    stage: str  # "round 2 of 5"
    what: str
    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing was measured, for a reason that whoever asked can mend."""

    message: str


BenchmarkMessage = Progress | Failed | BenchmarkResult

_DECODER = msgspec.json.Decoder(BenchmarkMessage)


def decode_message(line: bytes) -> BenchmarkMessage:
    """One line of the measuring process. Raises msgspec.DecodeError for anything else."""
    return _DECODER.decode(line)
