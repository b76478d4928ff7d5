"""Draw a run as a picture: ITL over time with what was done, TTFT by its parts, KV on the wire, distributions."""

import argparse
import importlib
import sys
from pathlib import Path

from cluster.run_dir import RunDirError, find_run
from cluster.run_log import EVENTS_FILE, PassedOver, RunLogError, read_events
from console.errors import UserError
from console.run_chart_data import ChartData, chart_data
from console.summary_text import tell_passed

_ENDINGS = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run's name, the beginning of it, its directory, or latest"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to; .png or .svg (default: RUN.png here)"
    )


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_ending(Path(args.output))
    data = load_chart_data(args.run)
    path = Path(args.output) if args.output is not None else Path(f"{data.run}.png")
    charts = importlib.import_module("console.run_chart")  # matplotlib takes its time to import
    try:
        charts.save_run_chart(data, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path}: {len(data.finished)} requests, {len(data.gap_ms)} gaps", file=sys.stderr)
    return 0


def check_ending(path: Path, allowed: tuple[str, ...] = _ENDINGS) -> None:
    """Raises UserError before anything is read."""
    if path.suffix.lower() not in allowed:
        raise UserError(f"{path}: the ending must be one of {', '.join(allowed)}")


def load_chart_data(run: str) -> ChartData:
    """Raises UserError for an unknown run or a log that cannot be read."""
    try:
        record = find_run(run)
        passed = PassedOver()
        data = chart_data(record.path.name, read_events(record.path / EVENTS_FILE, passed))
    except (RunDirError, RunLogError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"run {run}: its log cannot be read: {error.strerror}") from error
    tell_passed(data.run, passed)
    return data
