"""Measures the console under a flood of events: how far behind it falls, what it costs, what memory it takes.

    python -m tests.console.feed_rate [--events-per-s N] [--seconds S] [--size 160x45]

A process of its own appends the events of a busy run to a log, each when its time has come; the console draws them.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

from cluster.control import Command, CommandDone
from cluster.events import encode_event
from cluster.run_log import EVENTS_FILE
from console.app import ConsoleApp
from tests.console.long_log import long_run

EVENTS_PER_REQUEST = 14.7
LEAD_S = 5.0
START_S = 8.0
"""The log begins that long before now, so that its start-up is over when the flood begins."""


def write(path: Path, events_per_s: float, seconds: float) -> None:
    """In time; what has come due is flushed every 50 ms, as the supervisor does. Made beforehand, to be in time."""
    begin = time.monotonic() + LEAD_S
    flood = takewhile(
        lambda event: event.at < begin + seconds,
        long_run(events_per_s / EVENTS_PER_REQUEST, at=begin - START_S),
    )
    lines = [(event.at, encode_event(event) + b"\n") for event in flood]
    with path.open("wb") as file:
        for at, line in lines:
            while at > time.monotonic():
                file.flush()
                time.sleep(0.05)
            file.write(line)


async def measure(
    app: ConsoleApp, path: Path, writer: "subprocess.Popen[bytes]", size: tuple[int, int]
) -> None:
    """Until the writer has ended."""
    behind, lags = list[float](), list[float]()
    async with app.run_test(size=size):
        is_flooded = False
        while writer.poll() is None:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            if not app.state.num_events:
                continue
            if not is_flooded:
                is_flooded = True
                began_at, used, folded = before, time.process_time(), app.state.num_events
            lags.append(time.monotonic() - before - 0.05)
            behind.append(time.monotonic() - app.state.last_at)
        took_s = time.monotonic() - began_at
        rate = (app.state.num_events - folded) / took_s
        cpu = (time.process_time() - used) / took_s * 100
    behind.sort()
    lags.sort()
    print(
        f"{rate:,.0f} events/s for {took_s:.0f} s at {size[0]}x{size[1]}: behind p50 {behind[len(behind) // 2]:.2f} s, "
        f"p99 {behind[int(len(behind) * 0.99)]:.2f} s, of which up to 0.15 s are the turns of writer and reader\n"
        f"loop lag p50 {lags[len(lags) // 2] * 1000:.0f} ms, p99 {lags[int(len(lags) * 0.99)] * 1000:.0f} ms; "
        f"cpu {cpu:.0f} % of a core; {app._pace.redraws_per_s:g} redraws/s at the end, {app._pace.skipped} skipped; "
        f"memory peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )


async def _send(command: Command) -> CommandDone:
    return CommandDone(command_id=0, ok=True, message=type(command).__name__)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events-per-s", type=float, default=5000.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", default="160x45")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write(args.write, args.events_per_s, args.seconds)
        return 0
    width, height = map(int, args.size.split("x"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, EVENTS_FILE)
        app = ConsoleApp(path, _send, lambda wanted: Path(directory, wanted), "flood")
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.console.feed_rate", "--write", str(path),
             "--events-per-s", str(args.events_per_s), "--seconds", str(args.seconds)]
        )  # fmt: skip
        asyncio.run(measure(app, path, writer, (width, height)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
