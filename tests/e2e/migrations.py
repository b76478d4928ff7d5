"""Does a stream survive the death of its decode worker, and how often of how many: a slow check, run by hand.

    python -m tests.e2e.migrations --count 200

Starts a cluster with two decode workers, keeps greedy and seeded (temperature 1) streams running, and kills decode
workers in mid-stream with SIGKILL until so many requests have migrated. Each stream must be, token by token, what it is
undisturbed: no gap, no repeat, no other token. Exit code 1 when one differs or fails, or a block is stranded.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from cluster.events import (
    RequestArrived,
    RequestDispatched,
    RequestFailed,
    RequestMigrated,
    TokensDelivered,
    WorkerReady,
    WorkerStats,
)
from tests.e2e.client import Client
from tests.e2e.conftest import EXACT, PDCONSOLE, ROOT, RunningCluster

STREAMS: Final = 4
MAX_TOKENS: Final = 400
PROMPTS: Final = (
    "def read_lines(path):\n",
    "import os\nimport sys\n\n",
    "class Queue:\n    def __init__(self",
)


@dataclass
class Kind:
    """One request and what it answers undisturbed: a piece of text for each token."""

    name: str
    body: dict[str, Any]
    expected: list[str] = field(default_factory=list)


@dataclass
class Tally:
    streams: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)


def kinds() -> list[Kind]:
    made = []
    for number, prompt in enumerate(PROMPTS):
        made.append(Kind(f"greedy {number}", {"temperature": 0, "prompt": prompt}))
        made.append(Kind(f"seeded {number}", {"temperature": 1.0, "seed": 100 + number, "prompt": prompt}))
    return made


def stream(client: Client, kind: Kind) -> list[str]:
    fields = {"max_tokens": MAX_TOKENS, **kind.body}
    return [piece["choices"][0]["text"] for piece in client.stream(fields.pop("prompt"), **fields)]


def ask_for_ever(client: Client, all_kinds: list[Kind], tally: Tally, ending: threading.Event) -> None:
    for kind in random.Random(threading.get_ident()).choices(all_kinds, k=1_000_000):
        if ending.is_set():
            return
        try:
            found = stream(client, kind)
        except (httpx2.HTTPError, AssertionError) as error:
            tally.different.append(f"{kind.name}: {type(error).__name__}: {error}")
            continue
        tally.streams[kind.name.split()[0]] += 1
        if found != kind.expected:
            same = next(
                (n for n, (a, b) in enumerate(zip(found, kind.expected, strict=False)) if a != b), len(found)
            )
            tally.different.append(f"{kind.name}: {len(found)} tokens, the first other one at {same}")


def run(cluster: RunningCluster, count: int, seed: int) -> int:
    chance = random.Random(seed)
    all_kinds, tally, ending = kinds(), Tally(), threading.Event()
    with Client(cluster) as client:
        for kind in all_kinds:
            kind.expected = stream(client, kind)
            assert len(kind.expected) == MAX_TOKENS
        threads = [
            threading.Thread(target=ask_for_ever, args=(client, all_kinds, tally, ending))
            for _ in range(STREAMS)
        ]
        for thread in threads:
            thread.start()
        began_at, deaths = time.monotonic(), 0
        try:
            while len(migrations(cluster)) < count and not tally.different:
                since = len(cluster.events())
                arrived = cluster.wait_for(
                    RequestArrived,
                    lambda e, s=since: e.index >= s and e.label != "probe",  # type: ignore[misc]
                )
                wanted = chance.randrange(MAX_TOKENS - 100)
                cluster.wait_for(
                    TokensDelivered,
                    lambda e, i=arrived.request_id, n=wanted: (
                        e.request_id == i and e.first_position + len(e.token_at) > n
                    ),  # type: ignore[misc]
                )
                last = [
                    e
                    for e in cluster.events()
                    if isinstance(e, RequestDispatched) and e.request_id == arrived.request_id
                ][-1]
                os.kill(pid_of(cluster, last.decode_worker), signal.SIGKILL)
                deaths += 1
                killed = len(cluster.events())
                cluster.wait_for(
                    WorkerReady,
                    lambda e, s=killed, w=last.decode_worker: e.index >= s and e.worker_id == w,  # type: ignore[misc]
                )
                print(f"\r{len(migrations(cluster))} migrations, {deaths} deaths", end="", flush=True)
        finally:
            ending.set()
            for thread in threads:
                thread.join()
        took_s = time.monotonic() - began_at
    print()
    return report(cluster, tally, deaths, took_s)


def report(cluster: RunningCluster, tally: Tally, deaths: int, took_s: float) -> int:
    found = migrations(cluster)
    moved = Counter(event.request_id for event in found)
    failed = [event.reason for event in cluster.events() if isinstance(event, RequestFailed)]
    stranded = max(
        (event.stranded_blocks for event in cluster.events() if isinstance(event, WorkerStats)), default=0
    )
    streams = sum(tally.streams.values())
    print(f"{len(found)} migrations of {len(moved)} streams, at most {max(moved.values(), default=0)} of one")
    print(
        f"{deaths} decode workers killed in {took_s:.0f} s; {streams} streams of {MAX_TOKENS} tokens "
        f"({', '.join(f'{n} {name}' for name, n in sorted(tally.streams.items()))})"
    )
    print(f"{len(tally.different)} differ from undisturbed, {len(failed)} failed, {stranded} blocks stranded")
    for line in [*tally.different[:10], *failed[:10]]:
        print(f"  {line}")
    return 1 if tally.different or failed or stranded else 0


def migrations(cluster: RunningCluster) -> list[RequestMigrated]:
    return [event for event in cluster.events() if isinstance(event, RequestMigrated)]


def pid_of(cluster: RunningCluster, worker_id: str) -> int:
    return [e.pid for e in cluster.events() if isinstance(e, WorkerReady) and e.worker_id == worker_id][-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="migrations to make (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of death (0)")
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir, output = Path(directory, "run"), Path(directory, "run.out")
        with output.open("w") as out, output.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                [
                    *(*PDCONSOLE, "up", "--headless", "--port", "0", "--decode", "2", *EXACT),
                    *("--model", arguments.model, "--run-dir", str(run_dir)),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        cluster = RunningCluster(process, run_dir, output)
        try:
            return run(cluster.wait_ready(), arguments.count, arguments.seed)
        finally:
            cluster.end(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
