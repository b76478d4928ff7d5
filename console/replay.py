"""Watch a finished run again: the console over its log. RUN is a run's name, the beginning of it, its directory, or
latest.

Space plays and pauses, g goes to a time or an event, [ and ] to what was done; ? shows all keys.
"""

import argparse
import importlib

from cluster.run_dir import find_run
from console.console_options import add_ascii_argument, console_options, with_config
from console.errors import EXIT_ENVIRONMENT, UserError
from console.tty import why_no_screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run's name, the beginning of it, its directory, or latest"
    )
    parser.add_argument(
        "--at",
        metavar="WHERE",
        help="begin there: 1:23, 50%%, or a kind of event (default: when the cluster was ready)",
    )
    add_ascii_argument(parser)
    parser.add_argument("--with", dest="other", metavar="RUN", help="a second run to compare it with")


def run(args: argparse.Namespace) -> int:
    """The app's exit code. Raises UserError for a run that cannot be read, or where no terminal is."""
    records = [find_run(name) for name in (args.run, args.other) if name is not None]
    if why := why_no_screen():
        raise UserError(
            f"replay needs a terminal, but {why}; without one see: pdconsole runs show, pdconsole export",
            EXIT_ENVIRONMENT,
        )
    # Textual takes its time to import, and a wrong name should not have to wait for it.
    session = importlib.import_module("console.replay_session")
    exit_code: int = session.show(records, args.at, with_config(console_options(args, read_only=True)))
    return exit_code
