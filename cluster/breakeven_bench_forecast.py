"""What the planner says of moving KV and of computing it again, before either is measured. Arithmetic only.

Every input is measured apart from what is forecast: the link by its probe, prefill by an engine alone on a core at
other prompt lengths, codecs by their own benchmark.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from cluster.kv_stream import KVStream
from cluster.planner import PlanLink, break_even_bandwidth, kv_bytes_per_token, should_transfer
from transport.codec_choice import CodecRate, LinkRate, transfer_s
from transport.frame import DataSlice
from transport.messages import KVHeader
from transport.sender import KVSender

BULK: Final = "bulk"
STREAM: Final = "stream"
DELIVERIES: Final = (BULK, STREAM)

_CALIBRATION_SHARES: Final = (1 / 32, 1 / 8, 3 / 8, 3 / 4)


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds to prefill n tokens: ``fixed_s + per_token_s * n + per_pair_s * n * n`` (attention reads every earlier
    token). No part is below 0."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * tokens * tokens

    def tokens_per_s(self, tokens: int) -> float:
        """The rate for a prompt of this length, which is what the planner asks for."""
        return tokens / self.seconds(tokens)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What decides how a prompt's KV is cut. ``chunk_tokens``: of one prompt in one engine step."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(self, self.dtype)


@dataclass(frozen=True, slots=True)
class ForecastInputs:
    """All that a forecast is made from, but the link. ``codecs``: by name, raw among them."""

    prefill: PrefillCurve
    codecs: dict[str, CodecRate]
    kv: KVGeometry


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one prompt length over one link by one codec and delivery. ``transfer_ms``: what is left of the transfer when
    the prompt is computed; for a bulk one that is all of it."""

    transfer_ms: float
    recompute_ms: float
    transfer_pays: bool


def calibration_tokens(longest: int) -> list[int]:
    """Prompt lengths to measure prefill at, for a forecast of prompts up to ``longest``; at least one."""
    return sorted({max(1, round(longest * share)) for share in _CALIBRATION_SHARES})


def fit_prefill(tokens: Sequence[int], seconds: Sequence[float]) -> PrefillCurve:
    """The curve with the least relative error; with fewer than three lengths it has fewer parts.

    Raises ValueError for no length, and for a time that is not above 0.
    """
    if not tokens or min(seconds) <= 0:
        raise ValueError("a prefill curve needs at least one length, and times above 0")
    counts, times = np.asarray(tokens, dtype=float), np.asarray(seconds, dtype=float)
    columns = {"per_token_s": counts, "fixed_s": np.ones_like(counts), "per_pair_s": counts * counts}
    wanted = list(columns)[: len(set(tokens))]
    while True:
        matrix = np.stack([columns[name] for name in wanted], axis=1) / times[:, None]
        solution = np.linalg.lstsq(matrix, np.ones_like(times), rcond=None)[0]
        found: dict[str, float] = dict(zip(wanted, solution.tolist(), strict=True))
        worst = min(wanted, key=lambda name: found[name] * float(np.mean(columns[name])))
        if found[worst] >= 0:
            return PrefillCurve(**found)
        wanted.remove(worst)


def forecast(
    tokens: int, delivery: str, codec: str, link_bytes_per_s: float, delay_ms: float, inputs: ForecastInputs
) -> Forecast:
    """``link_bytes_per_s`` as probed, ``delay_ms`` one way."""
    kv, rate = inputs.kv, inputs.codecs[codec]
    overhead_s = _overhead_s(delay_ms)
    moving_s = transfer_s(tokens * kv.bytes_per_token, LinkRate(link_bytes_per_s, "measured"), rate)
    recompute_s = inputs.prefill.seconds(tokens)
    if delivery == BULK:
        left_s = moving_s
        bytes_per_token = kv.bytes_per_token * rate.ratio
        prefill_tps = inputs.prefill.tokens_per_s(tokens)
        pays = should_transfer(tokens, bytes_per_token, link_bytes_per_s, prefill_tps, overhead_s)
    else:
        left_s = max(moving_s - recompute_s, moving_s * last_piece_share(tokens, kv))
        pays = left_s + overhead_s < recompute_s
    return Forecast((left_s + overhead_s) * 1e3, recompute_s * 1e3, pays)


def break_even_bytes_per_s(
    tokens: int, delivery: str, codec: str, delay_ms: float, inputs: ForecastInputs
) -> float | None:
    """The link on which what is left of the transfer takes as long as computing again; None: no link does, the
    handoff's fixed cost alone is more.

    All of a bulk transfer has to fit into the time of a prefill; of a streamed one its last piece has to, and the
    whole into twice that time.
    """
    recompute_ms = inputs.prefill.seconds(tokens) * 1e3
    overhead_ms = _overhead_s(delay_ms) * 1e3
    wire_bytes = tokens * inputs.kv.bytes_per_token * inputs.codecs[codec].ratio
    if recompute_ms <= overhead_ms:
        return None
    if delivery == BULK:
        return break_even_bandwidth(wire_bytes, recompute_ms - overhead_ms)
    last_bytes = wire_bytes * last_piece_share(tokens, inputs.kv)
    return max(
        break_even_bandwidth(wire_bytes, 2 * recompute_ms - overhead_ms),
        break_even_bandwidth(last_bytes, recompute_ms - overhead_ms),
    )


@functools.cache
def last_piece_share(tokens: int, kv: KVGeometry) -> float:
    """Of a streamed prompt's KV, the share that cannot leave before the prompt is computed.

    Asked from the stream itself: what it hands over with the last layer of the last chunk, and after it.
    """
    header = KVHeader(
        model_fingerprint="",
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        dtype=cast(Any, kv.dtype),
        block_size=1,
        layout="",
        request_id="",
        attempt=0,
        num_tokens=tokens,
    )
    counter = _RowCounter()
    stream = KVStream(cast(KVSender, counter), 0, header, lambda *_: [], is_bulk=False)
    for end in (*range(kv.chunk_tokens, tokens, kv.chunk_tokens), tokens):
        for layer in range(kv.num_layers):
            if end == tokens and layer == kv.num_layers - 1:
                early = counter.rows
            stream.layer_written(layer, end)
    return 1 - early / (2 * kv.num_layers * tokens)


class _RowCounter:
    """Stands where a stream's sender does and counts what it is given: a layer's keys (or values) of one token each."""

    def __init__(self) -> None:
        self.rows = 0

    def send_parts(self, transfer_id: int, parts: Sequence[tuple[DataSlice, Sequence[memoryview]]]) -> None:
        self.rows += sum(part.num_tokens for part, _ in parts)


def _overhead_s(delay_ms: float) -> float:
    return PlanLink("", 1.0, delay_ms).overhead_s
