"""The runs on this machine: list them, or show one. RUN is a name, the beginning of one, a directory, or latest."""

import argparse
import json
import time
from collections import deque
from typing import Any, Final

from cluster.events import Event, LinkConfigured
from cluster.run_dir import RunDirError, RunRecord, find_run, list_runs
from cluster.run_log import EVENTS_FILE, PassedOver, RunLogError, read_events
from cluster.summary import SCHEMA, summarize
from console.errors import UserError
from console.feed_text import CLUSTER, FAULTS, REQUESTS, TRANSFERS, feed_line
from console.run_page import render_page
from console.summary_text import read_summary, tell_passed
from console.text_format import clean, format_stamp

MAX_EVENT_LINES: Final = 40

_QUIET: Final = (CLUSTER, FAULTS, REQUESTS, TRANSFERS)
"""Categories whose good news is left out: processes starting, and stopping as they should."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="list|show", required=True)
    listing = commands.add_parser("list", help="every run, oldest first", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    show = commands.add_parser("show", help="one run on a page", allow_abbrev=False)
    show.add_argument(
        "run", metavar="RUN", help="a run's name, the beginning of it, its directory, or latest"
    )
    show.add_argument("--json", action="store_true", help="print the run's summary as one JSON document")


def run(args: argparse.Namespace) -> int:
    return show_list(as_json=args.json) if args.what == "list" else show_run(args.run, as_json=args.json)


def show_list(*, as_json: bool) -> int:
    """One line a run. A run that wrote no summary is summarized from its log. Exit code 0."""
    rows = [_list_row(record) for record in list_runs()]
    if as_json:
        print(json.dumps({"runs": rows}, indent=2))
    elif not rows:
        print("no runs yet; start one with: pdconsole up")
    else:
        print(_table(rows))
    return 0


def show_run(name: str, *, as_json: bool) -> int:
    """The summary as a page or as JSON. Exit code 0. Raises UserError for an unknown or unreadable run."""
    try:
        record = find_run(name)
    except RunDirError as error:
        raise UserError(str(error)) from error
    alive = record.is_alive
    passed = PassedOver()
    try:
        summary = _summary(record, passed, alive=alive)
        if summary is None:
            raise UserError(f"run {record.run} has no log: {record.path / EVENTS_FILE} is missing")
        if as_json:
            print(json.dumps(summary | {"alive": alive}, indent=2))
        else:
            lines = _event_lines(record, passed)
            print(render_page(summary, alive=alive, path=str(record.path), event_lines=lines))
    except RunLogError as error:
        raise UserError(str(error)) from error
    tell_passed(record.path.name, passed)
    return 0


def _summary(record: RunRecord, passed: PassedOver, *, alive: bool) -> dict[str, Any] | None:
    """The run's own summary; of a run that is up or ended without one, what its log says now. None: no log."""
    summary = None if alive else read_summary(record.path)
    path = record.path / EVENTS_FILE
    if (summary is None or summary.get("schema") != SCHEMA) and path.is_file():
        summary = summarize(read_events(path, passed))
    return summary


def _list_row(record: RunRecord) -> dict[str, Any]:
    """Named by its directory, which is what finds it; ``log_of`` is what the run called itself, another name in a
    copy."""
    alive = record.is_alive
    passed = PassedOver()
    try:
        summary = _summary(record, passed, alive=alive)
        problem = str(passed)
    except RunLogError as error:
        summary, problem = None, str(error)
    found = summary or {}
    requests = found.get("requests", {})
    info = record.info
    started = info.clock.wall if info else found.get("started_wall_at")
    return {
        "run": record.path.name,
        "log_of": record.run,
        "started_wall_at": started,
        "profile": found.get("profile") or (info.profile.name if info else ""),
        "model": found.get("model") or (info.profile.model.id if info else ""),
        "mode": found.get("mode") or (info.profile.cluster.mode if info else ""),
        "duration_s": found.get("duration_s"),
        "finished": requests.get("finished"),
        "failed": requests.get("failed"),
        "alive": alive,
        "problem": problem,
        "path": str(record.path),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    header = ("RUN", "STARTED", "PROFILE", "MODEL", "MODE", "SECONDS", "FINISHED", "FAILED", "STATE")
    cells = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    started, duration_s = row["started_wall_at"], row["duration_s"]
    return (
        clean(row["run"]),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else "-",
        clean(row["profile"]),
        clean(row["model"]),
        row["mode"],
        f"{duration_s:.1f}" if duration_s is not None else "-",
        *(str(row[key]) if row[key] is not None else "-" for key in ("finished", "failed")),
        _state(row),
    )


def _state(row: dict[str, Any]) -> str:
    copied = f", a copy of {clean(row['log_of'])}" if row["log_of"] != row["run"] else ""
    if row["alive"]:
        return f"up{copied}"
    if row["problem"]:
        return ("unreadable log" if row["finished"] is None else "damaged log") + copied
    return f"ended{copied}"


def _event_lines(record: RunRecord, passed: PassedOver) -> list[str]:
    """What was done to the cluster and what went wrong, stamped from the run's start; the last of many."""
    lines: deque[str] = deque(maxlen=MAX_EVENT_LINES)
    count = 0
    started_at: float | None = None
    for event in read_events(record.path / EVENTS_FILE, passed):
        started_at = event.at if started_at is None else started_at
        if text := _event_text(event):
            lines.append(f"{format_stamp(event.at - started_at):>8}  {clean(text)}")
            count += 1
    earlier = (
        [f"          ({count - len(lines)} earlier ones: see pdconsole export)"] if count > len(lines) else []
    )
    return [*earlier, *lines]


def _event_text(event: Event) -> str:
    line = feed_line(event)
    if line is None or line.routine:
        return ""
    passes_in_silence = line.category in _QUIET and line.level in ("info", "good")
    return "" if passes_in_silence and not isinstance(event, LinkConfigured) else line.text
