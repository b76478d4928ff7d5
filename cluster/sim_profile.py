"""A profile's cluster as the simulation takes it, and what a sweep over its splits comes to as one document. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cluster.dispatch import RouterLimits
from cluster.kv_stream import MIN_PIECE_BYTES
from cluster.metrics import Slos
from cluster.planner import PlanLink
from cluster.profile import Profile
from cluster.sim_cost import StepCosts
from cluster.sim_spec import SimLink, SimOverheads, SimSpec
from cluster.sim_sweep import Sweep, verdict, when_not
from cluster.slo import format_slos
from cluster.trace import ScaledTrace
from engine.config import DTYPE_BYTES, EngineConfig, ModelConfig

SCHEMA: Final = 1

MANY_REQUESTS: Final = 50_000
"""From here on KV is booked in larger blocks: the pool's free blocks are then known to a larger block, no better."""

_BLOCKS_A_PROMPT: Final = 8


def sim_spec(
    profile: Profile,
    engine: EngineConfig,
    model: ModelConfig,
    dtype: str,
    num_blocks: int,
    costs: StepCosts,
    link: PlanLink,
    slos: Slos,
    trace: ScaledTrace,
) -> SimSpec:
    """Of one prefill and one decode worker; ``dataclasses.replace`` gives the others.

    Prefix caching is simulated where the trace says what prompts share; without that no prompt is like another.
    """
    token_bytes = model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]  # of a layer's keys
    streams = profile.kv.delivery == "stream" and profile.kv.path == "v2"
    block_size, num_blocks = _blocks(engine.block_size, num_blocks, trace)
    return SimSpec(
        prefill=1,
        decode=1,
        costs=costs,
        link=SimLink(
            link.bits_per_s / 8, link.delay_ms / 1e3, -(-MIN_PIECE_BYTES // token_bytes) if streams else 0
        ),
        slos=slos,
        limits=RouterLimits(
            max_queue=profile.router.max_queue,
            queue_timeout_s=profile.router.queue_timeout_s,
            max_attempts=profile.cluster.max_attempts,
            fallback=profile.cluster.fallback == "on",
            handoff="always",
            kv_path=profile.kv.path,
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        kv_bytes_per_token=model.kv_bytes_per_token(dtype),
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_caching=engine.enable_prefix_caching and any(request.prefix_ids for request in trace.requests),
        overheads=SimOverheads(),
    )


def _blocks(block_size: int, num_blocks: int, trace: ScaledTrace) -> tuple[int, int]:
    """Size and number of the simulated pool's blocks."""
    if len(trace.requests) < MANY_REQUESTS:
        return block_size, num_blocks
    mean = sum(request.prompt_tokens for request in trace.requests) / len(trace.requests)
    times = max(1, min(round(mean / _BLOCKS_A_PROMPT / block_size), num_blocks // 256))
    return block_size * times, num_blocks // times


def sweep_document(
    found: Sweep,
    spec: SimSpec,
    trace: ScaledTrace,
    link_name: str,
    model: Mapping[str, Any],
    costs_from: str,
    simulated_s: float,
) -> dict[str, Any]:
    """JSON-ready. Times in ms where a name says so; shares are 0 to 1; rates are per second of the trace's own time."""
    return {
        "schema": SCHEMA,
        "question": "prefill and decode workers for a trace",
        "model": dict(model),
        "costs_from": costs_from,
        "trace": {
            "detail": trace.detail,
            "requests": len(trace.requests),
            "cut_prompts": trace.cut_prompts,
            "cut_outputs": trace.cut_outputs,
        },
        "slo": format_slos(found.slos),
        "nodes": found.nodes,
        "link": {"name": link_name, "bytes_per_s": _finite(spec.link.bytes_per_s)},
        "worker": {
            "num_blocks": spec.num_blocks,
            "block_size": spec.block_size,
            "max_num_seqs": spec.max_num_seqs,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "prefix_caching": spec.prefix_caching,
        },
        "overheads": _overheads(spec.overheads),
        "splits": [_row(split) for split in found.splits],
        "colocated": _row(found.colocated),
        "best": found.best.name,
        "verdict": verdict(found),
        "when_not": when_not(found),
        "simulated_s": simulated_s,
    }


def _overheads(over: SimOverheads) -> dict[str, Any]:
    return {
        "router_s": over.router_s,
        "answer_s": over.answer_s,
        "handoff_s": over.handoff_s,
        "step_s": over.step.mean_s,
        "full_step_s": over.full_step.mean_s,
    }


def _row(figures: Any) -> dict[str, Any]:
    return {"name": figures.name, **dataclasses.asdict(figures), "good_share": figures.good_share}


def _finite(value: float) -> float | None:
    """None for what JSON cannot hold: an unlimited link."""
    return value if value != float("inf") else None
