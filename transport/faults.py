"""Faults that a drill may ask of a sender. Off unless asked for; each hits one DATA frame, or for a while every one."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorruptNextFrame:
    """Flip one bit in the payload of the next DATA frame, on the wire only."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Break the connection in the middle of the next DATA frame (or of the present one)."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Stop sending for ``seconds`` in the middle of the next DATA frame (or of the present one)."""

    seconds: float


LinkFault = CorruptNextFrame | Cut | Stall


@dataclass(frozen=True, slots=True)
class _Armed:
    fault: LinkFault
    until: float
    every_frame: bool


class FaultQueue:
    """The faults that are still to happen, in order, and where in the present frame that is."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []

    def add(self, fault: LinkFault, until: float = math.inf, *, every_frame: bool = False) -> None:
        """Not later than ``until`` (monotonic seconds); with ``every_frame`` again and again, else once."""
        self._armed.append(_Armed(fault, until, every_frame))

    def clear(self) -> None:
        self._armed = []

    def expire(self, now: float) -> None:
        """Forget what is over, or found no frame in time."""
        self._armed = [armed for armed in self._armed if now < armed.until]

    def take_corruption(self) -> bool:
        """Call at the start of a DATA frame; True if it is to be damaged."""
        if self._armed and isinstance(self._armed[0].fault, CorruptNextFrame):
            self.take()
            return True
        return False

    def bytes_before(self, done_bytes: int, total_bytes: int) -> int | None:
        """How much of the present frame may be written before a fault is due; None if none is."""
        is_due = bool(self._armed) and not isinstance(self._armed[0].fault, CorruptNextFrame)
        return max(0, total_bytes // 2 - done_bytes) if is_due else None

    def take(self) -> LinkFault:
        """The one that is due; gone, unless it happens to every frame."""
        armed = self._armed[0]
        if not armed.every_frame:
            del self._armed[0]
        return armed.fault
