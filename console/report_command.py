"""Compare runs on one page: an HTML file that holds everything in itself and opens without a network."""

import argparse
import importlib
import sys
from pathlib import Path

from cluster.atomic_file import write_atomically
from console.chart_command import check_ending, load_chart_data
from console.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="runs, in the order in which they are shown")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default: report.html")


def run(args: argparse.Namespace) -> int:
    path = Path(args.output)
    check_ending(path, (".html", ".htm"))
    runs = [load_chart_data(name) for name in args.runs]
    names = [run.run for run in runs]
    if len(set(names)) < len(names):
        raise UserError(f"a run is named twice: {', '.join(args.runs)}")
    page = importlib.import_module("console.report_page")  # matplotlib takes its time to import
    try:
        write_atomically(path, page.render_report(runs).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path}: {', '.join(names)}", file=sys.stderr)
    return 0
