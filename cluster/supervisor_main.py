"""``python -m cluster.supervisor_main --fd N``: the supervisor process. N is its end of the parent link.

The first line down the link is a SupervisorSpec. The link's end is the lifeline: a supervisor whose parent is gone
stops its cluster and exits.

The nursery is started before anything slow is imported here: its own imports are what a start waits for longest.
"""

import argparse
import asyncio
import importlib
import sys
from typing import Final

from cluster.nursery import Nursery
from cluster.process_guard import become_subreaper, keep_from_children
from cluster.python_program import PYTHON_MODULE
from cluster.spawner import ProgramSpawner

WORKER_COMMAND: Final = (*PYTHON_MODULE, "cluster.worker_main")


def main() -> int:
    """The exit code: 0, or what StartFailed said."""
    parser = argparse.ArgumentParser(prog="python -m cluster.supervisor_main")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the parent link")
    parent_fd: int = parser.parse_args().fd
    keep_from_children(parent_fd)
    become_subreaper()
    nursery = Nursery.start(fallback=ProgramSpawner(WORKER_COMMAND))
    code: int = asyncio.run(importlib.import_module("cluster.supervisor_run").supervise(parent_fd, nursery))
    return code


if __name__ == "__main__":
    sys.exit(main())
