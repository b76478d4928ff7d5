"""Where a model gathers while it is fetched, and how it becomes a model: all at once.

``models/downloads`` holds what is unfinished: partial files, which the next attempt goes on with, and drafts of
directories. A directory gets its own name only when it is complete.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.http_source import FetchError
from cluster.units import format_bytes
from engine.model_ids import fetched_dir, models_dir


@dataclass(frozen=True, slots=True)
class FetchPlace:
    """The directories of one model's fetch."""

    model_id: str
    target: Path  # where the finished model lies
    downloads: Path  # shared by all fetches
    draft: Path  # becomes the target

    @property
    def is_complete(self) -> bool:
        return (self.target / "config.json").is_file()

    def need_bytes(self, num_bytes: int) -> None:
        """Raises FetchError if the disk has less than that free."""
        free = shutil.disk_usage(self.downloads).free
        if free < num_bytes:
            raise FetchError(
                f"{self.model_id} needs {format_bytes(num_bytes)} more at {self.downloads}; "
                f"{format_bytes(free)} are free"
            )

    def finish(self) -> None:
        """Put the draft in the target's place. Raises OSError."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        old = self.draft.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.draft.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def fetch_place(model_id: str) -> Iterator[FetchPlace]:
    """The place of one fetch, for this process alone. Disk errors inside come out as FetchError that names the file.

    Raises ModelError for an id that cannot be fetched, and FetchError if another process is fetching it.
    """
    target = fetched_dir(model_id)
    downloads = models_dir() / "downloads"
    name = "--".join(target.relative_to(models_dir()).parts)
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with _locked(downloads / f"{name}.lock", model_id):
            yield FetchPlace(model_id, target, downloads, downloads / f"{name}.draft")
    except OSError as error:
        where = error.filename or downloads
        raise FetchError(f"{model_id} cannot be stored: {where}: {error.strerror or error}") from error


@contextmanager
def _locked(path: Path, model_id: str) -> Iterator[None]:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FetchError(f"another process is fetching {model_id}") from error
        yield  # the file stays: to remove it would let two processes lock two files of this name
