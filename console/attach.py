"""Open the console on a cluster that is running already: one that was detached, or a second console beside the first.

RUN is a run's name, the beginning of it, its directory, or the URL of its router; without RUN the only one that is
running. Leaving this console never stops the cluster unless you say so.
"""

import argparse
import importlib
from pathlib import Path

from console.console_options import add_console_arguments, console_options, with_config
from console.errors import EXIT_ENVIRONMENT, UserError
from console.running_run import find_running
from console.tty import why_no_screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN|URL", help="which cluster (default: the only one that is running)"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with the URL of a cluster elsewhere: its run's file 'token'; without it the console is read-only",
    )
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The console's exit code. Raises UserError."""
    is_elsewhere = args.run is not None and "://" in args.run and not _runs_here(args.run)
    if args.token_file is not None and not is_elsewhere:
        raise UserError("--token-file is for the URL of a cluster elsewhere; that of a run here is found")
    if is_elsewhere and not args.run.startswith(("http://", "https://")):
        raise UserError(f"{args.run!r} is not a URL of a router; allowed: http://HOST:PORT")
    found = None if is_elsewhere else find_running(args.run)
    if why := why_no_screen():
        raise UserError(
            f"attach needs a terminal, but {why}; without one see: pdconsole runs show, GET /events",
            EXIT_ENVIRONMENT,
        )
    module = importlib.import_module("console.attached")  # Textual takes its time to import
    options = with_config(console_options(args))
    exit_code: int = (
        module.watch_elsewhere(args.run, _token(args.token_file), options)
        if found is None
        else module.watch_here(*found, options)
    )
    return exit_code


def _runs_here(url: str) -> bool:
    try:
        find_running(url)
    except UserError:
        return False
    return True


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path} cannot be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f"--token-file {path} holds no token")
    return token
