"""`pdconsole plan --trace FILE --validate`: the same requests through the simulation and through a real cluster.

The cluster is brought up for it, by the same profile, link and limits; its figures are read from its run log.
"""

import argparse
import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.events import Event, RequestArrived, RequestFinished
from cluster.load import LoadGenerator
from cluster.planner import PlanLink
from cluster.profile import Profile
from cluster.run_log import EVENTS_FILE, read_events
from cluster.sim_cluster import simulate
from cluster.sim_spec import SimSpec
from cluster.sim_validation import fold_run, validation_document
from cluster.slo import format_slos
from cluster.trace import ScaledTrace, planned_requests
from console.bench_cluster import BenchCluster, new_run, run_on_cluster
from console.errors import UserError
from console.launch import LaunchError
from console.load_command import MAX_TRACE_IN_FLIGHT
from console.plan_trace import Subject
from console.run_page import number
from console.signals import Signals

EXIT_MISSED: Final = 1
MAX_REAL_S: Final = 600.0
"""A trace that lasts longer is not sent to a real cluster: --requests and --speed make it shorter."""

_DRAIN_S: Final = 120.0


def run(args: argparse.Namespace, subject: Subject, spec: SimSpec, trace: ScaledTrace, link: PlanLink) -> int:
    """Exit code 0 when p50, p90 and goodput are within the goal, 1 when not. Raises UserError."""
    prefill, decode = _ratio(args.validate)
    lasts_s = trace.requests[-1].at_s
    if lasts_s > MAX_REAL_S:
        raise UserError(
            f"--validate: the trace lasts {lasts_s:,.0f} s; allowed are {MAX_REAL_S:,.0f}: see --requests, --speed"
        )
    forecast = simulate(dataclasses.replace(spec, prefill=prefill, decode=decode), trace.requests)
    profile = _served(subject.profile, prefill, decode, link)
    run_dir, lag_s = asyncio.run(_measure(profile, trace))
    events = list(read_events(run_dir / EVENTS_FILE))
    measured = fold_run(events)
    document = {
        "question": "forecast against a real run",
        "run": run_dir.name,
        "split": forecast.name,
        "model": {"id": subject.model_id, "dtype": subject.dtype},
        "costs_from": subject.costs_from,
        "trace": trace.detail,
        "slo": format_slos(spec.slos),
        "link": link.name,
        **validation_document(
            forecast, measured, spec.slos, _duration_s(events), {"schedule_lag_p99_ms": lag_s * 1e3}
        ),
    }
    print(json.dumps(document, indent=2) if args.json else _text(document), flush=True)
    return 0 if document["goal_met"] else EXIT_MISSED


def _ratio(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if found is None or int(found[2]) < 1:
        raise UserError(f"--validate is {text}; allowed is P:D, e.g. 1:1; 0:2 is two co-located workers")
    return int(found[1]), int(found[2])


def _served(profile: Profile, prefill: int, decode: int, link: PlanLink) -> Profile:
    """The profile as the simulation understands it."""
    cluster = msgspec.structs.replace(
        profile.cluster,
        prefill=prefill,
        decode=decode,
        mode="disagg" if prefill else "colocated",
        handoff="always",
    )
    shaped = msgspec.structs.replace(
        profile.link,
        bandwidth="unlimited" if link.bits_per_s == float("inf") else f"{link.bits_per_s:.0f}bit",
        delay_ms=link.delay_ms,
        target="",
        rho=0.0,
    )
    return msgspec.structs.replace(
        profile,
        cluster=cluster,
        link=shaped,
        kv=msgspec.structs.replace(profile.kv, codec="raw"),
        router=msgspec.structs.replace(profile.router, port=0),
    )


async def _measure(profile: Profile, trace: ScaledTrace) -> tuple[Path, float]:
    """The run's directory, and how late the client was (p99)."""
    spec, lag_s = new_run(profile), 0.0

    async def drive(cluster: BenchCluster) -> None:
        nonlocal lag_s
        generator = LoadGenerator(cluster.up.url, profile, _to_nobody, profile.model.id)
        try:
            await cluster.unless_gone(
                generator.follow(
                    "trace",
                    trace.detail,
                    lambda corpus: planned_requests(trace, corpus),
                    "plan --validate",
                    MAX_TRACE_IN_FLIGHT,
                )
            )
            await cluster.unless_gone(generator.drain(_DRAIN_S))
            lag_s = generator.lag_p99_s
        finally:
            await generator.close()

    try:
        await run_on_cluster(spec, Signals(), drive)
    except LaunchError as error:
        raise UserError(str(error), error.exit_code) from error
    return Path(spec.run_dir), lag_s


def _duration_s(events: list[Event]) -> float:
    """First arrival to last end, probes left out."""
    arrived = {
        event.request_id: event.at
        for event in events
        if isinstance(event, RequestArrived) and event.label != "probe"
    }
    ended = [
        event.at for event in events if isinstance(event, RequestFinished) and event.request_id in arrived
    ]
    return max(ended, default=0.0) - min(arrived.values(), default=0.0)


def _to_nobody(_: Event) -> None:
    """The load's own events are not in the log: the trace is named by the document."""


def _text(document: dict[str, Any]) -> str:
    finished = document["finished"]
    lines = [
        f"{document['split']} of {document['model']['id']}, {document['model']['dtype']}; run {document['run']}",
        f"engine steps from {document['costs_from']}",
        f"trace: {document['trace']}; link {document['link']}; limits {document['slo']}",
        f"answered: forecast {finished['forecast']}, measured {finished['measured']}; "
        f"client late by {document['client']['schedule_lag_p99_ms']:.1f} ms (p99)",
        "",
        f"{'':16}{'forecast':>12}{'measured':>12}{'error':>9}",
    ]
    for row in document["rows"]:
        name = f"{row['figure'].removesuffix('_ms').upper()} {row['q']} ms" if row["q"] else "goodput /s"
        error = "-" if row["error"] is None else f"{row['error']:+.0%}"
        lines.append(f"{name:16}{number(row['forecast']):>12}{number(row['measured']):>12}{error:>9}")
    for who, parts in document["ttft_parts_ms"].items():
        lines.append(f"TTFT parts {who}: " + ", ".join(f"{name} {number(ms)}" for name, ms in parts.items()))
    worst = document["worst_error"]
    goal = f"the goal is {document['goal']:.0%} on p50, p90 and goodput"
    lines.append(
        f"nothing to compare; {goal}"
        if worst is None
        else f"{'met' if document['goal_met'] else 'missed'}: off by {worst:.0%} at worst; {goal}"
    )
    return "\n".join(lines)
