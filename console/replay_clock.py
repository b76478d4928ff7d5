"""Where a replay is in its run, how fast it goes, and what may be typed to get elsewhere. No file, no clock."""

import re
from collections.abc import Sequence
from typing import Final

from console.text_format import format_clock

SPEEDS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

_CLOCK: Final = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d*)?)")
_SLACK_S: Final = 1.0
"""How far behind the end still means the end: what is typed is mostly whole seconds."""
_RELATIVE: Final = re.compile(r"([+-])\s*(\d+(?:\.\d*)?)\s*(s|m|h)?")
_PERCENT: Final = re.compile(r"(\d+(?:\.\d*)?)\s*%")
_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}

GO_TO_HINT: Final = "1:23, 1:02:03, +30, -2m, 50%, or a kind of event such as fell_back"


class ReplayClock:
    """``position_s`` runs from 0 to ``length_s``; ``advance`` tells it how much time went by outside."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.position_s = 0.0
        self.playing = False
        self.speed = 1.0

    @property
    def at_end(self) -> bool:
        return self.position_s >= self.length_s

    def advance(self, seconds: float) -> None:
        """Go on by that much time at the speed chosen; the end stops it."""
        if self.playing:
            self.seek(self.position_s + seconds * self.speed)
            self.playing = not self.at_end

    def seek(self, position_s: float) -> None:
        """Go there, or to the end that is nearer."""
        self.position_s = min(max(position_s, 0.0), self.length_s)

    def toggle(self) -> None:
        """Play or pause; at the end: play from the beginning."""
        if not self.playing and self.at_end:
            self.position_s = 0.0
        self.playing = not self.playing

    def change_speed(self, steps: int) -> None:
        index = SPEEDS.index(self.speed) + steps
        self.speed = SPEEDS[min(max(index, 0), len(SPEEDS) - 1)]


def parse_go_to(text: str, clock: ReplayClock, kinds: Sequence[str]) -> float | str:
    """A position in seconds, or the one kind of event that ``text`` is the name, or the beginning of the name, of.

    Raises ValueError with one line for the operator.
    """
    text = text.strip().lower()
    if found := _CLOCK.fullmatch(text):
        hours, minutes, seconds = found.groups()
        if (minutes and float(seconds) >= 60) or (hours and int(minutes) >= 60):
            raise ValueError(f"{text!r} is no time; minutes and seconds behind a colon are below 60")
        return _within(int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(seconds), text, clock)
    if found := _RELATIVE.fullmatch(text):
        sign, amount, unit = found.groups()
        by_s = float(amount) * _UNIT_S[unit or "s"]
        return clock.position_s + (by_s if sign == "+" else -by_s)
    if found := _PERCENT.fullmatch(text):
        return _within(clock.length_s * float(found[1]) / 100, text, clock)
    wanted = re.sub(r"[\s-]+", "_", text)
    fitting = [kind for kind in kinds if kind == wanted] or [
        kind for kind in kinds if kind.startswith(wanted)
    ]
    if wanted and len(fitting) == 1:
        return fitting[0]
    if wanted and fitting:
        raise ValueError(f"{text!r} fits {len(fitting)} kinds of events: {', '.join(fitting)}")
    raise ValueError(f"{text!r} is no place in the run; allowed: {GO_TO_HINT}")


def _within(position_s: float, text: str, clock: ReplayClock) -> float:
    """Raises ValueError for a place behind the end of the run."""
    if position_s > clock.length_s + _SLACK_S:
        raise ValueError(f"{text!r} is behind the end of the run, which lasts {format_clock(clock.length_s)}")
    return position_s
