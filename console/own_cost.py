"""What the console itself costs: it runs on the cores that it watches."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

SAMPLE_S: Final = 2.0
LAG_WINDOW_S: Final = 5.0
CPU_LIMIT_PERCENT: Final = 15.0
LAG_LIMIT_S: Final = 0.1
MAX_SLOWER: Final = 2
"""At least a quarter of the redraws asked for."""


@dataclass(frozen=True, slots=True)
class OwnCost:
    """What the header says of the console: its share of one core, how late its event loop was, what it has read, how
    often it draws, and how many of the redraws that it should have made it has not.

    ``read_share``: of a replay that shows a moment before all of the log before it was read, how much of it was; what
    counts from the beginning of the run is not known then. None: all is.
    """

    cpu_percent: float = 0.0
    loop_lag_ms: float = 0.0
    log_bytes: int = 0
    redraws_per_s: float = 0.0
    skipped_redraws: int = 0
    paused: bool = False
    read_only: bool = False
    replay: bool = False
    read_share: float | None = None


class CpuMeter:
    """Share of one core that this process used between two samples at least SAMPLE_S apart."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used = time.process_time()
        self._percent = 0.0

    def percent(self) -> float:
        at, used = time.monotonic(), time.process_time()
        if at - self._at >= SAMPLE_S:
            self._percent = (used - self._used) / (at - self._at) * 100
            self._at, self._used = at, used
        return self._percent


class LoopLag:
    """How late the event loop gives a task that sleeps its turn: the worst of the last LAG_WINDOW_S."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    @property
    def worst_s(self) -> float:
        return max((late_s for _, late_s in self._late), default=0.0)

    async def sleep(self, seconds: float) -> None:
        """asyncio.sleep, measured."""
        before = time.monotonic()
        await asyncio.sleep(seconds)
        now = time.monotonic()
        late_s = now - before - seconds
        while self._late and self._late[-1][1] <= late_s:
            self._late.pop()  # the newer one is worse and counts longer
        self._late.append((now, late_s))
        while self._late[0][0] < now - LAG_WINDOW_S:
            self._late.popleft()


class RedrawPace:
    """How often to draw: as asked, and half as often for every step by which drawing costs too much.

    One step down while the console uses more of a core than ``cpu_limit_percent`` or its loop is later than
    LAG_LIMIT_S; one up when twice the redraws would stay below both. Steps are at least SAMPLE_S apart. Without a limit
    (infinity) it draws as asked.
    """

    def __init__(self, redraws_per_s: float, cpu_limit_percent: float = CPU_LIMIT_PERCENT) -> None:
        self.skipped = 0
        self._asked_s = 1.0 / redraws_per_s
        self._cpu_limit_percent = cpu_limit_percent
        self._slower = 0
        self._stepped_at = float("-inf")
        self._drawn_at: float | None = None

    @property
    def redraws_per_s(self) -> float:
        return 1.0 / (self._asked_s * (1 << self._slower))

    @property
    def is_lowered(self) -> bool:
        return self._slower > 0

    def due(self, now: float, cpu_percent: float, lag_s: float) -> bool:
        """Whether to draw at this tick; ticks come as often as redraws were asked for."""
        if now - self._stepped_at >= SAMPLE_S and self._cpu_limit_percent < float("inf"):
            self._step(now, cpu_percent, lag_s)
        if self._drawn_at is None:
            self._drawn_at = now
            return True
        since_s = now - self._drawn_at
        if since_s < self._asked_s * ((1 << self._slower) - 0.5):
            return False
        self.skipped += max(round(since_s / self._asked_s) - 1, 0)
        self._drawn_at = now
        return True

    def _step(self, now: float, cpu_percent: float, lag_s: float) -> None:
        if cpu_percent > self._cpu_limit_percent or lag_s > LAG_LIMIT_S:
            step = 1
        elif 2 * cpu_percent < self._cpu_limit_percent and 2 * lag_s < LAG_LIMIT_S:
            step = -1
        else:
            return
        slower = min(max(self._slower + step, 0), MAX_SLOWER)
        if slower != self._slower:
            self._slower, self._stepped_at = slower, now
