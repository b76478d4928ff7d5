"""Whether the console can be drawn. Imports nothing slow: a headless run asks too."""

import sys


def is_terminal() -> bool:
    """Stdin, stdout and stderr are terminals: Textual reads the first and draws on the last, and a stdout that is not
    one means that a script wants the summary."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return all(stream is not None and not stream.closed and stream.isatty() for stream in streams)
