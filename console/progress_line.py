"""How far something long is: one line that is drawn over itself on a terminal, a line now and then elsewhere."""

import shutil
import time
from collections.abc import Callable
from typing import Final, TextIO

from cluster.units import format_bytes

_BAR_CELLS: Final = 24
_REDRAW_S: Final = 0.1
_LINE_EVERY: Final = 0.25  # of the whole, where no terminal shows the bar
_MIN_RATE_S: Final = 0.5


class ProgressLine:
    """Takes the progress of one step after the other and writes it to ``stream``."""

    def __init__(
        self, stream: TextIO, *, is_terminal: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._clock = clock
        self._step = ""
        self._started_at = 0.0
        self._first_done = 0
        self._shown_at = 0.0
        self._shown_share = 0.0

    def __call__(self, step: str, done: int, total: int | None, unit: str) -> None:
        now = self._clock()
        is_new = step != self._step
        if is_new:
            self.close()
            self._step, self._started_at, self._first_done = step, now, done
            self._shown_share = done / total if total else 0.0
        is_end = done == total
        if self._is_terminal:
            if not (is_new or is_end or now - self._shown_at >= _REDRAW_S):
                return
        elif not is_new:
            share = done / total if total else 0.0
            if share - self._shown_share < _LINE_EVERY and not (is_end and share > self._shown_share):
                return
            self._shown_share = share
        self._shown_at = now
        elapsed = now - self._started_at
        rate = (done - self._first_done) / elapsed if elapsed >= _MIN_RATE_S else None
        text = progress_text(step, done, total, unit, rate, has_bar=self._is_terminal)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{text[: width - 1]}")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last state standing, so that what is written next begins a line."""
        if self._step and self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
        self._step = ""


def progress_text(
    step: str, done: int, total: int | None, unit: str, rate: float | None, *, has_bar: bool
) -> str:
    """One state as text. ``rate`` is in units per second, None while it is too early to tell."""
    parts = [step]
    if has_bar and total:
        filled = min(done * _BAR_CELLS // total, _BAR_CELLS)
        parts.append(f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}]")
    if total:
        parts.append(f"{min(100 * done // total, 100):3d} %")
    amount = format_bytes(done) if unit == "bytes" else f"{done}"
    if total:
        amount += f" of {format_bytes(total)}" if unit == "bytes" else f" of {total} {unit}"
    parts.append(amount)
    if rate and unit == "bytes":
        parts.append(f"{format_bytes(rate)}/s")
    if rate and total and done < total:
        parts.append(f"{(total - done) / rate:.0f} s left")
    return "  ".join(parts)
