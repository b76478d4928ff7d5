"""A run in other tools' formats. Reads the log only, so a live run can be exported too."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.atomic_file import write_atomically
from cluster.export_perfetto import to_perfetto
from cluster.export_table import to_csv, to_parquet
from cluster.export_vllm_bench import to_vllm_bench
from cluster.run_log import EVENTS_FILE, PassedOver


class ExportError(Exception):
    """A run cannot be exported as asked; the message is one line for the user."""


def export_run(run_dir: Path, fmt: str, passed: PassedOver | None = None) -> bytes:
    """The run's log in one of FORMATS. ``passed`` learns which damaged lines were left out (of jsonl: none are).

    Raises ExportError for another format or a run without a log, RunLogError for one without an event,
    MissingLibraryError where the format needs a library that is not installed.
    """
    write = _WRITERS.get(fmt)
    if write is None:
        raise ExportError(f"format {fmt!r} is unknown; available: {', '.join(FORMATS)}")
    path = run_dir / EVENTS_FILE
    try:
        return write(path, PassedOver() if passed is None else passed)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error


def write_export(path: Path, content: bytes) -> None:
    """Whole or not at all. Raises ExportError when the place cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from error


def _jsonl(path: Path, _: PassedOver) -> bytes:
    """The lines as they are; half a line at the end of a crashed run's log is no event."""
    with path.open("rb") as file:
        return b"".join(line for line in file if line.endswith(b"\n"))


_WRITERS: Final[dict[str, Callable[[Path, PassedOver], bytes]]] = {
    "jsonl": _jsonl,
    "csv": to_csv,
    "parquet": to_parquet,
    "perfetto": to_perfetto,
    "vllm-bench": to_vllm_bench,
}

FORMATS: Final = tuple(_WRITERS)
