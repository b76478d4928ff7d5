"""Measures the console under a flood of events: how far behind it falls, what it costs, what memory it takes.

    python -m tests.console.feed_rate [--events-per-s N] [--seconds S] [--size 160x45]
    python -m tests.console.feed_rate --hours H [--requests-per-s R]

A process of its own appends the events of a busy run to a log, each when its time has come; the console draws them.
With ``--hours`` it appends as fast as it can, and what counts is whether the console's memory stays where it is.
"""

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

import psutil

from cluster.control import Command, CommandDone
from cluster.events import encode_event
from cluster.run_log import EVENTS_FILE
from console.app import ConsoleApp
from tests.console.long_log import long_run

EVENTS_PER_REQUEST = 14.7
LEAD_S = 5.0
LONG_AT = 1000.0
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


def write_hours(path: Path, hours: float, requests_per_s: float) -> None:
    """At once, with the times of a run that lasts so long."""
    events = takewhile(lambda event: event.at < LONG_AT + hours * 3600, long_run(requests_per_s, at=LONG_AT))
    with path.open("wb") as file:
        for event in events:
            file.write(encode_event(event) + b"\n")


async def measure_memory(
    app: ConsoleApp, path: Path, writer: "subprocess.Popen[bytes]", size: tuple[int, int]
) -> None:
    """Prints what the console holds after every hour of the log, until all of it is read."""
    process = psutil.Process()
    async with app.run_test(size=size):
        hour = 0
        while writer.poll() is None or app.feed.log_bytes < os.stat(path).st_size:
            await asyncio.sleep(0.05)
            if app.state.num_events and app.state.last_at >= LONG_AT + (hour + 1) * 3600:
                hour = int((app.state.last_at - LONG_AT) / 3600)
                held_mib = process.memory_info().rss / 2**20
                print(f"after {hour} h: {app.state.num_events:,} events, {held_mib:.0f} MiB", flush=True)
        held_mib = process.memory_info().rss / 2**20
    print(f"at the end: {app.state.num_events:,} events, {held_mib:.0f} MiB")


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
    parser.add_argument("--hours", type=float)
    parser.add_argument("--requests-per-s", type=float, default=5.0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None and args.hours is not None:
        write_hours(args.write, args.hours, args.requests_per_s)
        return 0
    if args.write is not None:
        write(args.write, args.events_per_s, args.seconds)
        return 0
    width, height = map(int, args.size.split("x"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, EVENTS_FILE)
        app = ConsoleApp(
            path,
            _send,
            lambda wanted: Path(directory, wanted),
            "flood",
            clock=time.monotonic if args.hours is None else lambda: app.state.last_at,
        )
        path.touch()
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.console.feed_rate", "--write", str(path), *sys.argv[1:]]
        )
        wanted = measure if args.hours is None else measure_memory
        asyncio.run(wanted(app, path, writer, (width, height)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
