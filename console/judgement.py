"""Does disaggregation pay in this run, in words and figures. A fold over what was measured; ready to say no.

Two questions, answered from this run's own requests:

- Is moving KV faster than computing it again? Tokens moved per second that the wire was busy, against the prefill rate.
- What did each mode give its users? ITL and TTFT of the requests that ran in it, over its last MODE_WINDOW_S.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.events import TransferCompleted
from console.series import percentile
from console.text_format import format_ms, format_ratio

MODE_WINDOW_S: Final = 60.0
KEPT_GAPS: Final = 4096
KEPT_TTFTS: Final = 1024
KEPT_TRANSFERS: Final = 64
MIN_GAPS: Final = 100
"""Fewer say nothing about a 99th percentile."""
MIN_TTFTS: Final = 3
CLEAR: Final = 1.1
"""Two figures closer together than this factor count as equal."""

PAYS: Final = "PAYS"
PAYS_NOT: Final = "DOES NOT PAY"
MIXED: Final = "MIXED"
OPEN: Final = "OPEN"


@dataclass(slots=True)
class ModeMeasures:
    """What the requests that ran in one mode experienced; newest values, (at in s, value in ms)."""

    gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_GAPS))
    ttfts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_TTFTS))
    loads: str = ""  # names of the loads that ran at the newest value

    @property
    def last_at(self) -> float | None:
        return max((pool[-1][0] for pool in (self.gaps, self.ttfts) if pool), default=None)

    def figures(self) -> "ModeFigures | None":
        """Over the last MODE_WINDOW_S in which the mode served; None while there is too little to say."""
        last_at = self.last_at
        if last_at is None:
            return None
        gaps = sorted(ms for at, ms in self.gaps if at > last_at - MODE_WINDOW_S)
        ttfts = sorted(ms for at, ms in self.ttfts if at > last_at - MODE_WINDOW_S)
        if len(gaps) < MIN_GAPS or len(ttfts) < MIN_TTFTS:
            return None
        return ModeFigures(percentile(gaps, 0.99), percentile(ttfts, 0.5), last_at, self.loads)


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """Milliseconds; ``last_at`` is when the mode's newest value was seen."""

    itl_p99_ms: float
    ttft_p50_ms: float
    last_at: float
    loads: str

    @property
    def text(self) -> str:
        return f"ITL p99 {format_ms(self.itl_p99_ms)}, TTFT p50 {format_ms(self.ttft_p50_ms)}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """``answer`` PAYS | DOES NOT PAY | MIXED | OPEN; ``modes`` is the sentence behind it, ``transfer`` the other."""

    answer: str
    modes: str
    transfer: str


class ModeBook:
    """Fed by the request book: each value under the mode its request runs in."""

    def __init__(self) -> None:
        self.modes: dict[str, ModeMeasures] = {"disagg": ModeMeasures(), "colocated": ModeMeasures()}
        self.transfers: deque[TransferCompleted] = deque(maxlen=KEPT_TRANSFERS)
        self.loads = "off"

    def add_gaps(self, mode: str, gaps: Iterable[tuple[float, float]]) -> None:
        measures = self.modes.get(mode)
        if measures is not None:
            measures.gaps.extend(gaps)
            measures.loads = self.loads

    def add_ttft(self, mode: str, at: float, ttft_ms: float) -> None:
        measures = self.modes.get(mode)
        if measures is not None:
            measures.ttfts.append((at, ttft_ms))
            measures.loads = self.loads

    def moved_tokens_per_s(self) -> float | None:
        """Tokens whose KV was moved per second of busy wire, over the newest transfers; None before the first."""
        busy_s = sum(done.busy_s for done in self.transfers)
        return sum(done.tokens for done in self.transfers) / busy_s if busy_s > 0 else None


def judge(book: ModeBook, mode: str, prefill_tokens_per_s: float, rho: float | None) -> Judgement:
    """``prefill_tokens_per_s`` 0 = not measured; ``rho`` is what the probed link promises."""
    answer, modes = _judge_modes(book, mode)
    return Judgement(answer, modes, _judge_transfer(book, prefill_tokens_per_s, rho))


def _judge_transfer(book: ModeBook, prefill_tokens_per_s: float, rho: float | None) -> str:
    promised = f"rho {format_ratio(rho)}" if rho is not None else "rho not known"
    moved = book.moved_tokens_per_s()
    if moved is None or prefill_tokens_per_s <= 0:
        expected = "" if rho is None else f": transfer should {'win' if rho > 1 else 'lose'}"
        return f"{promised}{expected}; no transfer measured yet"
    ratio = moved / prefill_tokens_per_s
    if ratio >= CLEAR:
        verdict = f"transfer wins by {format_ratio(ratio)}x"
    elif ratio <= 1 / CLEAR:
        verdict = f"transfer LOSES by {format_ratio(1 / ratio)}x, computing again is faster"
    else:
        verdict = "transfer and computing again take the same time"
    exposed = sorted(done.exposed_s * 1000 for done in book.transfers)
    return (
        f"{verdict}: {moved:,.0f} tok/s moved, {prefill_tokens_per_s:,.0f} computed; {promised}; "
        f"exposed {format_ms(percentile(exposed, 0.5))} (n {len(exposed)})"
    )


def _judge_modes(book: ModeBook, mode: str) -> tuple[str, str]:
    disagg, colocated = book.modes["disagg"].figures(), book.modes["colocated"].figures()
    if disagg is None or colocated is None:
        names = {"disagg": disagg, "co-located": colocated}
        missing = [name for name, found in names.items() if found is None]
        shown = "".join(f"{name} {found.text}; " for name, found in names.items() if found is not None)
        here = {"disagg": disagg, "colocated": colocated}.get(mode)
        how = "run a load" if here is None else "m switches"
        return OPEN, f"{shown}{' and '.join(missing)} not measured: {how}"
    itl, ttft = disagg.itl_p99_ms / colocated.itl_p99_ms, disagg.ttft_p50_ms / colocated.ttft_p50_ms
    smoother, rougher = itl * CLEAR <= 1, itl >= CLEAR
    sooner, later = ttft * CLEAR <= 1, ttft >= CLEAR
    if (smoother or sooner) and not (rougher or later):
        answer = PAYS
    elif (smoother or sooner) and (rougher or later):
        answer = MIXED
    else:
        answer = PAYS_NOT
    other = "" if disagg.loads == colocated.loads else f"; loads differ: {disagg.loads} | {colocated.loads}"
    text = (
        f"ITL p99 {format_ms(disagg.itl_p99_ms)}, co-located {format_ms(colocated.itl_p99_ms)} "
        f"({_factor(itl)}); TTFT p50 {format_ms(disagg.ttft_p50_ms)}, co-located "
        f"{format_ms(colocated.ttft_p50_ms)} ({_factor(ttft)}){other}"
    )
    return answer, text


def _factor(share: float) -> str:
    if share * CLEAR <= 1:
        return f"{format_ratio(1 / share)}x better"
    return f"{format_ratio(share)}x worse" if share >= CLEAR else "equal"
