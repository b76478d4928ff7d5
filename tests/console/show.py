"""Runs the console over a prepared log in a real terminal: for the terminal tests, and to look at it by hand.

    python -m tests.console.show DIRECTORY [--ascii] [--crash] [--replay] [--ignore-hangup] [--seconds S]

Makes DIRECTORY/events.jsonl if it is not there. What the app ended with is the exit code.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from cluster.control import Command, CommandDone
from cluster.run_log import EVENTS_FILE, write_events
from console.app import ConsoleApp
from console.replay_app import ReplayApp
from console.replay_log import ReplayLog
from console.run_console import run_console
from tests.console.history import END_S, story


class BrokenApp(ConsoleApp):
    """Fails while drawing, some refreshes after its start."""

    def draw(self, *, charts: bool = True) -> None:
        super().draw(charts=charts)
        if self._draws >= 3:
            secret = "value of a local"
            raise ValueError("a widget broke [/x]\nsecond line" + secret[:0])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--replay", action="store_true", help="as a finished run")
    parser.add_argument("--ignore-hangup", action="store_true", help="as if the signal never came")
    parser.add_argument("--seconds", type=float, default=END_S)
    args = parser.parse_args()
    if args.ignore_hangup:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    path = args.directory / EVENTS_FILE
    if not path.exists():
        args.directory.mkdir(parents=True, exist_ok=True)
        write_events(path, story(args.seconds, at=time.monotonic() - args.seconds))

    async def send(command: Command) -> CommandDone:
        return CommandDone(command_id=0, ok=True, message=f"done: {type(command).__name__}")

    if args.replay:
        return run_console(
            ReplayApp([ReplayLog(path)], lambda wanted: args.directory / wanted, ["shown-run"])
        )
    kind = BrokenApp if args.crash else ConsoleApp
    app = kind(
        path, send, lambda wanted: args.directory / f"run.{wanted}", "shown-run", ascii_only=args.ascii
    )
    return run_console(app)


if __name__ == "__main__":
    sys.exit(main())
