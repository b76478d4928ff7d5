"""The ``pdconsole`` command line: finds the command, hands it the rest of the line, turns errors into exit codes.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``, and one row in ``COMMANDS``. Only
the chosen command's module is imported, so that ``--help`` is quick and ``plan`` needs no Textual.

Exit codes: 0 ok; 1 a verdict or check failed, or the run broke; 2 wrong usage or configuration; 3 the environment
lacks something required; 130 interrupted.
"""

import argparse
import difflib
import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from cluster.profile import ProfileError
from cluster.run_dir import RunDirError
from console.errors import EXIT_USAGE, UserError

EXIT_INTERRUPTED: Final = 130
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk, or whatever the output goes to, says when it takes no more."""


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table."""

    name: str
    module: str
    help: str


COMMANDS: Final = (
    Command("up", "console.up", "start a cluster and open the console (or run it headless)"),
    Command("attach", "console.attach", "open a console on a cluster that is running already"),
    Command("stop", "console.stop_command", "stop a running cluster from outside"),
    Command("replay", "console.replay", "watch a finished run again, or compare two"),
    Command(
        "drill", "console.drill_command", "break a cluster on purpose and judge what became of its promises"
    ),
    Command("load", "console.load_command", "drive a running cluster with a load of a profile"),
    Command("plan", "console.plan_command", "does moving KV beat recomputing it on a given link"),
    Command("bench", "console.bench_command", "measure one part of the system on this machine"),
    Command("runs", "console.runs_command", "list the runs on this machine, or show one"),
    Command("export", "console.export_command", "write a run as jsonl, csv, parquet, perfetto or vllm-bench"),
    Command("chart", "console.chart_command", "draw a run as a picture"),
    Command("report", "console.report_command", "compare runs on one HTML page"),
    Command("model", "console.model_command", "list the models that can be used, or describe one"),
    Command("doctor", "console.doctor_command", "what this machine can do"),
    Command("completion", "console.completion", "print a completion script for bash, zsh or fish"),
)


class _Parser(argparse.ArgumentParser):
    """Errors become one line (UserError) in place of argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)", EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code. ``argv`` None = the process's own arguments."""
    return _guarded(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    parser = _top_parser()
    if not argv:
        parser.print_help()
        return 0
    if argv[0].startswith("-"):
        parser.parse_args(argv)  # --help and --version end here
    command = _find_command(argv[0])
    module = importlib.import_module(command.module)
    command_parser = _Parser(prog=f"pdconsole {command.name}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(command_parser)
    run: Callable[[argparse.Namespace], int] = module.run
    return run(command_parser.parse_args(argv[1:]))


def _find_command(name: str) -> Command:
    names = [row.name for row in COMMANDS]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"command {name!r} is unknown; allowed: {', '.join(names)}{hint}")
    return COMMANDS[names.index(name)]


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(row.name) for row in COMMANDS)
    parser = _Parser(
        prog="pdconsole",
        usage="pdconsole COMMAND [options]",
        description="Runs, drills and measures a prefill/decode disaggregated LLM inference cluster.",
        epilog="commands:\n"
        + "\n".join(f"  {row.name:{width}}  {row.help}" for row in COMMANDS)
        + "\n\n'pdconsole COMMAND --help' tells a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = importlib.metadata.version("pdconsole")
    parser.add_argument("--version", action="version", version=f"pdconsole {version}")
    return parser


def _guarded(run: Callable[[], int]) -> int:
    """Errors that a user can cause end as one line on stderr and an exit code, never as a traceback."""
    try:
        return _flushed(run)
    except (ProfileError, RunDirError) as error:
        return _complain(str(error), EXIT_USAGE)
    except UserError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has enough. Nothing more may be written, not even at interpreter exit.
        _silence()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _silence()
        return _complain(f"{error.filename or 'standard output'} cannot be written: {error.strerror}", 1)


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flushed(run: Callable[[], int]) -> int:
    """Its exit code, with all that it said out of this process; what cannot go out raises here and not at the end."""
    try:
        code = run()
    except SystemExit as stop:  # argparse, after --help and --version
        code = stop.code if isinstance(stop.code, int) else 0
    sys.stdout.flush()
    return code


def _complain(message: str, exit_code: int) -> int:
    print(f"pdconsole: error: {message}", file=sys.stderr)
    return exit_code
