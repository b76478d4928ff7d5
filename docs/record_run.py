"""Records the run that the README's pictures are made from: a real cluster, a steady load, and what an operator does.

    python -m docs.record_run          about 80 seconds; on a machine that is otherwise idle

Then: python -m docs.make_pictures
"""

import asyncio
import gzip
import tempfile
from pathlib import Path
from typing import Final

from cluster.control import Command, InjectBurst, KillWorker, SetCodec, SetMode, SupervisorSpec
from cluster.profile import load_profile
from cluster.run_dir import make_run_dir
from cluster.run_log import EVENTS_FILE
from console.launch import SupervisorClient, stop_supervisor
from console.signals import Signals
from docs.make_pictures import RECORDED

BURST: Final = InjectBurst(cause="operator, key b")
STORY: Final[tuple[tuple[float, Command], ...]] = (
    (8.0, SetMode(mode="colocated", cause="operator, key m")),
    (2.0, BURST),
    (14.0, SetMode(mode="disagg", cause="operator, key m")),
    (2.0, BURST),
    (14.0, SetCodec(codec="int8", cause="operator, key i")),
    (3.0, BURST),
    (1.5, KillWorker(worker_id="prefill-0", cause="operator, key k")),
    (10.0, SetCodec(codec="raw", cause="operator, key i")),
    (1.0, BURST),
    (6.0, BURST),
)
"""Seconds to wait, then what is done."""


async def record(run_dir: Path) -> None:
    """One run into this directory."""
    name, _ = make_run_dir(run_dir)
    profile = load_profile("10gbe", {"router.port": 0, "load.steady.rate_per_s": 2.0})
    client = await SupervisorClient.launch(
        SupervisorSpec(run=name, run_dir=str(run_dir), profile=profile, load="steady")
    )
    try:
        await client.wait_up()
        for wait_s, command in STORY:
            await asyncio.sleep(wait_s)
            print((await client.send_command(command)).message, flush=True)
        await asyncio.sleep(2.0)
    finally:
        await stop_supervisor(client, Signals(), "recorded")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        asyncio.run(record(run_dir))
        packed = gzip.compress((run_dir / EVENTS_FILE).read_bytes(), compresslevel=9, mtime=0)
    RECORDED.write_bytes(packed)
    print(f"{RECORDED}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
