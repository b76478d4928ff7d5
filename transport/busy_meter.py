"""Charges the time in which a connection's link is busy to the transfer whose bytes are on it. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTime:
    """One transfer's account."""

    busy_s: float = 0.0


class BusyMeter:
    """At any moment at most one account is being charged.

    Writing is not the whole of being busy: when the last byte is handed over, the kernel still holds some.
    ``idle`` takes an estimate of when those will be gone; ``drained`` corrects it once the receiver has said when.
    """

    def __init__(self) -> None:
        self._account: BusyTime | None = None
        self._since = 0.0
        self._until: float | None = None  # None while more is being written

    def writing(self, account: BusyTime, now: float) -> None:
        """Bytes of this account's transfer begin to enter the socket."""
        self._settle(now)
        self._account, self._since, self._until = account, now, None

    def idle(self, now: float, drained_at: float) -> None:
        """Nothing more to write for now; what was written will have left by ``drained_at``."""
        if self._account is not None and self._until is None:
            self._until = max(now, drained_at)

    def drained(self, account: BusyTime, received_at: float, now: float) -> None:
        """The peer got the account's last byte at ``received_at`` (ignored unless it is on our clock)."""
        if account is self._account:
            self._until = received_at if self._since <= received_at <= now else now
            self._settle(now)
            self._account = None

    def stopped(self, now: float) -> None:
        """The connection is gone."""
        self._settle(now)
        self._account = None

    def _settle(self, now: float) -> None:
        if self._account is not None:
            end = now if self._until is None else min(now, self._until)
            self._account.busy_s += max(0.0, end - self._since)
            self._since = now
