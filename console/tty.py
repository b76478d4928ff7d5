"""Whether the console can be drawn. Imports nothing slow: a headless run asks too."""

import os
import sys

_NAMES = ("standard input", "standard output", "standard error")


def why_no_screen() -> str:
    """What keeps the console from being drawn, "" = nothing.

    Stdin, stdout and stderr have to be terminals: Textual reads the first and draws on the last, and a stdout that is
    not one means that a script wants the summary. ``TERM=dumb`` says that the terminal cannot place text.
    """
    for name, stream in zip(_NAMES, (sys.__stdin__, sys.__stdout__, sys.__stderr__), strict=True):
        if stream is None or stream.closed or not stream.isatty():
            return f"{name} is no terminal"
    return "TERM=dumb is a terminal that cannot place text" if os.environ.get("TERM") == "dumb" else ""
