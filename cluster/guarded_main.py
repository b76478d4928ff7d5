"""``python -m cluster.guarded_main --parent PID --cpus N,... MODULE``: run a module's program as a guarded child.

It dies with the process that started it and runs on the given cores only; both hold before anything slow is imported.
"""

import argparse
import runpy
import sys

from cluster.process_guard import ParentGone, die_with_parent, pin_to


def guarded_command(module: str, parent_pid: int, cpus: tuple[int, ...]) -> list[str]:
    """The command line that runs ``module`` so; () = on any core. ``parent_pid`` has to start it itself."""
    numbers = ",".join(map(str, cpus))
    return [
        *(sys.executable, "-m", "cluster.guarded_main"),
        *("--parent", str(parent_pid), "--cpus", numbers, module),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.guarded_main")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--cpus", default="", metavar="N,...")
    parser.add_argument("module", metavar="MODULE")
    args = parser.parse_args()
    try:
        die_with_parent(parent_pid=args.parent)
    except ParentGone:
        return
    pin_to(int(number) for number in args.cpus.split(",") if number)
    sys.argv = [args.module]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
