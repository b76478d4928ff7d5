"""What is said and kept of an error in the console itself."""

import traceback
from pathlib import Path
from typing import Final

from textual.worker import WorkerFailed

from console.text_format import clean

MAX_MESSAGE: Final = 300


def describe_crash(error: BaseException, log: Path) -> str:
    """One line for the operator. The traceback, without the values of variables, is appended to ``log``."""
    if isinstance(error, WorkerFailed):
        error = error.error
    message = f"{type(error).__name__}: {error}".strip().split("\n")[0][:MAX_MESSAGE]
    line = f"pdconsole: the console failed: {clean(message)}"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return line  # it is all that can still be told
    return f"{line} (traceback in {log})"
