"""The soak: a drill of very many random faults, made from a seed. Pure; the same numbers give the same drill.

Each fault happens a random while after the one before is over, under a load of every kind. Beside them clients leave.
"""

import random
from collections.abc import Callable
from typing import Any, Final

from cluster.drill import HEALED, Drill, FaultRule, RequestGroup
from cluster.drill_expectation import Expectation

NAME: Final = "soak"
DEFAULT_FAULTS: Final = 1000
MAX_FAULTS: Final = 100_000
_MEAN_PAUSE_S: Final = 0.7
_SECONDS_PER_FAULT: Final = 30.0
"""When the round is cut off: far more than any fault needs, so only what is stuck is cut off."""

_LEAVING_SHARE: Final = 10
"""One in so many faults is a client that leaves."""

_GROUPS: Final = {
    "short": RequestGroup(streams=2, prompts=8, prompt_tokens=60, max_tokens=48),
    "seeded": RequestGroup(streams=1, prompts=8, prompt_tokens=120, max_tokens=64, temperature=1.0),
    "long": RequestGroup(streams=1, prompts=6, prompt_tokens=900, max_tokens=24),
    "leaving": RequestGroup(streams=1, prompts=4, prompt_tokens=200, max_tokens=120),
}
_SETTINGS: Final[dict[str, Any]] = {
    "cluster.prefill": 2,
    "cluster.decode": 2,
    "cluster.max_attempts": 20,
    "engine.prefill_chunk_tokens": 128,
}
_EXPECT: Final = (
    Expectation(figure="failed_without_rule", bound=0),
    Expectation(figure="without_retry_after", bound=0),
    Expectation(figure="recovered_s", sense="<=", bound=60),
)
_MEMORY: Final = Expectation(figure="memory_growth_mib", sense="<=", bound=64)
_MEMORY_FROM: Final = 200
"""Fewer faults are over before the processes hold what they need."""


def soak_drill(num_faults: int, seed: int) -> Drill:
    """Raises ValueError for a number of faults that is not allowed."""
    if not 1 <= num_faults <= MAX_FAULTS:
        raise ValueError(f"{num_faults} faults; allowed is 1 to {MAX_FAULTS}")
    rng = random.Random(f"soak {seed}")
    num_leaving = num_faults // _LEAVING_SHARE
    kinds = [make for make, weight in _KINDS for _ in range(weight)]
    return Drill(
        name=NAME,
        title=f"{num_faults} random faults one after the other, seed {seed}, under mixed load",
        promise="No request fails but those whose rule says so, no token differs, nothing is left behind.",
        requests=_GROUPS,
        faults=(
            *(rng.choice(kinds)(rng) for _ in range(num_faults - num_leaving)),
            *_leave(rng, num_leaving),
        ),
        expect=(*_EXPECT, _MEMORY) if num_faults >= _MEMORY_FROM else _EXPECT,
        settings=_SETTINGS,
        timeout_s=60.0 + num_faults * _SECONDS_PER_FAULT,
    )


def _rule(rng: random.Random, fault: str, target: str, **more: Any) -> FaultRule:
    pause_s = min(rng.expovariate(1 / _MEAN_PAUSE_S), 5 * _MEAN_PAUSE_S)
    return FaultRule(fault=fault, target=target, on=HEALED, after_s=round(pause_s, 3), **more)


def _worker(rng: random.Random) -> str:
    return rng.choice(("prefill-0", "prefill-1", "decode-0", "decode-1"))


def _prefill(rng: random.Random) -> str:
    return rng.choice(("prefill-0", "prefill-1"))


def _hang(rng: random.Random) -> FaultRule:
    """For ever, or shorter than anybody notices."""
    return _rule(rng, "hang", _worker(rng), seconds=rng.choice((0.0, 0.3, 1.0)))


def _leave(rng: random.Random, count: int) -> list[FaultRule]:
    """Every third client of its group, in a random phase. They wait for nobody, and nobody for them."""
    phases = ("request_dispatched", "prefill_started", "decode_admitted", "tokens_delivered")
    return [
        FaultRule(fault="leave", on=rng.choice(phases), of="leaving", requests=3 * (number + 1))
        for number in range(count)
    ]


_KINDS: Final[tuple[tuple[Callable[[random.Random], FaultRule], int], ...]] = (
    (lambda rng: _rule(rng, "kill", _worker(rng)), 6),
    (lambda rng: _rule(rng, "kill", rng.choice(("every-prefill", "every-decode"))), 1),
    (lambda rng: _rule(rng, "terminate", _worker(rng)), 1),
    (_hang, 3),
    (lambda rng: _rule(rng, "kill", "router"), 1),
    (lambda rng: _rule(rng, "hang", "router", seconds=0.5), 1),
    (lambda rng: _rule(rng, "corrupt", _prefill(rng), seconds=rng.choice((0.0, 1.0))), 3),
    (lambda rng: _rule(rng, "cut", _prefill(rng), seconds=rng.choice((0.0, 1.0))), 3),
    (lambda rng: _rule(rng, "stall", _prefill(rng), seconds=1.0), 1),
    (lambda rng: _rule(rng, "slow", "link", bandwidth="50mbit", seconds=1.5), 1),
    (lambda rng: _rule(rng, "restart", _worker(rng), seconds=20.0), 1),
)
"""How each kind is made, and how often it comes."""
