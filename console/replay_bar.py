"""The line under a replay: what it is doing, where it is, and the whole run with its marks."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from console.palette import BAD, BUSY, GOOD
from console.text_format import fit, format_clock, format_stamp

MIN_TRACK: Final = 10
_IMPORTANT: Final = "KfX!"
"""Of marks that fall on one cell these win, in this order; then the first."""


def bar_line(
    width: int,
    *,
    word: str,
    speed: float,
    position_s: float,
    length_s: float,
    marks: Sequence[tuple[float, str]],
    note: str,
    ascii_mode: bool,
) -> Text:
    """At most ``width`` cells. ``marks``: (position in seconds, letter), in the order of time."""
    line = Text(no_wrap=True, overflow="crop")
    line.append(f" {fit(word, 9)}", f"bold {BUSY if word == 'PLAYING' else GOOD}")
    line.append(f" {f'x{speed:g}':<5} {format_stamp(position_s):>7} / {format_clock(length_s)} ")
    note = fit(note, 28) if width >= 120 else ""
    track = width - line.cell_len - len(note) - 3
    if track < MIN_TRACK:
        return line
    line.append("[")
    line.append_text(_track(track, position_s, length_s, marks, ascii_mode=ascii_mode))
    line.append(f"] {note}")
    return line


def _track(
    width: int, position_s: float, length_s: float, marks: Sequence[tuple[float, str]], *, ascii_mode: bool
) -> Text:
    """One cell a stretch of the run: done, here, to come, and the mark that counts most in each."""
    past, here, future = ("=", "|", "-") if ascii_mode else ("━", "┃", "─")
    scale = width / length_s if length_s > 0 else 0.0
    at = min(int(position_s * scale), width - 1)
    cells = [past if cell < at else future for cell in range(width)]
    letters: dict[int, str] = {}
    for mark_s, letter in marks:
        cell = min(int(mark_s * scale), width - 1)
        if _rank(letter) < _rank(letters.get(cell, "")):
            letters[cell] = letter
    track = Text(no_wrap=True)
    for cell, glyph in enumerate(cells):
        if cell == at:
            track.append(letters.get(cell, here), "reverse")
        elif cell in letters:
            track.append(letters[cell], BAD if letters[cell] in _IMPORTANT else "bold")
        else:
            track.append(glyph)
    return track


def _rank(letter: str) -> int:
    if not letter:
        return len(_IMPORTANT) + 1
    return _IMPORTANT.index(letter) if letter in _IMPORTANT else len(_IMPORTANT)
