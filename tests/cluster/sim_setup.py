"""Specs for simulated clusters: costs that a person can compute with."""

from typing import Any

from cluster.dispatch import RouterLimits
from cluster.metrics import Slos
from cluster.sim_cost import DecodePoint, PrefillPoint, StepCosts
from cluster.sim_spec import SimLink, SimOverheads, SimSpec
from cluster.trace import TraceRequest

LIMITS = RouterLimits(
    max_queue=100_000, queue_timeout_s=1e9, max_attempts=5, fallback=True, handoff="always", kv_path="v2"
)
NO_OVERHEADS = SimOverheads(router_s=0.0, answer_s=0.0, handoff_s=0.0)


def plain_costs(
    prefill_s_per_token: float = 1e-3, decode_s: float = 0.01, max_num_seqs: int = 32
) -> StepCosts:
    """A prompt takes as long per token whatever its length, and as one token more; a decode step is always the same."""
    prefills = [PrefillPoint(tokens, (tokens + 1) * prefill_s_per_token) for tokens in (0, 100, 1000)]
    decodes = [DecodePoint(batch, context, decode_s) for batch in (1, 32) for context in (10, 1000)]
    return StepCosts(prefills, decodes, max_num_seqs)


def sim_spec(prefill: int = 1, decode: int = 1, **changes: Any) -> SimSpec:
    given: dict[str, Any] = {
        "costs": plain_costs(),
        "link": SimLink(bytes_per_s=1e12),
        "slos": Slos(),
        "limits": LIMITS,
        "num_blocks": 4000,
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 16_000,
        "kv_bytes_per_token": 1000,
        "overheads": NO_OVERHEADS,
    }
    return SimSpec(prefill=prefill, decode=decode, **(given | changes))


def every(interval_s: float, count: int, prompt_tokens: int, output_tokens: int) -> list[TraceRequest]:
    return [TraceRequest(index * interval_s, prompt_tokens, output_tokens) for index in range(count)]
