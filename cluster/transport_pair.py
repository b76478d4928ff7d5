"""The two processes of the transport's benchmark over one path, and one sample at a time from them."""

import contextlib
import secrets
from typing import Final, TypeVar

from cluster.link_backend import pacing_problem
from cluster.measuring_process import BenchmarkFailed, BenchmarkRefused, MeasuringProcess
from cluster.netns import Fabric, LinkShape
from cluster.transport_bench_messages import (
    Answer,
    Case,
    Connect,
    Done,
    EndSpec,
    Question,
    Receive,
    Sample,
    Send,
    Shape,
    Stop,
    TransportBenchSpec,
    Up,
    Used,
    decode_answer,
)

_MODULE: Final = "cluster.transport_measuring"
_SAMPLE_BYTES: Final = 64_000_000
_MOST_TRANSFERS: Final = 32
"""A sample is as many transfers as move about so much: one of 1 MB takes half a millisecond."""

Expected = TypeVar("Expected", bound=Answer)


class TransportPair:
    """The two ends over one path."""

    def __init__(
        self, spec: TransportBenchSpec, cores: dict[str, tuple[int, ...]], fabric: Fabric | None
    ) -> None:
        self.bits_per_s = 0.0
        self._spec = spec
        self._fabric = fabric
        self._secret = secrets.token_hex(32)
        with contextlib.ExitStack() as stack:
            ends = {}
            for slot, role in enumerate(("receiver", "sender")):
                fds = () if fabric is None else (fabric.namespace_fd(slot),)
                ends[role] = stack.enter_context(MeasuringProcess(_MODULE, cores[role], fds))
                ends[role].say(self._end_spec(role, slot))
            self._receiver, self._sender = ends["receiver"], ends["sender"]
            up = _hear(self._receiver, Up)
            _hear(self._sender, Up)
            self.torch_version, self.gpus = up.torch_version, up.gpus
            self.ask_sender(Connect(up.port), Done)
            self._stack = stack.pop_all()

    def __enter__(self) -> "TransportPair":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def shaping_problem(self) -> str:
        """ "" = this path's rate can be limited."""
        return pacing_problem() if self._fabric is None else ""

    def shape(self, bits_per_s: float) -> None:
        """0 = unlimited; also where it cannot be limited, and ``bits_per_s`` says so."""
        if bits_per_s == self.bits_per_s or (bits_per_s and self.shaping_problem):
            return
        if self._fabric is not None:
            self._fabric.shape(LinkShape(bits_per_s=bits_per_s))
        else:
            for end in (self._receiver, self._sender):
                end.say(Shape(bits_per_s))
                _hear(end, Done)
        self.bits_per_s = bits_per_s

    def sample(self, case: Case) -> Sample:
        self.shape(case.bits_per_s)
        num_bytes = case.num_tokens * self._spec.bytes_per_token
        count = max(1, min(_SAMPLE_BYTES // num_bytes, _MOST_TRANSFERS)) if num_bytes else 1
        self._receiver.say(Receive(case.way, case.num_tokens, count))
        port = _hear(self._receiver, Done).port
        paced = case.bits_per_s if self._fabric is None else 0.0
        sent = self.ask_sender(Send(case.way, case.num_tokens, count, paced, port), Used)
        self._receiver.say(Stop())
        received = _hear(self._receiver, Used)
        return Sample(
            num_bytes=sent.num_bytes,
            duration_s=sent.duration_s,
            sender_cpu_s=sent.cpu_s,
            receiver_cpu_s=received.cpu_s if sent.peer_cpu_s is None else sent.peer_cpu_s,
            sender_extra_bytes=sent.extra_bytes,
            receiver_extra_bytes=None if sent.peer_cpu_s is not None else received.extra_bytes,
        )

    def ask_sender(self, question: Question, expected: type[Expected]) -> Expected:
        self._sender.say(question)
        return _hear(self._sender, expected)

    def _end_spec(self, role: str, slot: int) -> EndSpec:
        spec, fabric = self._spec, self._fabric
        return EndSpec(
            role="sender" if role == "sender" else "receiver",
            model=spec.model,
            dtype=spec.dtype,
            engine=spec.engine,
            num_blocks=spec.num_blocks,
            host="127.0.0.1" if fabric is None else fabric.address(0),
            interface="lo" if fabric is None else "kv0",
            namespace_fd=-1 if fabric is None else fabric.namespace_fd(slot),
            secret=self._secret,
        )


def _hear(end: MeasuringProcess, expected: type[Expected]) -> Expected:
    """Raises as ``MeasuringProcess.hear`` does, but once an end is up whatever it cannot do is a failure."""
    try:
        answer = end.hear(decode_answer)
    except BenchmarkRefused as error:
        if expected is Up:
            raise
        raise BenchmarkFailed(str(error)) from error
    if not isinstance(answer, expected):
        raise BenchmarkFailed(f"the measuring process said {answer}; due was {expected.__name__}")
    return answer
