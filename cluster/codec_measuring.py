"""``python -m cluster.codec_measuring``: measure every KV codec on KV that an engine computed, alone in a process.

A CodecBenchSpec comes as JSON on stdin; Progress lines and at last a CodecBenchResult (or Failed) go to stdout. Which
core it runs on is up to who starts it.

KV goes the way of a transfer, without the sockets: views of the cache's own blocks, frame by frame, through the codec
into other blocks of the same cache. Codecs take turns, so that a machine that drifts drifts for all of them; the first
round is not kept.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from cluster.codec_bench import CodecBenchResult, CodecBenchSpec, CodecSamples, LayerError
from engine.benchmark_child import run_child
from engine.benchmark_result import Progress
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.weights import load_model
from transport.codec import Codec, RawCodec, RowShape
from transport.int8_codec import Int8Codec
from transport.link import MAX_FRAME_BYTES
from transport.lossless_codec import LosslessCodec

_SENT, _RECEIVED = "sent", "received"


@dataclass(slots=True)
class _Measured:
    codec: Codec
    wire_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    errors: list[tuple[LayerError, LayerError]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)  # per prompt


@dataclass(frozen=True, slots=True)
class _Frame:
    shape: RowShape
    source: list[memoryview]
    target: list[memoryview]


class CodecBenchmark:
    """An engine and the codecs. Raises ModelError or ValueError for what cannot be loaded."""

    def __init__(self, spec: CodecBenchSpec) -> None:
        self._spec = spec
        self._loaded = load_model(spec.model, spec.dtype, spec.engine.device, spec.engine.kernels_in_use)
        self._engine = Engine(spec.engine, self._loaded)
        self._measured = [_Measured(codec) for codec in (RawCodec(), Int8Codec(), LosslessCodec())]

    def run(self, report: Callable[[Progress], None]) -> CodecBenchResult:
        """Measure everything; ``report`` hears before each part what is next."""
        spec, cache = self._spec, self._engine.cache
        total = spec.repeats + 1 + len(spec.prompts)
        self._prefill(spec.kv_prompt)
        self._engine.reserve(_request(_RECEIVED, spec.kv_prompt, 1))
        frames = list(self._frames(len(spec.kv_prompt)))
        for number in range(spec.repeats + 1):
            stage = f"round {number} of {spec.repeats}" if number else "warm-up"
            report(Progress(stage, f"KV of {len(spec.kv_prompt):,} tokens", number, total))
            for measured in self._measured:
                self._time(measured, frames, keep=number > 0)
                if number == spec.repeats:
                    measured.errors = [self._layer_errors(layer) for layer in range(cache.num_layers)]
        self._free()
        for index, prompt in enumerate(spec.prompts):
            what = f"prompt {index + 1} of {len(spec.prompts)}"
            report(Progress("outputs", what, spec.repeats + 1 + index, total))
            first_token_id = self._prefill(prompt)
            for measured in self._measured:
                measured.outputs.append(self._decode(measured.codec, prompt, first_token_id))
            self._free()
        raw_bytes = sum(frame.shape.raw_bytes for frame in frames)
        raw = self._measured[0]
        return CodecBenchResult(
            dtype=self._loaded.dtype,
            raw_bytes=raw_bytes,
            frame_bytes=max(frame.shape.raw_bytes for frame in frames),
            torch_version=str(torch.__version__),
            codecs=[_samples(measured, raw.outputs) for measured in self._measured],
        )

    def _prefill(self, prompt: tuple[int, ...]) -> int:
        """Computes a prompt whose KV stays; returns its first token."""
        self._engine.add(_request(_SENT, prompt, 1), hold=True)
        while True:
            tokens = self._engine.step().new_tokens
            if tokens:
                return tokens[0].token_id

    def _free(self) -> None:
        for name in (_SENT, _RECEIVED):
            self._engine.abort(name)

    def _frames(self, num_tokens: int) -> Iterator[_Frame]:
        """All KV of the sent sequence and where it belongs in the received one, cut as a fast link's sender does."""
        engine, cache = self._engine, self._engine.cache
        sent, received = engine.kv_blocks(_SENT), engine.kv_blocks(_RECEIVED)
        step = max(1, MAX_FRAME_BYTES // (cache.block_size * cache.row_bytes)) * cache.block_size
        for layer in range(cache.num_layers):
            for kv in (0, 1):
                for start in range(0, num_tokens, step):
                    count = min(step, num_tokens - start)
                    yield _Frame(
                        RowShape(count * cache.num_kv_heads, cache.head_dim, self._loaded.dtype),
                        cache.block_bytes(layer, kv, sent, start, count),
                        cache.block_bytes(layer, kv, received, start, count),
                    )

    def _time(self, measured: _Measured, frames: list[_Frame], *, keep: bool) -> None:
        codec = measured.codec
        room = memoryview(bytearray(max(codec.wire_bytes_range(frame.shape)[1] for frame in frames)))
        wire_bytes, encode_s, decode_s = 0, 0.0, 0.0
        cpu_began_s = time.process_time()
        for frame in frames:
            began_at = time.monotonic()
            num_bytes = codec.encode(frame.source, frame.shape, room)
            encoded_at = time.monotonic()
            codec.decode(room[:num_bytes], frame.shape, frame.target)
            decode_s += time.monotonic() - encoded_at
            encode_s += encoded_at - began_at
            wire_bytes += num_bytes
        if keep:
            measured.encode_s.append(encode_s)
            measured.decode_s.append(decode_s)
            measured.wire_bytes = wire_bytes
            measured.elapsed_s += encode_s + decode_s
            measured.cpu_s += time.process_time() - cpu_began_s

    def _layer_errors(self, layer: int) -> tuple[LayerError, LayerError]:
        """Of keys and of values, between the sent and the received sequence."""
        return self._layer_error(layer, 0), self._layer_error(layer, 1)

    def _layer_error(self, layer: int, kv: int) -> LayerError:
        num_tokens = len(self._spec.kv_prompt)
        sent, received = (
            self._engine.cache.block_bytes(layer, kv, self._engine.kv_blocks(name), 0, num_tokens)
            for name in (_SENT, _RECEIVED)
        )
        before, after = (
            torch.frombuffer(bytearray(b"".join(views)), dtype=self._engine.cache.dtype).double()
            for views in (sent, received)
        )
        difference = (before - after).abs()
        return LayerError(
            mean=float(difference.mean()),
            max=float(difference.max()),
            rms=float(before.square().mean().sqrt()),
        )

    def _decode(self, codec: Codec, prompt: tuple[int, ...], first_token_id: int) -> list[int]:
        """Greedy output tokens of a prompt whose KV came through the codec, the first one included."""
        engine, output_tokens = self._engine, self._spec.output_tokens
        engine.reserve(_request(_RECEIVED, prompt, output_tokens))
        for frame in self._frames(len(prompt)):
            wire = memoryview(bytearray(codec.wire_bytes_range(frame.shape)[1]))
            num_bytes = codec.encode(frame.source, frame.shape, wire)
            codec.decode(wire[:num_bytes], frame.shape, frame.target)
        engine.adopt(_RECEIVED, first_token_id, exact=False)
        tokens = [first_token_id]
        while len(tokens) < output_tokens:
            tokens += [token.token_id for token in engine.step().new_tokens]
        return tokens


def _request(name: str, prompt: tuple[int, ...], output_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True))


def _samples(measured: _Measured, raw_outputs: list[list[int]]) -> CodecSamples:
    same = [
        [ours == raws for ours, raws in zip(output, raw, strict=True)]
        for output, raw in zip(measured.outputs, raw_outputs, strict=True)
    ]
    return CodecSamples(
        name=measured.codec.name,
        wire_bytes=measured.wire_bytes,
        encode_s=tuple(measured.encode_s),
        decode_s=tuple(measured.decode_s),
        cpu_share=measured.cpu_s / measured.elapsed_s,
        key_errors=tuple(keys for keys, _ in measured.errors),
        value_errors=tuple(values for _, values in measured.errors),
        agreeing=tuple(sum(one[1:]) for one in same),
        first_divergence=tuple(None if all(one) else one.index(False) for one in same),
    )


def main() -> int:
    """Returns the exit code: 0, or 2 after Failed."""
    return run_child(CodecBenchSpec, CodecBenchmark)


if __name__ == "__main__":
    sys.exit(main())
