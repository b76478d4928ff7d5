"""Stop a running cluster from outside, for one that was detached. RUN is a run's name, the beginning of it, its
directory or its URL; without RUN the only one that is running."""

import argparse

from console.running_run import find_running, stop_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="which cluster (default: the only one that is running)"
    )
    parser.add_argument("--now", action="store_true", help="wait for no worker; the run keeps its log")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when it has ended. Raises UserError."""
    record, info = find_running(args.run)
    took_s = stop_run(record, info, at_once=args.now)
    print(f"run {record.run} stopped in {took_s:.1f} s; see: pdconsole runs show {record.run}")
    return 0
