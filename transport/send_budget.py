"""How much of a core a sender may use while an engine computes on the same one. Pure arithmetic.

An engine's step and the sender's thread of a worker share a core. Without a limit a large transfer takes half of it for
as long as it lasts, since the kernel shares a core evenly. KV of a prompt that is being computed leaves at once, it
cannot be more than the engine makes; and so does a little that is left at its end. Only a transfer of which much is
left then lets the steps of other prompts go first.

CPU times here are of the whole process, so that the share is one of what the worker gets, on a busy machine too.
"""

SHARE = 0.015
"""For checksums and writing. What the kernel does later for the same bytes, in whatever thread it finds, is about twice
as much again. Coding is not counted: who asks for a codec asks for its cost."""

BURST_S = 0.0003
"""What may be used at once after a rest."""

MOST_DELAY_S = 1.0
"""So long after its first rest nothing rests any more until nothing waits: transfers do not fall behind for ever."""


class SendBudget:
    """A bucket of CPU time that fills with the process's and is emptied by sending, also below zero."""

    def __init__(self) -> None:
        self._level_s = BURST_S
        self._filled_at_s = 0.0
        self._resting_since: float | None = None

    def refill(self, process_s: float) -> None:
        """The core is the sender's alone for now."""
        self._level_s, self._filled_at_s, self._resting_since = BURST_S, process_s, None

    def caught_up(self) -> None:
        """Nothing waits."""
        self._resting_since = None

    def spent(self, cpu_s: float) -> None:
        self._level_s -= cpu_s

    def rest_s(self, process_s: float, now: float) -> float:
        """How much the process must compute before more is sent; 0 = go on. ``now``: time.monotonic()."""
        self._level_s = min(BURST_S, self._level_s + SHARE * (process_s - self._filled_at_s))
        self._filled_at_s = process_s
        if self._level_s >= 0:
            return 0.0
        if self._resting_since is None:
            self._resting_since = now
        return -self._level_s / SHARE if now < self._resting_since + MOST_DELAY_S else 0.0
