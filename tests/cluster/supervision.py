"""What the supervision tests share: waiting for a fact, looking for processes."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 30.0


def child_command(mode: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.cluster.link_child", mode)


async def until(is_true: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Return once it is true; fail the test, naming it, when it never becomes so."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)


def until_now(is_true: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """``until`` without an event loop."""
    asyncio.run(until(is_true, what, limit_s))


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def namespaces() -> set[int]:
    """Inodes of the network namespaces that any process is in or holds open."""
    found = set()
    for link in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("net:["):
            found.add(int(target[5:-1]))
    return found
