"""Where is a prompt prefilled: on a prefill worker, with its KV transferred, or on the decode worker itself?

Pure arithmetic on what was measured; knows no cluster and no clock. Remote costs this client the wait at the prefill
worker, the prefill, and what of the transfer is not hidden behind it. Local costs this client the wait at the decode
worker and the prefill, and every stream that decodes there the time in which the prompt is computed instead. Local is
taken where that sum is clearly the smaller one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MIN_GAIN: Final = 0.1
"""So much less than remote a local prefill must cost: it takes the decode worker's time from streams yet to come."""

REMOTE: Final = "remote"
LOCAL: Final = "local"


@dataclass(frozen=True, slots=True)
class PrefillSite:
    """A worker that could compute the prompt, as it is now.

    ``own_s``: the prompt alone; ``backlog_s``: the prompts before it; ``short_tokens``: of these, prompts that fit
    one step; ``step_s``: a step full of prompts, at the speed of now; ``budget``: tokens of one step.
    ``streams`` sequences decode there, one token each in ``decode_step_s``.
    """

    own_s: float
    backlog_s: float = 0.0
    short_tokens: int = 0
    step_s: float = 0.0
    budget: int = 512
    streams: int = 0
    decode_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OnWire:
    """A transfer, in seconds from now: its bytes come from ``begin_s`` to ``computed_s`` and have left at ``end_s``."""

    begin_s: float
    computed_s: float
    end_s: float

    def backlog_s(self, at_s: float) -> float:
        """How long what has come by then still keeps the link busy."""
        if at_s >= self.computed_s:
            return max(0.0, self.end_s - at_s)
        if at_s <= self.begin_s:  # also of a prompt whose bytes all come at one moment
            return 0.0
        share = (at_s - self.begin_s) / (self.computed_s - self.begin_s)
        return share * (self.end_s - self.computed_s)

    def after(self, s: float) -> "OnWire":
        """The same, seen so much later."""
        return OnWire(self.begin_s - s, self.computed_s - s, self.end_s - s)


@dataclass(frozen=True, slots=True)
class TransferPath:
    """The way from prefill to decode worker. ``wire_s``: this prompt's KV, first byte encoded to last byte decoded;
    ``others``: the transfers before it; ``rest_s``: what a handoff of this size took beyond its wire time;
    ``hides``: KV leaves while the prompt is computed."""

    wire_s: float
    others: Sequence[OnWire] = ()
    rest_s: float = 0.0
    hides: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way. The parts of the time from dispatch to first token, and ``stall_ms``: what the ``streams`` of the worker
    that computes the prompt wait longer, all together. ``transfer_ms``: prefill's end to first token, 0 for local.

    ``wire_tail_s`` is what of ``transfer_ms`` the bytes explain.
    """

    way: str  # remote | local
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    stall_ms: float
    streams: int
    wire_tail_s: float = 0.0
    on_wire: OnWire | None = None  # None for local

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.transfer_ms

    @property
    def total_ms(self) -> float:
        return self.ttft_ms + self.stall_ms

    def __str__(self) -> str:
        parts = [f"queue {self.queue_ms:.1f}", f"prefill {self.prefill_ms:.1f}"]
        if self.way == REMOTE:
            parts.append(f"transfer {self.transfer_ms:.1f}")
        if self.way == LOCAL or self.stall_ms:
            streams = f"{self.streams} stream{'' if self.streams == 1 else 's'}"
            parts.append(f"stall of {streams} {self.stall_ms:.1f}")
        return f"{self.way} {self.total_ms:.1f} ms ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class HandoffChoice:
    """``choice`` is remote or local; ``reason`` is printable. Without both estimates it is remote, unweighed."""

    choice: str
    reason: str
    remote: Estimate | None = None
    local: Estimate | None = None

    @property
    def chosen(self) -> Estimate | None:
        return self.remote if self.choice == REMOTE else self.local


def estimate_remote(prompt_tokens: int, site: PrefillSite, path: TransferPath) -> Estimate:
    """A transfer that hides begins with the prefill, any other at its end; both wait for what is on the link."""
    queue_s, prefill_s, stall_s = _prefill(prompt_tokens, site)
    prefill_end_s = queue_s + prefill_s
    begin_s = queue_s if path.hides else prefill_end_s
    backlog_s = sum(other.backlog_s(begin_s) for other in path.others)
    wire_end_s = max(begin_s + backlog_s + path.wire_s, prefill_end_s)
    tail_s = wire_end_s - prefill_end_s
    return Estimate(
        way=REMOTE,
        queue_ms=queue_s * 1e3,
        prefill_ms=prefill_s * 1e3,
        transfer_ms=max(0.0, tail_s + path.rest_s) * 1e3,
        stall_ms=stall_s * 1e3,
        streams=site.streams,
        wire_tail_s=tail_s,
        on_wire=OnWire(begin_s, prefill_end_s, wire_end_s),
    )


def estimate_local(prompt_tokens: int, site: PrefillSite) -> Estimate:
    queue_s, prefill_s, stall_s = _prefill(prompt_tokens, site)
    return Estimate(LOCAL, queue_s * 1e3, prefill_s * 1e3, 0.0, stall_s * 1e3, site.streams)


def choose_handoff(remote: Estimate, local: Estimate) -> HandoffChoice:
    """Local where it costs clearly less. The reason says both sums and their parts."""
    if local.total_ms < (1 - MIN_GAIN) * remote.total_ms:
        return HandoffChoice(LOCAL, f"{local} beats {remote}", remote, local)
    if local.total_ms < remote.total_ms:
        return HandoffChoice(REMOTE, f"{local} is not {MIN_GAIN * 100:.0f} % below {remote}", remote, local)
    return HandoffChoice(REMOTE, f"{remote} beats {local}", remote, local)


def _prefill(prompt_tokens: int, site: PrefillSite) -> tuple[float, float, float]:
    """Queue, prefill and stall in seconds. Each step that computes a piece of the prompt gives every stream a token."""
    steps = math.ceil(prompt_tokens / max(1, site.budget - site.streams))
    decode_s = steps * site.decode_step_s if site.streams else 0.0
    return _queue_s(prompt_tokens, site), site.own_s + decode_s, site.streams * site.own_s


def _queue_s(prompt_tokens: int, site: PrefillSite) -> float:
    """Until the prompt's own work begins, so that with ``own_s`` it gives the end.

    The engine's rule (``engine/budget.py``): in order of arrival, but a prompt that fits one step shares half of each
    with its likes. A step that runs now is half over on average.
    """
    running_s = site.decode_step_s / 2 if site.streams else 0.0
    if site.backlog_s <= 0:
        return running_s
    in_turn_s = running_s + site.backlog_s
    if prompt_tokens > site.budget:
        return in_turn_s
    steps = math.ceil((site.short_tokens + prompt_tokens) / max(1, site.budget // 2))
    return min(in_turn_s, site.step_s / 2 + max(0.0, steps * site.step_s - site.own_s))
