"""Options of every command that opens the console."""

import argparse
import importlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from console.config import Config


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """``read_only``: nothing can be sent to the cluster. ``ascii_only``: nothing but ASCII is drawn. ``config``: the
    operator's own settings, None where they were not read."""

    read_only: bool = False
    ascii_only: bool = False
    config: "Config | None" = None


def add_console_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("console")
    group.add_argument(
        "--read-only", action="store_true", help="watch only: every key that changes the cluster is refused"
    )
    add_ascii_argument(group)


def add_ascii_argument(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument(
        "--ascii",
        action="store_true",
        help="draw with ASCII only (default where the terminal's encoding is not UTF)",
    )


def console_options(args: argparse.Namespace, *, read_only: bool = False) -> ConsoleOptions:
    """``read_only``: whatever the command line says."""
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    return ConsoleOptions(read_only=read_only or args.read_only, ascii_only=args.ascii or not is_utf)


def with_config(options: ConsoleOptions) -> ConsoleOptions:
    """The same over the operator's own settings. Imports what only a console needs. Raises ConfigError."""
    config: Config = importlib.import_module("console.config").load_config()
    return replace(options, ascii_only=options.ascii_only or config.ascii_only, config=config)
