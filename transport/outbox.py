"""Frames that wait to be written: on the delay line, or held back until their transfer is accepted."""

from transport.link import DelayLine, LinkShape
from transport.outgoing import HeldFrame, Outgoing, QueuedAbort, QueuedData, QueuedFrame


class Outbox:
    def __init__(self, shape: LinkShape, seed: int) -> None:
        self._line: DelayLine[QueuedFrame] = DelayLine(shape, seed)
        self._num_held = 0

    @property
    def num_frames(self) -> int:
        """May be read from any thread."""
        return len(self._line) + self._num_held

    @property
    def has_sendable(self) -> bool:
        """Something waits for the link rather than for an ACCEPT."""
        return len(self._line) > 0

    @property
    def shape(self) -> LinkShape:
        return self._line.shape

    def set_link(self, shape: LinkShape) -> None:
        self._line.shape = shape

    def put(self, item: QueuedFrame, now: float) -> None:
        self._line.put(item, now)

    def hold(self, outgoing: Outgoing, item: HeldFrame) -> None:
        outgoing.held.append(item)
        self._num_held += 1

    def take_held(self, outgoing: Outgoing) -> list[HeldFrame]:
        """What was held, in order; it is not held any more."""
        held, outgoing.held = outgoing.held, []
        self._num_held -= len(held)
        return held

    @property
    def can_wait(self) -> bool:
        """The next frame is KV of a transfer that can rest."""
        item = self._line.first()
        return isinstance(item, QueuedData) and item.outgoing.can_rest

    def pop(self, now: float) -> QueuedFrame | None:
        return self._line.pop(now)

    def next_at(self) -> float | None:
        return self._line.next_at()

    def drop(self, outgoing: Outgoing) -> None:
        """Forgets all frames of a transfer, and with them its views."""
        self.take_held(outgoing)
        self._line.discard(lambda item: not isinstance(item, QueuedAbort) and item.outgoing is outgoing)

    def drop_aborts(self) -> None:
        """The connection on which the peer was to be told is gone."""
        self._line.discard(lambda item: isinstance(item, QueuedAbort))
