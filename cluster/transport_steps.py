"""How much longer an engine's steps take while the same process sends KV, on the core that a worker has.

A prompt is computed chunk by chunk in each of CONDITIONS, in turns, so that a machine that drifts drifts for all.
"""

import random
from typing import Final

from cluster.bench_sender import BenchSender, prefill_result
from cluster.kv_stream import KVStream, Rows
from cluster.transport_bench_messages import CONDITIONS, EndSpec, Stepped, TakeSteps
from engine.engine import Engine
from engine.outputs import PrefillProgress
from engine.request import Request, SamplingParams
from engine.weights import load_model
from transport.events import TransferAcked

_REQUEST: Final = "prompt"


class StepBenchmark:
    """An engine beside a sender. Raises ModelError or ValueError for what cannot be loaded."""

    def __init__(self, spec: EndSpec, sender: BenchSender, bulk_rows: Rows) -> None:
        self._loaded = load_model(spec.model, spec.dtype, "cpu", spec.engine.kernels_in_use)
        self._engine = Engine(spec.engine, self._loaded)
        self._engine.warm_up()
        self._sender = sender
        self._bulk_rows = bulk_rows
        self._rng = random.Random("steps")

    def run(self, asked: TakeSteps) -> Stepped:
        """The first round is not kept. Raises TransportError."""
        step_s: dict[str, list[list[float]]] = {condition: [] for condition in CONDITIONS}
        sent_bytes: dict[str, list[int]] = {condition: [] for condition in CONDITIONS}
        for repeat in range(asked.repeats + 1):
            for turn in range(len(CONDITIONS)):
                condition = CONDITIONS[(turn + repeat) % len(CONDITIONS)]
                steps, num_bytes = self._prefill(condition, asked)
                if repeat:
                    step_s[condition].append(steps)
                    sent_bytes[condition].append(num_bytes)
        return Stepped(step_s, sent_bytes)

    def _prefill(self, condition: str, asked: TakeSteps) -> tuple[list[float], int]:
        """Durations of one prompt's steps, and the bytes that left during them."""
        try:
            if condition == "alone":
                return self._compute(asked.prompt_tokens, None), 0
            if condition == "beside":
                with _OtherTransfers(self._sender, self._bulk_rows, asked.beside_tokens) as others:
                    before = others.num_bytes
                    steps = self._compute(asked.prompt_tokens, None)
                    return steps, others.num_bytes - before
            stream = self._sender.begin(asked.prompt_tokens, self._rows, is_bulk=False)
            steps = self._compute(asked.prompt_tokens, stream)
            stream.finish(prefill_result())
            return steps, self._sender.next_acked().stats.payload_bytes
        finally:
            self._engine.abort(_REQUEST)

    def _compute(self, num_tokens: int, stream: KVStream | None) -> list[float]:
        vocab_size = self._loaded.config.vocab_size
        prompt = tuple(self._rng.randrange(vocab_size) for _ in range(num_tokens))
        self._engine.add(Request(_REQUEST, prompt, SamplingParams(max_tokens=1, temperature=0.0)), hold=True)

        def layer_written(prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
            if stream is not None:
                stream.layer_written(layer, prefilled[0].start + prefilled[0].num_tokens)

        steps = []
        while self._engine.has_work():
            self._sender.is_computing = True
            steps.append(self._engine.step(layer_written).duration_s)
            self._sender.is_computing = False
        return steps

    def _rows(self, layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
        engine = self._engine
        return engine.cache.block_bytes(layer, kv, engine.kv_blocks(_REQUEST), start_token, num_tokens)


class _OtherTransfers:
    """Another prompt's KV is on the wire from the beginning of this context to its end, transfer after transfer."""

    def __init__(self, sender: BenchSender, rows: Rows, num_tokens: int) -> None:
        self._ended_bytes = 0
        self._num_begun = 0
        self._is_over = False
        self._sender = sender
        self._rows = rows
        self._num_tokens = num_tokens

    def __enter__(self) -> "_OtherTransfers":
        self._sender.on_acked = self._acked
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        num_ended = 0
        while num_ended < self._num_begun:
            self._sender.next_acked()
            num_ended += 1
        self._sender.on_acked = None

    @property
    def num_bytes(self) -> int:
        """What has left since the beginning."""
        return self._ended_bytes + self._sender.written_bytes

    def _begin(self) -> None:
        self._num_begun += 1
        self._sender.begin(self._num_tokens, self._rows).finish(prefill_result())

    def _acked(self, event: TransferAcked) -> None:
        """In the sender's thread, before the event can be waited for."""
        self._ended_bytes += event.stats.payload_bytes
        if not self._is_over:
            self._begin()
