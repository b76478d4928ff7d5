"""Which values a profile may hold. Knows the plain form (nested dicts) of a profile, not its types."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from cluster.targets import UnknownTarget, link_goal
from cluster.units import parse_bits_per_s, parse_bytes
from transport.codec_choice import CODEC_CHOICES

MAX_WORKERS: Final = 32
"""Processes on one machine: more is a slip of the finger."""

AUTO: Final = "auto"


def parse_kv_cache(text: str) -> int:
    """Bytes of one worker's KV pool; 0 for "auto", a share of the free memory. Raises ValueError as parse_bytes."""
    try:
        return 0 if text == AUTO else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO}") from None


CHOICES: Final = {
    "cluster.mode": ("disagg", "colocated"),
    "cluster.handoff": ("always", "auto", "never"),
    "cluster.fallback": ("on", "off"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "kv.codec": CODEC_CHOICES,
    "kv.path": ("v1", "v2"),
    "kv.delivery": ("stream", "bulk"),
    "link.backend": ("auto", "netns", "pacing", "none"),
}
_AT_LEAST: Final = {
    "cluster.prefill": 0,
    "cluster.decode": 1,
    "cluster.cores_per_worker": 1,
    "cluster.max_attempts": 1,
    "engine.block_size": 1,
    "engine.max_num_seqs": 1,
    "engine.max_num_batched_tokens": 1,
    "engine.prefill_chunk_tokens": 0,
    "kv.accept_timeout_s": 0.1,
    "kv.stall_timeout_s": 0.1,
    "link.delay_ms": 0,
    "link.jitter_ms": 0,
    "link.rho": 0,
    "router.max_queue": 0,
    "router.queue_timeout_s": 0.1,
    "router.client_timeout_s": 0.1,
    "supervisor.heartbeat_timeout_s": 0.2,
    "supervisor.start_timeout_s": 1,
    "supervisor.step_timeout_s": 0.1,
    "supervisor.stop_grace_s": 0.1,
    "supervisor.backoff_first_s": 0.01,
    "supervisor.backoff_max_s": 0.01,
    "supervisor.backoff_reset_s": 0,
    "supervisor.crash_loop_exits": 1,
    "supervisor.crash_loop_window_s": 0.1,
    "burst.prompts": 1,
    "burst.prompt_tokens": 1,
    "burst.max_tokens": 1,
}
_LOAD_AT_LEAST: Final = {
    "prompt_tokens": 1,
    "max_tokens": 1,
    "max_in_flight": 1,
    "streams": 0,
    "temperature": 0,
    "seed": 0,
    "burst_every_s": 0,
}
_PARSED: Final[dict[str, Callable[[str], float]]] = {
    "link.bandwidth": parse_bits_per_s,
    "engine.kv_cache": parse_kv_cache,
    "router.max_body": parse_bytes,
}


def problem_in(plain: dict[str, Any]) -> str | None:
    """The first value that is not allowed, as "key is value; allowed is ..."; None when all are."""
    return next(_problems(plain), None)


def _problems(plain: dict[str, Any]) -> Iterator[str]:
    def value_of(key: str) -> Any:
        section, name = key.split(".")
        return plain[section][name]

    for key, number in _numbers(plain):
        if not math.isfinite(number):
            yield f"{key} is {number}; allowed is a finite number"
    for key, allowed in CHOICES.items():
        if value_of(key) not in allowed:
            yield f"{key} is {value_of(key)!r}; allowed: {', '.join(allowed)}"
    for key, low in _AT_LEAST.items():
        if value_of(key) < low:
            yield f"{key} is {value_of(key)}; allowed is {low} or more"
    for key, parse in _PARSED.items():
        try:
            size = parse(value_of(key))
        except ValueError as error:
            yield f"{key} is {error}"
        else:
            if size <= 0 and parse is parse_bytes:
                yield f"{key} is {value_of(key)!r}; allowed is a size above 0"
            if size <= 0 and parse is parse_kv_cache and value_of(key) != AUTO:
                yield f"{key} is {value_of(key)!r}; allowed is a size above 0, or {AUTO}"
    yield from _combination_problems(plain)
    yield from _goal_problems(plain["link"])
    yield from _load_problems(plain["load"])


def _combination_problems(plain: dict[str, Any]) -> Iterator[str]:
    port, loss = plain["router"]["port"], plain["link"]["loss"]
    if not 0 <= port <= 65535:
        yield f"router.port is {port}; allowed is 0 (any free) to 65535"
    if not 0.0 <= loss < 1.0:
        yield f"link.loss is {loss}; allowed is 0 to below 1"
    if plain["cluster"]["mode"] == "disagg" and plain["cluster"]["prefill"] < 1:
        yield "cluster.prefill is 0; mode disagg needs 1 or more"
    num_workers = plain["cluster"]["prefill"] + plain["cluster"]["decode"]
    if num_workers > MAX_WORKERS:
        yield f"cluster.prefill + cluster.decode is {num_workers}; allowed is {MAX_WORKERS} or fewer"
    if plain["engine"]["kv_cache"] == AUTO and not plain["model"]["device"].startswith("cpu"):
        yield f"engine.kv_cache is 'auto'; with model.device {plain['model']['device']!r} allowed is a size"
    budget, num_seqs = plain["engine"]["max_num_batched_tokens"], plain["engine"]["max_num_seqs"]
    chunk = plain["engine"]["prefill_chunk_tokens"]
    if chunk > budget:
        yield (
            f"engine.prefill_chunk_tokens is {chunk}; allowed is engine.max_num_batched_tokens ({budget}) or less, "
            "0 = the whole of it"
        )
    if budget < num_seqs:
        yield (
            f"engine.max_num_batched_tokens is {budget}; allowed is engine.max_num_seqs ({num_seqs}) or more"
        )


def _goal_problems(link: dict[str, Any]) -> Iterator[str]:
    if link["target"] and link["rho"] > 0:
        yield f"link.rho is {link['rho']:g} beside link.target {link['target']!r}; allowed is one of the two"
    try:
        goal = link_goal(link["target"], link["rho"], parse_bits_per_s(link["bandwidth"]))
    except UnknownTarget as error:
        yield f"link.target: {error}"
        return
    if goal is not None and link["backend"] == "none":
        key = "link.target" if link["target"] else "link.rho"
        yield f"link.backend is 'none' and {key} is set; a link that is to be shaped needs auto, netns or pacing"


def _load_problems(loads: dict[str, Any]) -> Iterator[str]:
    for name, load in loads.items():
        if load["rate_per_s"] <= 0:
            yield f"load.{name}.rate_per_s is {load['rate_per_s']}; allowed is above 0"
        for key, low in _LOAD_AT_LEAST.items():
            if load[key] < low:
                yield f"load.{name}.{key} is {load[key]}; allowed is {low} or more"


def _numbers(plain: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", value
