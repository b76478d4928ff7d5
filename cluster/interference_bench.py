"""What the interference benchmark asks and finds, as plain data: its arms, its phases, what its client saw of itself.

The figures of a round are a fold over that round's run log (``interference_bench_fold``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cluster.interference_bench_fold import PhaseFigures
from cluster.metrics import Slos
from cluster.profile import LoadSection, Profile

LOAD: Final = "mixed"
"""The load of the profile whose streams and bursts are measured."""

LAG_LIMIT_MS: Final = 50.0
IDLE_LIMIT: Final = 0.05
"""A round is invalid when the load generator ran later than that (p99), or when its streams had no request open for
more than this share of their time."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the same load by the same workers. ``budget``: tokens of one engine step, prompts and decodes
    together; ``is_whole``: it takes every prompt of a burst at once."""

    name: str
    mode: str  # colocated | disagg
    budget: int
    handoff: str = "never"  # always | auto
    is_whole: bool = False

    @property
    def is_disagg(self) -> bool:
        return self.mode == "disagg"


@dataclass(frozen=True, slots=True)
class InterferenceSpec:
    """``seconds``: of each phase; that with bursts goes on until the last one is answered."""

    arms: tuple[Arm, ...]
    seconds: float
    repeats: int
    slos: Slos


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What the load generator saw of itself in one phase. ``lag_ms``: how late its event loop came to what was due;
    ``burst_lag_ms``: how late a burst left, at worst. ``cpu``: of one core."""

    lag_p99_ms: float | None
    lag_max_ms: float | None
    burst_lag_ms: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Round:
    """One cluster of one arm. ``alone`` and ``bursts`` are its two phases."""

    arm: str
    repeat: int
    run: str
    alone: PhaseFigures
    bursts: PhaseFigures
    client_alone: ClientFigures
    client_bursts: ClientFigures

    @property
    def invalid(self) -> str:
        """Why the client, not the cluster, was measured; "" = it was the cluster."""
        for phase, client in ((self.alone, self.client_alone), (self.bursts, self.client_bursts)):
            lag_ms = max(client.lag_p99_ms or 0.0, client.burst_lag_ms)
            if lag_ms > LAG_LIMIT_MS:
                return f"the load generator was {lag_ms:.0f} ms late; the limit is {LAG_LIMIT_MS:g} ms"
            if phase.idle_share > IDLE_LIMIT:
                return (
                    f"streams waited for the load generator {phase.idle_share:.0%} of their time; "
                    f"the limit is {IDLE_LIMIT:.0%}"
                )
        return ""


@dataclass(slots=True)
class InterferenceResult:
    """Every round in the order in which it ran."""

    rounds: list[Round] = field(default_factory=list)


def make_arms(profile: Profile, budgets: Sequence[int], handoffs: Sequence[str]) -> tuple[Arm, ...]:
    """Co-located with whole prompts, co-located by each budget, disaggregated by each rule for handing off."""
    load, burst = profile.load[LOAD], profile.burst
    whole = burst.prompts * burst.prompt_tokens + load.streams * (load.prompt_tokens + 1)
    step = profile.engine.max_num_batched_tokens
    return (
        Arm("co-located whole prompts", "colocated", max(whole, profile.engine.max_num_seqs), is_whole=True),
        *(Arm(f"co-located {budget:,} a step", "colocated", budget) for budget in budgets),
        *(
            Arm(f"disaggregated{'' if handoff == 'always' else f' {handoff}'}", "disagg", step, handoff)
            for handoff in handoffs
        ),
    )


def arm_profile(profile: Profile, arm: Arm) -> Profile:
    """``profile`` as this arm serves by it."""
    return msgspec.structs.replace(
        profile,
        cluster=msgspec.structs.replace(
            profile.cluster, mode=arm.mode, handoff=arm.handoff if arm.is_disagg else profile.cluster.handoff
        ),
        engine=msgspec.structs.replace(
            profile.engine, max_num_batched_tokens=arm.budget, prefill_chunk_tokens=0
        ),
    )


def streams_of(profile: Profile) -> Profile:
    """``profile`` with the streams of the load and without its bursts, which are sent apart."""
    load: LoadSection = msgspec.structs.replace(profile.load[LOAD], burst_every_s=0.0)
    return msgspec.structs.replace(profile, load={LOAD: load})


def rounds_in_order(arms: Sequence[Arm], repeats: int) -> list[tuple[int, Arm]]:
    """(repeat, arm): every arm once a repeat, another one first in each, so that a slow minute hits all alike."""
    return [
        (repeat, arms[(turn + repeat) % len(arms)]) for repeat in range(repeats) for turn in range(len(arms))
    ]
