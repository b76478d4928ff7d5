"""Does moving KV beat computing it again? Arithmetic only: knows no cluster, no model file and no clock."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
HANDOFF_OVERHEAD_S: Final = 0.002
"""What a handoff costs beside moving bytes: two messages, verification, admission."""


class KVShape(Protocol):
    """What decides KV bytes; ``engine.config.ModelConfig`` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def kv_bytes_per_token(config: KVShape, dtype: str) -> int:
    """K and V of one token over all layers. Raises ValueError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE_BYTES[dtype]


def kv_transfer_ms(kv_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Time on the wire. Raises ValueError for a bandwidth that is not above 0."""
    if not bandwidth_bytes_per_s > 0:
        raise ValueError(f"bandwidth_bytes_per_s is {bandwidth_bytes_per_s}; allowed is above 0")
    return kv_bytes / bandwidth_bytes_per_s * 1000.0


def ttft_ms(queue_ms: float, prefill_ms: float, transfer_ms: float, first_decode_ms: float) -> float:
    """Time to first token when nothing overlaps."""
    return queue_ms + prefill_ms + transfer_ms + first_decode_ms


def stall_avoided_ms(
    decodes: int, prompt_tokens: int, decode_cost: float = 1.0, prefill_cost: float = 0.1
) -> float:
    """How much longer a co-located step gets when this prompt joins it; costs are ms per token.

    The step takes ``decodes * decode_cost`` alone and ``prompt_tokens * prefill_cost`` more with the prompt: the
    difference, which every one of the decodes waits for, does not depend on how many there are.
    """
    return prompt_tokens * prefill_cost


def split_worthwhile(transfer_ms: float, stall_avoided: float, max_extra_ttft_ms: float) -> bool:
    """Splitting adds at most ``max_extra_ttft_ms`` to TTFT and spares the decodes more than it adds (all ms)."""
    return transfer_ms <= max_extra_ttft_ms and stall_avoided > transfer_ms


def break_even_bandwidth(kv_bytes: float, max_transfer_ms: float) -> float:
    """The smallest bytes/s that moves ``kv_bytes`` in time. Raises ValueError for a time not above 0."""
    if not max_transfer_ms > 0:
        raise ValueError(f"max_transfer_ms is {max_transfer_ms}; allowed is above 0")
    return kv_bytes / (max_transfer_ms / 1000.0)


def should_transfer(
    n_tokens: int,
    kv_bytes_per_tok: float,
    link_bytes_per_s: float,
    prefill_tps: float,
    overhead_s: float = HANDOFF_OVERHEAD_S,
) -> bool:
    """Moving this prompt's KV takes less time than computing it again where it is needed.

    Raises ValueError for a link or a prefill rate that is not above 0.
    """
    if not prefill_tps > 0:
        raise ValueError(f"prefill_tps is {prefill_tps}; allowed is above 0")
    move_s = kv_transfer_ms(n_tokens * kv_bytes_per_tok, link_bytes_per_s) / 1000.0 + overhead_s
    return move_s < n_tokens / prefill_tps


def rho(link_bytes_per_s: float, kv_bytes_per_tok: float, prefill_tps: float) -> float:
    """Link bandwidth over B*, the one at which moving KV takes as long as computing it again."""
    return link_bytes_per_s / (kv_bytes_per_tok * prefill_tps)


def break_even_tokens(
    kv_bytes_per_tok: float,
    link_bytes_per_s: float,
    prefill_tps: float,
    overhead_s: float = HANDOFF_OVERHEAD_S,
) -> int | None:
    """The shortest prompt that ``should_transfer`` says yes to; None where rho is 1 or less, so that no prompt is
    long enough. Raises ValueError as ``should_transfer``."""
    if not prefill_tps > 0:
        raise ValueError(f"prefill_tps is {prefill_tps}; allowed is above 0")
    gain_s = 1.0 / prefill_tps - kv_transfer_ms(kv_bytes_per_tok, link_bytes_per_s) / 1000.0  # a token's
    return math.floor(overhead_s / gain_s) + 1 if gain_s > 0 else None


@dataclass(frozen=True, slots=True)
class PlanLink:
    """A link to plan for; ``bits_per_s`` above 0."""

    name: str
    bits_per_s: float
    delay_ms: float = 0.0  # one way

    @property
    def overhead_s(self) -> float:
        """What a handoff over it costs beside moving bytes."""
        return HANDOFF_OVERHEAD_S + self.delay_ms / 1000.0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One prompt length on one link. None: not computable without a prefill rate."""

    tokens: int
    link: str
    link_bits_per_s: float
    kv_bytes: int
    transfer_ms: float  # bytes on the wire, the link's delay and the handoff's overhead
    recompute_ms: float | None
    rho: float | None
    transfer_pays: bool | None
    verdict: str


def plan_table(
    kv_bytes_per_tok: int, tokens: Sequence[int], links: Iterable[PlanLink], prefill_tps: float | None
) -> list[PlanRow]:
    """A row per prompt length and link, links outermost."""
    return [_plan_row(kv_bytes_per_tok, count, link, prefill_tps) for link in links for count in tokens]


def plan_verdict(rows: Sequence[PlanRow]) -> str:
    """The whole table in one sentence, which may say no."""
    if any(row.transfer_pays is None for row in rows):
        return "no verdict: a prefill rate is needed to compare moving KV with computing it again"
    paying = [row for row in rows if row.transfer_pays]
    if not paying:
        best = max((row.rho or 0.0) for row in rows)
        return f"no: on none of these links does moving KV beat computing it again (best rho {best:.2g})"
    if len(paying) == len(rows):
        return f"yes: moving KV beats computing it again in every row ({_worst_gain(paying)})"
    refused = [row for row in rows if not row.transfer_pays]
    count = f"it depends: moving KV pays in {len(paying)} of {len(rows)} rows"
    if len(paying) <= len(refused):
        return f"{count}: {_named(paying)}"
    return f"{count}, not in {_named(refused)}"


def wrong_choice_verdict(kv_bytes_per_tok: int, links: Sequence[PlanLink], prefill_tps: float) -> str:
    """One sentence: on which links computing KV again is faster than moving it, whatever the prompt, and from which
    prompt length on the others are faster. What decodes are spared is not weighed here."""
    wrong: list[str] = []
    right: list[str] = []
    for link in links:
        bytes_per_s = link.bits_per_s / 8
        named = f"{link.name} (rho {rho(bytes_per_s, kv_bytes_per_tok, prefill_tps):.3g})"
        tokens = break_even_tokens(kv_bytes_per_tok, bytes_per_s, prefill_tps, link.overhead_s)
        if tokens is None:
            wrong.append(named)
        else:
            right.append(f"{tokens:,} tokens on {named}")
    again = "computing KV again is faster than moving it"
    if not wrong:
        return f"disaggregation is the wrong choice only below {', '.join(right)}: there {again}"
    where = f"disaggregation is the wrong choice on {', '.join(wrong)}, where {again} at any prompt length"
    return f"{where}; moving is faster from {', '.join(right)}" if right else where


def _plan_row(kv_bytes_per_tok: int, tokens: int, link: PlanLink, prefill_tps: float | None) -> PlanRow:
    kv_bytes = tokens * kv_bytes_per_tok
    bytes_per_s = link.bits_per_s / 8
    transfer_ms = kv_transfer_ms(kv_bytes, bytes_per_s) + link.overhead_s * 1000.0
    if prefill_tps is None:
        verdict = "unknown: needs a prefill rate"
        return PlanRow(tokens, link.name, link.bits_per_s, kv_bytes, transfer_ms, None, None, None, verdict)
    ratio = rho(bytes_per_s, kv_bytes_per_tok, prefill_tps)
    recompute_ms = tokens / prefill_tps * 1000.0
    pays = should_transfer(tokens, kv_bytes_per_tok, bytes_per_s, prefill_tps, link.overhead_s)
    return PlanRow(
        tokens=tokens,
        link=link.name,
        link_bits_per_s=link.bits_per_s,
        kv_bytes=kv_bytes,
        transfer_ms=transfer_ms,
        recompute_ms=recompute_ms,
        rho=ratio,
        transfer_pays=pays,
        verdict=_row_verdict(transfer_ms, recompute_ms, ratio, pays),
    )


def _row_verdict(transfer_ms: float, recompute_ms: float, ratio: float, pays: bool) -> str:
    if pays:
        return f"yes: moving is {recompute_ms / transfer_ms:.1f}x faster than computing again"
    if ratio > 1:
        return f"no: the link is fast enough, but the handoff's fixed cost outweighs {recompute_ms:.1f} ms"
    return f"no: computing again is {transfer_ms / recompute_ms:.1f}x faster than moving"


def _named(rows: Sequence[PlanRow]) -> str:
    return ", ".join(f"{row.tokens} tokens on {row.link}" for row in rows)


def _worst_gain(rows: Sequence[PlanRow]) -> str:
    gain = min((row.recompute_ms or 0.0) / row.transfer_ms for row in rows)
    return f"at least {gain:.1f}x faster"
