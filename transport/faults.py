"""Faults that a drill may ask of a sender. Off unless asked for; each happens once, to one DATA frame."""

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


class FaultQueue:
    """The faults that are still to happen, in order, and where in the present frame that is."""

    def __init__(self) -> None:
        self._faults: list[LinkFault] = []

    def add(self, fault: LinkFault) -> None:
        self._faults.append(fault)

    def take_corruption(self) -> bool:
        """Call at the start of a DATA frame; True if it is to be damaged."""
        if self._faults and isinstance(self._faults[0], CorruptNextFrame):
            del self._faults[0]
            return True
        return False

    def bytes_before(self, done_bytes: int, total_bytes: int) -> int | None:
        """How much of the present frame may be written before a fault is due; None if none is."""
        is_due = bool(self._faults) and not isinstance(self._faults[0], CorruptNextFrame)
        return max(0, total_bytes // 2 - done_bytes) if is_due else None

    def take(self) -> LinkFault:
        return self._faults.pop(0)
