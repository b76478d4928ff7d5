"""When a run was disturbed on purpose or by accident: faults, processes that were down, drills. A fold; pure data.

What was measured meanwhile says nothing about the modes or the link.
"""

from collections import deque
from typing import Final

from cluster.events import (
    Event,
    FaultHealed,
    FaultInjected,
    NoteAdded,
    RouterStats,
    RunReady,
    RunStopping,
    WorkerExited,
    WorkerReady,
    WorkerRemoved,
    WorkerStats,
)

SETTLE_S: Final = 2.0
"""What a disturbance left behind (queues, recomputed prompts) still counts as disturbed for so long after its end."""
LONGEST_DRILL_S: Final = 600.0
"""One whose end was not told (its console went away) is over then."""
KEPT: Final = 64

_FREQUENT: Final = (WorkerStats, RouterStats)
"""What nearly all events are that are not about a request."""
_ENDLESS: Final = float("inf")
_DRILL: Final = "drill "
_BEGINS: Final = " begins"


class Spans:
    """Times at which something was under way, by key; the newest KEPT that ended are remembered."""

    def __init__(self, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self.open: dict[str, float] = {}
        self._ended: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._last_end = -_ENDLESS

    def begin(self, key: str, at: float) -> None:
        self.open.setdefault(key, at)

    def end(self, key: str, at: float) -> None:
        """Of a key that is not open: nothing."""
        began_at = self.open.pop(key, None)
        if began_at is not None:
            self._ended.append((began_at, at + self._settle_s))
            self._last_end = max(self._last_end, at + self._settle_s)

    def overlap(self, from_at: float, to_at: float) -> bool:
        """Whether any of from_at .. to_at lay in one."""
        if self.open and any(began_at <= to_at for began_at in self.open.values()):
            return True
        if from_at > self._last_end:  # nearly always; asked for every batch of tokens
            return False
        return any(began_at <= to_at and from_at <= ended_at for began_at, ended_at in self._ended)


class Disturbances:
    """Fed with every event that is not about a request."""

    def __init__(self) -> None:
        self.spans = Spans(SETTLE_S)
        self._serving = False

    def overlap(self, from_at: float, to_at: float) -> bool:
        return self.spans.overlap(from_at, to_at)

    @property
    def now(self) -> str:
        """What disturbs at present: "stall prefill-0, drill burst"; "" = nothing."""
        return ", ".join(self.spans.open)

    def fold(self, event: Event) -> None:
        """Take one event in; one that disturbs nothing changes nothing."""
        if self.spans.open:
            self._end_forgotten_drills(event.at)
        if type(event) in _FREQUENT:
            return
        match event:
            case RunReady():
                self._serving = True
            case RunStopping():
                self._serving = False  # that processes exit now disturbs nothing
            case FaultInjected(fault="resume"):
                self.spans.end(f"hang {event.target}", event.at)
            case FaultInjected():
                key = f"{event.fault} {event.target}"
                self.spans.begin(key, event.at)
                if not event.seconds and event.fault != "hang":
                    self.spans.end(key, event.at)  # a death goes on as the process being down
            case FaultHealed():
                self.spans.end(f"{event.fault} {event.target}", event.at)
            case WorkerExited() if self._serving:
                for key in [key for key in self.spans.open if key.endswith(f" {event.worker_id}")]:
                    self.spans.end(key, event.at)
                self.spans.begin(_down(event.worker_id), event.at)
            case WorkerReady() | WorkerRemoved():
                self.spans.end(_down(event.worker_id), event.at)
            case NoteAdded(text=text) if text.startswith(_DRILL):
                if text.endswith(_BEGINS):
                    self.spans.begin(text.removesuffix(_BEGINS), event.at)
                else:
                    for key in [key for key in self.spans.open if text.startswith(f"{key} ")]:
                        self.spans.end(key, event.at)
            case _:
                pass

    def _end_forgotten_drills(self, now: float) -> None:
        for key in [key for key, at in self.spans.open.items() if now - at > LONGEST_DRILL_S]:
            if key.startswith(_DRILL):
                self.spans.end(key, now)


def _down(worker_id: str) -> str:
    return f"{worker_id} down"
