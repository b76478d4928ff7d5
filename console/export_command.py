"""Write a run in another tool's format. RUN is a run's name, the beginning of it, its directory, or latest."""

import argparse
import sys
from pathlib import Path

from cluster.export import FORMATS, ExportError, export_run, write_export
from cluster.export_table import MissingLibraryError
from cluster.run_dir import RunDirError, find_run
from cluster.run_log import PassedOver, RunLogError
from console.errors import EXIT_ENVIRONMENT, UserError
from console.summary_text import tell_passed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run's name, the beginning of it, its directory, or latest"
    )
    parser.add_argument(
        "--format",
        default="jsonl",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)} (default: jsonl)",
    )
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="a file, or - for stdout (default)"
    )


def run(args: argparse.Namespace) -> int:
    return export(args.run, args.format, args.output)


def export(run_name: str, fmt: str, output: str) -> int:
    """Exit code 0. Raises UserError for an unknown run or format, a log without an event, a place that cannot be
    written, a library that is not installed."""
    passed = PassedOver()
    try:
        record = find_run(run_name)
        content = export_run(record.path, fmt, passed)
        tell_passed(record.path.name, passed)
        if output == "-":
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        else:
            write_export(Path(output), content)
    except MissingLibraryError as error:
        raise UserError(str(error), EXIT_ENVIRONMENT) from error
    except (RunDirError, RunLogError, ExportError) as error:
        raise UserError(str(error)) from error
    return 0
