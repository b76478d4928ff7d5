"""Writes the run's events to a file from within the console; the format is asked once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Final, Protocol

from cluster.export import FORMATS
from console.screens.dialog import Choice, ChoiceDialog

_FORMAT_TEXTS: Final = {
    "jsonl": "JSON lines: every event",
    "csv": "CSV: one row per request",
    "parquet": "Parquet: the same table",
    "perfetto": "Perfetto: a trace of processes and requests",
    "vllm-bench": "vLLM: the result file of vllm bench serve",
}


class ExportApp(Protocol):
    """What this needs of the app."""

    def tell(self, text: str, *, ok: bool = True) -> None: ...
    def push_screen(self, screen: ChoiceDialog, callback: Callable[[str | None], None]) -> object: ...
    def run_worker(self, work: Coroutine[None, None, None], *, exit_on_error: bool) -> object: ...


class RunExport:
    """``write`` writes the run in a format and returns the path; it may block and runs in a thread."""

    def __init__(self, app: ExportApp, write: Callable[[str], Path]) -> None:
        self._app = app
        self._write = write
        self._format = ""

    def begin(self) -> None:
        if self._format:
            self._chosen(self._format)
        else:
            self._app.push_screen(ChoiceDialog("Export the run as", format_choices(FORMATS)), self._chosen)

    def _chosen(self, wanted: str | None) -> None:
        if wanted:
            self._format = wanted
            self._app.run_worker(self._write_in_thread(wanted), exit_on_error=True)

    async def _write_in_thread(self, wanted: str) -> None:
        try:
            path = await asyncio.to_thread(self._write, wanted)
        except OSError as error:
            self._app.tell(f"Export: {error}", ok=False)
        else:
            self._app.tell(f"export written: {path}")


def format_choices(formats: Sequence[str]) -> tuple[Choice, ...]:
    """One key per export format: the first letter of its name that no earlier one has."""
    keys: dict[str, str] = {}
    for name in formats:
        keys[next(letter for letter in name if letter.isalpha() and letter not in keys)] = name
    return tuple(Choice(key, name, _FORMAT_TEXTS.get(name, name)) for key, name in keys.items())
