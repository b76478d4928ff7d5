"""What the console itself costs: it runs on the cores that it watches."""

import time
from dataclasses import dataclass
from typing import Final

SAMPLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OwnCost:
    """What the header says of the console: its share of one core, how late its event loop was, what it has read."""

    cpu_percent: float = 0.0
    loop_lag_ms: float = 0.0
    log_bytes: int = 0
    paused: bool = False
    read_only: bool = False


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
