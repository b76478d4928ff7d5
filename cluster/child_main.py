"""What every spawned child does first: guard itself, then run over its inherited parent link."""

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.process_guard import ParentGone, die_with_parent, keep_from_children


def child_main(module: str, run: Callable[[int], Coroutine[Any, Any, int]]) -> int:
    """``main`` of ``python -m module --fd N``; ``run`` gets N. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--fd", type=int, required=True, help="inherited parent link")
    fd: int = parser.parse_args().fd
    try:
        die_with_parent(fd)
    except ParentGone:
        return 0
    keep_from_children(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    return asyncio.run(run(fd))
