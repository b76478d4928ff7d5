"""Writes the log of a long, busy run: for measuring how replay and the live console cope, and for tests of both.

    python -m tests.console.long_log FILE [--events N] [--requests-per-s R]

The events are those of tests.console.history: steady requests all the time, every minute a burst, every five minutes
a kill with its fallback and restart. Deterministic.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from cluster.events import BurstInjected, Event, LoadStarted
from cluster.run_log import write_events
from tests.console.history import kill_and_restart, killed_request, request, start, stats

BLOCK_S = 10.0


def long_run(requests_per_s: float = 20.0, at: float = 1000.0) -> Iterator[Event]:
    """Events in the order of a log and numbered, without end; about twelve a request."""
    rng = random.Random(3)
    index = 0
    for event in start(at):
        yield msgspec.structs.replace(event, index=index)
        index += 1
    begin, block, late = at + 4.0, 0, list[Event]()
    events: list[Event] = [LoadStarted(at=begin, name="steady", detail="a long run", cause="operator, key s")]
    while True:
        end = begin + BLOCK_S
        moment = begin
        while (moment := moment + rng.expovariate(requests_per_s)) < end:
            events += request(
                f"r{rng.getrandbits(48):012x}", moment, output_tokens=rng.randint(20, 60), rng=rng
            )
        if block % 6 == 1:
            events.append(
                BurstInjected(at=begin + 1.0, prompts=1, prompt_tokens=8000, cause="operator, key b")
            )
            events += request(
                f"b{rng.getrandbits(48):012x}",
                begin + 1.01,
                prompt_tokens=8000,
                output_tokens=16,
                label="burst",
                rng=rng,
            )
        if block % 30 == 2:
            events += kill_and_restart(begin + 3.0)
            events += killed_request(f"k{rng.getrandbits(48):012x}", begin + 2.2, begin + 3.0)
        for half_second in range(int(BLOCK_S * 2)):
            events += stats(begin + half_second / 2, prefill_alive=True, running=rng.randint(1, 30))
        events += late
        events.sort(key=lambda event: event.at)
        late = [event for event in events if event.at >= end]
        for event in events:
            if event.at < end:
                yield msgspec.structs.replace(event, index=index)
                index += 1
        begin, block, events = end, block + 1, []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--requests-per-s", type=float, default=20.0)
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    write_events(args.file, islice(long_run(args.requests_per_s), args.events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
