"""How far work has come whose speed changes: a simulated step on a core that others begin and cease to use. Pure."""

from bisect import bisect_right


class Pace:
    """Work is seconds at full speed. ``began``: none is done yet."""

    __slots__ = ("_done", "_since", "_speeds")

    def __init__(self, began: float, speed: float = 1.0) -> None:
        self._since = [began]
        self._done = [0.0]  # when each speed began
        self._speeds = [speed]

    @property
    def began(self) -> float:
        return self._since[0]

    @property
    def speed(self) -> float:
        return self._speeds[-1]

    def change(self, now: float, speed: float) -> None:
        """From ``now`` on, which is not before the last change. ``speed`` is above 0."""
        done = self.done_at(now)
        if now <= self._since[-1]:
            self._speeds[-1] = speed
            return
        self._since.append(now)
        self._done.append(done)
        self._speeds.append(speed)

    def done_at(self, now: float) -> float:
        """Not asked for times before the last change."""
        return self._done[-1] + (now - self._since[-1]) * self._speeds[-1]

    def time_of(self, work: float) -> float:
        """When so much is done, if the speed stays as it is."""
        last = max(0, bisect_right(self._done, work) - 1)
        return self._since[last] + (work - self._done[last]) / self._speeds[last]
