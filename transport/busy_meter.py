"""Charges the time in which a connection's link is busy to the transfer whose bytes are on it. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTime:
    """One transfer's account."""

    busy_s: float = 0.0


class BusyMeter:
    """At any moment at most one account is being charged.

    Writing is not the whole of being busy: when the last byte is handed over, the kernel still holds some.
    ``idle`` takes an estimate of when those will be gone. ``resumes`` corrects it by what the kernel counts at the
    pause's end, ``drained`` once the receiver has said when.
    """

    def __init__(self) -> None:
        self._account: BusyTime | None = None
        self._since = 0.0
        self._until: float | None = None  # None while more is being written
        self._idle_at = self._kernel_busy_s = 0.0  # of the last pause's beginning

    def writing(self, account: BusyTime, now: float) -> None:
        """Bytes of this account's transfer begin to enter the socket."""
        self._settle(now)
        self._account, self._since, self._until = account, now, None

    @property
    def is_paused(self) -> bool:
        return self._until is not None

    def idle(self, now: float, drained_at: float, kernel_busy_s: float = 0.0) -> None:
        """Nothing more to write for now; what was written will have left by ``drained_at``.

        ``kernel_busy_s`` is how long the kernel has had something to send on this connection, since its beginning.
        """
        if self._account is not None and self._until is None:
            self._until = max(now, drained_at)
            self._idle_at, self._kernel_busy_s = now, kernel_busy_s

    def resumes(self, kernel_busy_s: float) -> None:
        """A pause ends: the link was busy for as much of it as the kernel's count has grown."""
        if self._until is not None:
            self._until = max(self._until, self._idle_at + kernel_busy_s - self._kernel_busy_s)

    def drained(self, account: BusyTime, received_at: float, now: float) -> None:
        """The peer got the account's last byte at ``received_at`` (ignored unless it is on our clock)."""
        if account is self._account:
            self._until = received_at if self._since <= received_at <= now else now
            self._settle(now)
            self._account = None

    def spent_s(self, account: BusyTime, now: float) -> float:
        """What the account has been charged with up to now."""
        self._settle(now)
        return account.busy_s

    def stopped(self, now: float) -> None:
        """The connection is gone."""
        self._settle(now)
        self._account = None

    def _settle(self, now: float) -> None:
        if self._account is not None:
            end = now if self._until is None else min(now, self._until)
            self._account.busy_s += max(0.0, end - self._since)
            self._since = now
