"""Does disaggregation pay in this run, in words and figures. A fold over what was measured; ready to say no.

Two questions, answered from this run's own requests:

- Is moving KV faster than computing it again? Tokens moved per second that the wire was busy, against the prefill rate.
- What did each mode give the streams of one and the same load? ITL and TTFT over the last MODE_WINDOW_S of each,
  beside bursts and without them apart; what was measured while something was broken counts for neither.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.events import TransferCompleted
from console.disturbances import Disturbances, Spans
from console.series import percentile
from console.text_format import format_ms, format_ratio

MODE_WINDOW_S: Final = 60.0
KEPT_GAPS: Final = 4096
KEPT_TTFTS: Final = 1024
KEPT_TRANSFERS: Final = 64
KEPT_POOLS: Final = 16
MIN_GAPS: Final = 200
"""Fewer say nothing about a 99th percentile."""
MIN_SECONDS: Final = 5
MIN_TTFTS: Final = 3
CLEAR: Final = 1.1
"""Two figures closer together than this factor count as equal."""
LINK_REACHED: Final = 0.5
"""Transfers below this share of the probed link are said to be."""

STEADY: Final = "steady"
BURST: Final = "burst"
"""Labels of the load generator's requests."""
NO_LOAD: Final = "off"
_WORDS: Final = {"disagg": "disagg", "colocated": "co-located"}

PAYS: Final = "PAYS"
PAYS_NOT: Final = "DOES NOT PAY"
MIXED: Final = "MIXED"
OPEN: Final = "OPEN"


class PoolKey(NamedTuple):
    """What makes values alike. A tuple, because one is looked up for every batch of tokens."""

    mode: str
    load: str
    beside_burst: bool


@dataclass(slots=True)
class Pool:
    """Alike values, the newest ones: (at in s, value in ms)."""

    gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_GAPS))
    ttfts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_TTFTS))

    @property
    def last_at(self) -> float:
        return max((values[-1][0] for values in (self.gaps, self.ttfts) if values), default=0.0)

    def figures(self) -> "Figures":
        """Over the last MODE_WINDOW_S in which such values came."""
        since = self.last_at - MODE_WINDOW_S
        gaps = [(at, ms) for at, ms in self.gaps if at > since]
        return Figures(
            gaps_ms=sorted(ms for _, ms in gaps),
            ttfts_ms=sorted(ms for at, ms in self.ttfts if at > since),
            seconds=len({int(at) for at, _ in gaps}),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Sorted milliseconds; ``seconds`` of the clock in which a gap ended."""

    gaps_ms: list[float]
    ttfts_ms: list[float]
    seconds: int

    @property
    def itl_p99_ms(self) -> float:
        return percentile(self.gaps_ms, 0.99)

    @property
    def ttft_p50_ms(self) -> float:
        return percentile(self.ttfts_ms, 0.5)

    @property
    def missing(self) -> str:
        """ "has 120 of 200 gaps, 3 of 5 s"; "" where there is enough to judge."""
        parts = [
            f"{have} of {need}{unit}"
            for have, need, unit in (
                (len(self.gaps_ms), MIN_GAPS, " gaps"),
                (self.seconds, MIN_SECONDS, " s"),
                (len(self.ttfts_ms), MIN_TTFTS, " first tokens"),
            )
            if have < need
        ]
        return f"has {', '.join(parts)}" if parts else ""

    @property
    def text(self) -> str:
        return f"ITL p99 {format_ms(self.itl_p99_ms)}, TTFT p50 {format_ms(self.ttft_p50_ms)}"


_NOTHING: Final = Figures([], [], 0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """``answer`` PAYS | DOES NOT PAY | MIXED | OPEN; ``modes`` is the sentence behind it, ``transfer`` the other."""

    answer: str
    modes: str
    transfer: str


class ModeBook:
    """Fed by the request book: each value under the mode its request runs in and the load it came with."""

    def __init__(self) -> None:
        self.pools: dict[PoolKey, Pool] = {}
        self.transfers: deque[TransferCompleted] = deque(maxlen=KEPT_TRANSFERS)
        self.loads = NO_LOAD
        self.mode = ""
        """The router's; values of requests that still run in another are mixtures of both and are left out."""
        self.disturbed = Disturbances()
        self.bursts = Spans()

    def add_gaps(self, mode: str, load: str, gaps: Sequence[tuple[float, float]]) -> None:
        """(at in s, ms) of one batch of a stream of ``load``; a batch of which any part lies in a burst lies in it."""
        if not gaps:
            return
        (first_at, first_ms), (last_at, _) = gaps[0], gaps[-1]
        if (pool := self._pool(mode, load, first_at - first_ms / 1000, last_at)) is not None:
            pool.gaps.extend(gaps)

    def add_ttft(self, mode: str, load: str, at: float, ttft_ms: float) -> None:
        if (pool := self._pool(mode, load, at - ttft_ms / 1000, at)) is not None:
            pool.ttfts.append((at, ttft_ms))

    def add_transfer(self, done: TransferCompleted) -> None:
        """One that a fault disturbed says nothing about the link."""
        if not self.disturbed.overlap(done.at - done.duration_s, done.at):
            self.transfers.append(done)

    def moved_tokens_per_s(self, link_tokens_per_s: float | None = None) -> float | None:
        """Tokens whose KV was moved per second of busy wire, median of the newest transfers; None before the first.

        ``link_tokens_per_s``: what the link carries of uncompressed KV. A shaper may let a first burst through at once;
        no transfer is believed to have been faster than the link.
        """
        rates = sorted(
            done.tokens / _wire_s(done, link_tokens_per_s) for done in self.transfers if done.busy_s > 0
        )
        return percentile(rates, 0.5) if rates else None

    def newest_load(self) -> str:
        """The one that runs; while none does, the one of the newest value. "" before any."""
        if self.loads != NO_LOAD:
            return self.loads
        newest = max(self.pools.items(), key=lambda item: item[1].last_at, default=None)
        return newest[0].load if newest is not None else ""

    def figures(self, mode: str, load: str, *, beside_burst: bool) -> Figures:
        pool = self.pools.get(PoolKey(mode, load, beside_burst))
        return pool.figures() if pool is not None else _NOTHING

    def _pool(self, mode: str, load: str, from_at: float, to_at: float) -> Pool | None:
        """Where a value of that time belongs; None: nowhere."""
        if load in ("", NO_LOAD) or mode not in _WORDS or self.mode not in ("", mode):
            return None
        if self.disturbed.overlap(from_at, to_at):
            return None
        key = PoolKey(mode, load, self.bursts.overlap(from_at, to_at))
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool()
            if len(self.pools) > KEPT_POOLS:
                del self.pools[next(iter(self.pools))]
        return pool


def judge(
    book: ModeBook,
    mode: str,
    prefill_tokens_per_s: float,
    rho: float | None,
    link_tokens_per_s: float | None = None,
) -> Judgement:
    """``prefill_tokens_per_s`` 0 = not measured; ``rho`` is what the probed link promises, uncompressed KV of
    ``link_tokens_per_s`` over that same prefill rate."""
    answer, modes = _judge_modes(book, mode)
    return Judgement(answer, modes, _judge_transfer(book, prefill_tokens_per_s, rho, link_tokens_per_s))


def _judge_transfer(
    book: ModeBook, prefill_tokens_per_s: float, rho: float | None, link_tokens_per_s: float | None
) -> str:
    promised = f"rho {format_ratio(rho)}" if rho is not None else "rho not known"
    moved = book.moved_tokens_per_s(link_tokens_per_s)
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
    reached = moved / link_tokens_per_s if link_tokens_per_s else 1.0
    if reached < LINK_REACHED:
        promised += f" by the link alone, of which transfers reach {format_ratio(reached)}"
    elif reached > CLEAR:
        promised += f" for raw KV, of which transfers move {format_ratio(reached)}x"
    exposed = sorted(done.exposed_s * 1000 for done in book.transfers)
    return (
        f"{verdict}: {moved:,.0f} tok/s moved, {prefill_tokens_per_s:,.0f} computed; {promised}; "
        f"exposed {format_ms(percentile(exposed, 0.5))} (n {len(exposed)})"
    )


def _wire_s(done: TransferCompleted, link_tokens_per_s: float | None) -> float:
    """How long the wire had to do with it, by the socket and at least by the link's rate."""
    if not link_tokens_per_s or not done.raw_bytes:
        return done.busy_s
    return max(done.busy_s, done.tokens * done.wire_bytes / done.raw_bytes / link_tokens_per_s)


def _judge_modes(book: ModeBook, mode: str) -> tuple[str, str]:
    load = book.newest_load()
    left_out = f"; {book.disturbed.now}: left out" if book.disturbed.now else ""
    if not load:
        return OPEN, f"disagg and co-located not measured: run a load{left_out}"
    calm = {each: book.figures(each, load, beside_burst=False) for each in _WORDS}
    beside = {each: book.figures(each, load, beside_burst=True) for each in _WORDS}
    alike = [
        (words, of["disagg"], of["colocated"])
        for words, of in (("", calm), ("beside bursts ", beside))
        if not any(figures.missing for figures in of.values())
    ]
    left_out = _bursts_left_out(beside) + left_out
    if not alike:
        return OPEN, f"{load}: {_what_is_missing(calm, mode)}{left_out}"
    ratios = [
        ratio
        for _, disagg, colocated in alike
        for ratio in (
            disagg.itl_p99_ms / max(colocated.itl_p99_ms, 1e-6),
            disagg.ttft_p50_ms / max(colocated.ttft_p50_ms, 1e-6),
        )
    ]
    is_better = any(ratio * CLEAR <= 1 for ratio in ratios)
    is_worse = any(ratio >= CLEAR for ratio in ratios)
    answer = PAYS_NOT if not is_better else MIXED if is_worse else PAYS
    return answer, f"{load}: {'; '.join(_compared(*each) for each in alike)}{left_out}"


def _compared(words: str, disagg: Figures, colocated: Figures) -> str:
    itl = disagg.itl_p99_ms / max(colocated.itl_p99_ms, 1e-6)
    ttft = disagg.ttft_p50_ms / max(colocated.ttft_p50_ms, 1e-6)
    return (
        f"{words}ITL p99 {format_ms(disagg.itl_p99_ms)}, co-located {format_ms(colocated.itl_p99_ms)} "
        f"({_factor(itl)}); TTFT p50 {format_ms(disagg.ttft_p50_ms)}, co-located "
        f"{format_ms(colocated.ttft_p50_ms)} ({_factor(ttft)})"
    )


def _bursts_left_out(beside: dict[str, Figures]) -> str:
    """What was measured beside bursts and has no like to be compared with."""
    had = [mode for mode, figures in beside.items() if figures.gaps_ms]
    if len(had) == 1:
        return f"; bursts only in {_WORDS[had[0]]}: left out"
    missing = [f"{_WORDS[mode]} {beside[mode].missing}" for mode in had if beside[mode].missing]
    return f"; beside bursts {', '.join(missing)}: left out" if missing else ""


def _what_is_missing(calm: dict[str, Figures], mode: str) -> str:
    shown = "".join(f"{_WORDS[each]} {of.text}; " for each, of in calm.items() if not of.missing)
    begun = [f"{_WORDS[each]} {of.missing}" for each, of in calm.items() if of.gaps_ms and of.missing]
    unseen = [each for each, of in calm.items() if not of.gaps_ms]
    if unseen:
        how = "run the load" if mode in unseen else "m switches"
        begun.append(f"{' and '.join(_WORDS[each] for each in unseen)} not measured: {how}")
    return shown + "; ".join(begun)


def _factor(share: float) -> str:
    if share * CLEAR <= 1:
        return f"{format_ratio(1 / share)}x better"
    return f"{format_ratio(share)}x worse" if share >= CLEAR else "equal"
