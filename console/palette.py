"""Okabe and Ito's colours, told apart with every common colour vision. They only repeat what a word says."""

from typing import Final

GOOD: Final = "#56B4E9"  # sky blue
WARN: Final = "#E69F00"  # orange
BAD: Final = "#D55E00"  # vermilion
MARK: Final = "#CC79A7"  # reddish purple
BUSY: Final = "#F0E442"  # yellow

STATE_STYLES: Final = {
    "ready": GOOD,
    "busy": GOOD,
    "starting": BUSY,
    "waiting": BUSY,
    "draining": WARN,
    "drained": WARN,
    "down": WARN,
    "silent": BAD,
    "failed": BAD,
}
LEVEL_STYLES: Final = {"info": "", "good": GOOD, "warn": WARN, "bad": f"bold {BAD}"}


def rgb(colour: str) -> tuple[int, int, int]:
    """ "#56B4E9" -> (86, 180, 233)."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
