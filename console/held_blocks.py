"""Who holds KV blocks on each worker, as the router of a running cluster answers ``GET /admin/blocks``."""

from pathlib import Path
from typing import Final

import msgspec

from cluster.http_source import FetchError, HttpSource
from cluster.run_dir import RunDirError, read_token

TIMEOUT_S: Final = 2.0


class Holder(msgspec.Struct, frozen=True):
    """One attempt that holds blocks. ``owner`` "": nobody will free them. ``is_wanted``: the router follows it."""

    request_id: str
    attempt: int
    status: str
    blocks: int
    age_s: float
    owner: str
    peer: str
    is_wanted: bool


class WorkerBlocks(msgspec.Struct, frozen=True):
    """``error`` is why a worker has no holders here."""

    worker_id: str
    holders: tuple[Holder, ...] = ()
    error: str = ""


class HeldBlocks(msgspec.Struct, frozen=True):
    held_blocks: int = 0
    stranded_blocks: int = 0
    workers: tuple[WorkerBlocks, ...] = ()
    error: str = ""

    def of(self, worker_id: str) -> WorkerBlocks:
        """What is known of that worker."""
        found = next((worker for worker in self.workers if worker.worker_id == worker_id), None)
        return found or WorkerBlocks(worker_id, error=self.error or "not among the ready workers")


def fetch_held_blocks(url: str, run_dir: Path) -> HeldBlocks:
    """Ask the router at ``url``; blocks up to TIMEOUT_S. What goes wrong is the answer's ``error``."""
    try:
        source = HttpSource(headers={"Authorization": f"Bearer {read_token(run_dir)}"}, timeout_s=TIMEOUT_S)
        with source.open(f"{url}/admin/blocks") as answer:
            return msgspec.json.decode(answer.stream.read(), type=HeldBlocks)
    except (FetchError, RunDirError, OSError, msgspec.DecodeError) as error:
        return HeldBlocks(error=str(error))
