"""What the transport's benchmark asks of its two ends, what they answer, and what comes of it. Plain data, no torch."""

from typing import Final, Literal

import msgspec

from engine.benchmark_result import Failed
from engine.config import EngineConfig

OUR_WAYS: Final = ("v2", "v2-scattered", "v1")
"""The product's paths: ``v2`` from and into neighbouring blocks, ``v2-scattered`` blocks in no order, ``v1`` copies."""

COLLECTIVE_WAYS: Final = ("gloo", "nccl")
"""Backends of torch.distributed: send and receive of the same tensors between the same two processes."""

IPERF3: Final = "iperf3"

CONDITIONS: Final = ("alone", "streamed", "beside")
"""What the wire does while an engine computes a prompt: nothing; the prompt's own KV leaves as it is computed; another
prompt's KV leaves at whatever rate the link takes."""


class EndSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that an end gets. ``num_blocks``: of the pool whose KV moves."""

    role: Literal["sender", "receiver"]
    model: str
    dtype: str
    engine: EngineConfig
    num_blocks: int
    host: str  # where the receiver listens
    interface: str  # the network device of that address
    namespace_fd: int = -1  # -1: the namespace it was started in
    secret: str


class Connect(msgspec.Struct, frozen=True, tag=True):
    """To the sender: where the receiver is."""

    port: int


class Shape(msgspec.Struct, frozen=True, tag=True):
    """Pace the KV sockets; 0 = as fast as the host can."""

    bits_per_s: float


class Receive(msgspec.Struct, frozen=True, tag=True):
    """To the receiver: get ready for so many transfers."""

    way: str
    num_tokens: int
    num_transfers: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """To the sender: make them, one after the other. ``port``: the one that the receiver is ready on."""

    way: str
    num_tokens: int
    num_transfers: int
    bits_per_s: float
    port: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To the receiver: they have been made."""


class TakeSteps(msgspec.Struct, frozen=True, tag=True):
    """To the sender: compute prompts with its engine in each of CONDITIONS, in turns."""

    prompt_tokens: int
    beside_tokens: int  # of the other prompt
    repeats: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """An end can be used. ``gpus``: how many there are for NCCL."""

    port: int
    torch_version: str
    gpus: int


class Done(msgspec.Struct, frozen=True, tag=True):
    port: int = 0


class Used(msgspec.Struct, frozen=True, tag=True):
    """What the transfers cost one end. ``extra_bytes``: growth of its resident memory, None where unknown.

    Of the sender also how long the link was in use, and the bytes that came to the other end.
    """

    cpu_s: float
    extra_bytes: int | None
    duration_s: float = 0.0
    num_bytes: int = 0
    peer_cpu_s: float | None = None  # where one program counts for both


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """For each condition, for each repeat: how long the prompt's steps took; and what was sent meanwhile."""

    step_s: dict[str, list[list[float]]]
    sent_bytes: dict[str, list[int]]


class TransportBenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``sizes``: tokens of each transfer, smallest first; ``shaped_sizes``: of those over a limited link. ``steps``:
    None = the engine is not measured."""

    model: str
    dtype: str
    engine: EngineConfig
    bytes_per_token: int
    sizes: tuple[int, ...]
    rates_bits_per_s: tuple[float, ...]
    shaped_sizes: tuple[int, ...]
    repeats: int
    steps: TakeSteps | None
    steps_bits_per_s: float

    @property
    def num_blocks(self) -> int:
        return -(-max(self.sizes) // self.engine.block_size)


class Case(msgspec.Struct, frozen=True):
    """``bits_per_s`` 0 = as fast as the host can. ``num_tokens`` 0: the way has its own idea of how much (iperf3)."""

    place: str
    way: str
    num_tokens: int
    bits_per_s: float


class Sample(msgspec.Struct, frozen=True):
    num_bytes: int
    duration_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    sender_extra_bytes: int | None
    receiver_extra_bytes: int | None


class Measured(msgspec.Struct, frozen=True):
    case: Case
    samples: list[Sample]


class StepsMeasured(msgspec.Struct, frozen=True):
    place: str
    bits_per_s: float
    stepped: Stepped


class TransportBenchResult(msgspec.Struct, frozen=True):
    """``missing``: what was not measured, each with its reason."""

    torch_version: str
    iperf3_version: str  # "" = not installed
    congestion_control: str
    cores: dict[str, tuple[int, ...]]  # sender, receiver; () = any
    measured: list[Measured]
    steps: list[StepsMeasured]
    missing: list[str]


Question = Connect | Shape | Receive | Send | Stop | TakeSteps
Answer = Up | Done | Used | Stepped

_QUESTIONS: Final = msgspec.json.Decoder(Question)
_ANSWERS: Final = msgspec.json.Decoder(Answer | Failed)


def decode_question(line: bytes) -> Question:
    """Raises msgspec.DecodeError."""
    return _QUESTIONS.decode(line)


def decode_answer(line: bytes) -> Answer | Failed:
    """Raises msgspec.DecodeError."""
    answer: Answer | Failed = _ANSWERS.decode(line)
    return answer
