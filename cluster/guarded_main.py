"""``python -m cluster.guarded_main --parent PID --cpus N,... MODULE``: run a module's program as a guarded child.
With ``--program`` what follows is any program and its arguments.

It dies with the process that started it and runs on the given cores only; both hold before anything slow is imported.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from cluster.process_guard import ParentGone, die_with_parent, pin_to
from cluster.python_program import PYTHON_MODULE


def guarded_command(module: str, parent_pid: int, cpus: tuple[int, ...]) -> list[str]:
    """The command line that runs ``module`` so; () = on any core. ``parent_pid`` has to start it itself."""
    return [*_guard(parent_pid, cpus), module]


def guarded_program(program: Sequence[str], parent_pid: int, cpus: tuple[int, ...]) -> list[str]:
    """The same for a program that is no module of Python."""
    return [*_guard(parent_pid, cpus), "--program", *program]


def _guard(parent_pid: int, cpus: tuple[int, ...]) -> list[str]:
    numbers = ",".join(map(str, cpus))
    return [
        *(*PYTHON_MODULE, "cluster.guarded_main"),
        *("--parent", str(parent_pid), "--cpus", numbers),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.guarded_main")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--cpus", default="", metavar="N,...")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--program", nargs=argparse.REMAINDER, metavar="PROGRAM")
    what.add_argument("module", nargs="?", metavar="MODULE")
    args = parser.parse_args()
    try:
        die_with_parent(parent_pid=args.parent)
    except ParentGone:
        return
    pin_to(int(number) for number in args.cpus.split(",") if number)
    if args.program:
        os.execvp(args.program[0], args.program)  # the kernel keeps the guard
    sys.argv = [args.module]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
