"""``python -m cluster.transport_measuring``: one end of the transport's benchmark, alone in a process.

An EndSpec comes as the first line on stdin, then questions; each is answered by one line on stdout. What moves lies in
a paged cache as an engine's KV does, and moves as a worker's does: ``KVStream`` and ``KVSender`` on one side,
``KVReceiver`` on the other.
"""

import gc
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch

from cluster.bench_sender import BenchSender, prefill_result
from cluster.collective import Collective
from cluster.iperf3 import Iperf3Error, Iperf3Server, run_iperf3
from cluster.process_guard import enter_netns
from cluster.transport_bench_messages import (
    COLLECTIVE_WAYS,
    IPERF3,
    Answer,
    Connect,
    Done,
    EndSpec,
    Question,
    Receive,
    Send,
    Shape,
    Stop,
    TakeSteps,
    Up,
    Used,
    decode_question,
)
from cluster.transport_steps import StepBenchmark
from engine.benchmark_child import EXIT_FAILED, answers
from engine.benchmark_result import Failed
from engine.kv_cache import PagedKVCache
from engine.memory import return_freed_memory
from engine.model_ids import ModelError, resolve_model
from engine.weights import TORCH_DTYPES
from transport.errors import TransportError
from transport.events import ReceiveStats
from transport.link import LinkShape, congestion_control
from transport.messages import FailReason, KVCommit, KVContract, KVHeader
from transport.receiver import KVReceiver
from transport.receiver_peer import OpenReply

IPERF3_S: Final = 1
_FINGERPRINT: Final = "benchmark"


class End:
    """A pool of KV and both kinds of ends; only those of its role are made. Raises ModelError, ValueError."""

    def __init__(self, spec: EndSpec) -> None:
        self._spec = spec
        config = resolve_model(spec.model).config
        self._pool = PagedKVCache(
            config.num_layers,
            spec.num_blocks,
            spec.engine.block_size,
            config.num_kv_heads,
            config.head_dim,
            TORCH_DTYPES[spec.dtype],
            "cpu",
        )
        for layer in self._pool.layers:
            layer.fill_(1 if spec.role == "sender" else 0)  # every page is there before anything is measured
        self._contract = KVContract(
            model_fingerprint=_FINGERPRINT,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="bfloat16" if spec.dtype == "bfloat16" else "float32",
            block_size=spec.engine.block_size,
            layout="NHD",
        )
        self._in_order = tuple(range(spec.num_blocks))
        self._scattered = tuple(random.Random("blocks").sample(self._in_order, spec.num_blocks))
        self._table = self._in_order
        self._secret = bytes.fromhex(spec.secret)
        self._collectives: dict[str, Collective] = {}
        self._server: Iperf3Server | None = None
        self._usage = _Usage()
        self._sender: BenchSender | None = None
        self._steps: StepBenchmark | None = None
        self._receiver = (
            KVReceiver(self, self._contract, self._secret, host=spec.host) if self._receives else None
        )

    @property
    def _receives(self) -> bool:
        return self._spec.role == "receiver"

    def up(self) -> Up:
        port = self._receiver.address[1] if self._receiver else 0
        return Up(port, str(torch.__version__), torch.cuda.device_count() if torch.cuda.is_available() else 0)

    def answer(self, question: Question, say: Callable[[Answer], None]) -> None:
        """Carry out what is asked and answer it. Raises TransportError, Iperf3Error, RuntimeError (torch's)."""
        match question:
            case Connect(port=port):
                address = (self._spec.host, port)
                self._sender = BenchSender(address, self._secret, self._contract)
                say(Done())
            case Shape(bits_per_s=bits_per_s):
                shape = LinkShape(bandwidth_bytes_per_s=bits_per_s / 8 if bits_per_s else None)
                for wire in (self._sender, self._receiver):
                    if wire is not None:
                        wire.set_link(shape)
                say(Done())
            case Receive():
                self._receive(question, say)
            case Send():
                self._usage.begin()
                say(self._send(question))
            case Stop():
                if self._server is not None:
                    self._server.close()
                    self._server = None
                say(self._usage.end())
            case TakeSteps():
                assert self._sender is not None
                if self._steps is None:
                    self._steps = StepBenchmark(self._spec, self._sender, self._rows)
                say(self._steps.run(question))

    def close(self) -> None:
        for closable in (self._sender, self._receiver, self._server, *self._collectives.values()):
            if closable is not None:
                closable.close()

    # receiving

    def _receive(self, asked: Receive, say: Callable[[Answer], None]) -> None:
        self._table = self._scattered if asked.way == "v2-scattered" else self._in_order
        if asked.way == IPERF3:
            self._server = Iperf3Server(self._spec.host)
            say(Done(self._server.port))
            return
        if asked.way not in COLLECTIVE_WAYS:
            self._usage.begin()
            say(Done())
            return
        collective = self._collectives.get(asked.way)
        if collective is None:
            collective = Collective(asked.way, self._spec.host, self._spec.interface)
            self._collectives[asked.way] = collective
        say(Done(collective.port))
        collective.join()
        tensors = collective.place(self._tensors(asked.num_tokens))
        self._usage.begin()
        for _ in range(asked.num_transfers):
            collective.receive(tensors)

    def on_open(self, header: KVHeader, reply: OpenReply) -> None:
        reply.accept(self._rows)

    def on_complete(self, header: KVHeader, commit: KVCommit, stats: ReceiveStats) -> bool:
        return True

    def on_failed(self, header: KVHeader, reason: FailReason, error: TransportError) -> None:
        """The sender hears of it too, and says so."""

    # sending

    def _send(self, asked: Send) -> Used:
        host = self._spec.host
        if asked.way == IPERF3:
            result = run_iperf3(host, asked.port, IPERF3_S, asked.bits_per_s, congestion_control())
            return Used(result.sender_cpu_s, None, result.duration_s, result.num_bytes, result.receiver_cpu_s)
        if asked.way in COLLECTIVE_WAYS:
            collective = self._collectives.get(asked.way)
            if collective is None:
                collective = Collective(asked.way, host, self._spec.interface, port=asked.port)
                self._collectives[asked.way] = collective
            collective.join()
            tensors = collective.place(self._tensors(asked.num_tokens))
            self._usage.begin()
            began_at = time.monotonic()
            for _ in range(asked.num_transfers):
                collective.send(tensors)
            duration_s = time.monotonic() - began_at
            num_bytes = asked.num_transfers * sum(tensor.nbytes for tensor in tensors)
            return msgspec.structs.replace(self._usage.end(), duration_s=duration_s, num_bytes=num_bytes)
        assert self._sender is not None
        self._table = self._scattered if asked.way == "v2-scattered" else self._in_order
        duration_s, num_bytes = 0.0, 0
        for _ in range(asked.num_transfers):
            path = "v1" if asked.way == "v1" else "v2"
            self._sender.begin(asked.num_tokens, self._rows, path=path).finish(prefill_result())
            stats = self._sender.next_acked().stats
            duration_s += stats.acked_at - stats.first_frame_at
            num_bytes += stats.payload_bytes
        return msgspec.structs.replace(self._usage.end(), duration_s=duration_s, num_bytes=num_bytes)

    # the pool

    def _rows(self, layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
        return self._pool.block_bytes(layer, kv, self._table, start_token, num_tokens)

    def _tensors(self, num_tokens: int) -> list[torch.Tensor]:
        """The same bytes as a transfer's, layer by layer, keys and values."""
        return [
            side.flatten(0, 1)[:num_tokens].reshape(-1).view(torch.uint8)
            for layer in self._pool.layers
            for side in layer
        ]


class _Usage:
    """What this process has used since ``begin``."""

    def begin(self) -> None:
        """Also forgets the highest resident memory so far, where the kernel lets it be forgotten."""
        return_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._resident_bytes = _memory("VmRSS")
        except OSError:
            self._resident_bytes = None
        self._began_s = time.process_time()

    def end(self) -> Used:
        cpu_s = time.process_time() - self._began_s
        extra_bytes = None
        if self._resident_bytes is not None:
            extra_bytes = max(0, _memory("VmHWM") - self._resident_bytes)
        return Used(cpu_s, extra_bytes)

    _resident_bytes: int | None = None
    _began_s = 0.0


def _memory(name: str) -> int:
    """A line of /proc/self/status in bytes. Raises OSError."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def main() -> int:
    """Exit code 0 when the questions end, 2 after Failed."""
    with answers() as say:
        spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EndSpec)
        if spec.namespace_fd >= 0:
            enter_netns(spec.namespace_fd)  # before any thread starts
        torch.set_num_threads(1)
        try:
            end = End(spec)
        except (ModelError, ValueError) as error:
            say(Failed(str(error)))
            return EXIT_FAILED
        gc.freeze()  # as the nursery does before it forks workers
        say(end.up())
        try:
            for line in sys.stdin.buffer:
                try:
                    end.answer(decode_question(line), say)
                except (TransportError, Iperf3Error, RuntimeError) as error:
                    say(Failed(" ".join(str(error).split())))
                    return EXIT_FAILED
        finally:
            end.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
