"""Finds stop strings in text that arrives in pieces. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be the beginning of a stop string; what ``push`` returns is safe to send."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to send, whether a stop string was met). The stop string itself is never sent."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            sent, self._held = self._held[: min(found)], ""
            return sent, True
        keep = max(self._possible_start(stop) for stop in self._stops)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent, False

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
