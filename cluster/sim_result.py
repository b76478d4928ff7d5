"""What a simulated run counts while it goes on. Pure; memory does not grow with the number of tokens."""

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from cluster.metrics import RequestLatency, Slos

_BINS_PER_E: Final = 400
"""Gaps are counted in bins that are 0.25 % wide: a simulated hour has millions of them, most alike."""


class GapCounts:
    """Times above 0 with how often each came, in bounded memory; percentiles are within 0.13 %."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self._bins[round(math.log(max(seconds, 1e-9)) * _BINS_PER_E)] += count

    def __len__(self) -> int:
        return self._bins.total()

    def percentile(self, q: float) -> float | None:
        """The smallest time that ``q`` percent do not exceed; None of nothing."""
        if not self._bins:
            return None
        rank, seen = q / 100 * self._bins.total(), 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= rank:
                return math.exp(index / _BINS_PER_E)
        return math.exp(max(self._bins) / _BINS_PER_E)


@dataclass(slots=True)
class TtftParts:
    """Sums over finished requests, in seconds."""

    router_queue_s: float = 0.0  # no decode worker had room
    prefill_queue_s: float = 0.0  # sent to a worker that computed other prompts
    prefill_s: float = 0.0
    transfer_s: float = 0.0  # end of prefill to first token


@dataclass(slots=True)
class SimRun:
    """Filled while a trace is simulated. ``ttft_s`` in order of finishing."""

    slos: Slos
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    parts: TtftParts = field(default_factory=TtftParts)
    finished: int = 0
    good: int = 0
    missed_ttft: int = 0
    missed_itl: int = 0  # of a limit on ITL or TPOT
    refused: Counter[int] = field(default_factory=Counter)  # by HTTP status
    output_tokens: int = 0
    ended_at: float = 0.0  # the last request's end, from the first one's arrival

    def add(self, latency: RequestLatency, output_tokens: int) -> None:
        """A request was answered whole."""
        self.finished += 1
        self.output_tokens += output_tokens
        self.ttft_s.append(latency.ttft_ms / 1e3)
        slos = self.slos
        if slos.are_met_by(latency):
            self.good += 1
            return
        if slos.ttft_ms is not None and latency.ttft_ms > slos.ttft_ms:
            self.missed_ttft += 1
        if (slos.itl_ms is not None and latency.worst_itl_ms > slos.itl_ms) or (
            slos.tpot_ms is not None and latency.tpot_ms > slos.tpot_ms
        ):
            self.missed_itl += 1
