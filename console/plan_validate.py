"""`pdconsole plan --trace FILE --validate`: the same requests through the simulation and through real clusters.

They are brought up for it, by the same profile, link and limits; their figures are read from their run logs. A round
measures the engine, has a cluster of each mode answer the calibration's requests (not with --like), and then forecasts
and runs the trace with every split: what a forecast knows of the machine is a minute old.
"""

import argparse
import asyncio
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from cluster.calibration_trace import calibration_trace
from cluster.events import Event
from cluster.load import LoadGenerator
from cluster.machine_facts import machine_facts
from cluster.planner import PlanLink
from cluster.profile import Profile
from cluster.run_log import EVENTS_FILE, RunLogError, read_events
from cluster.sim_calibration import Learned, NothingToLearn
from cluster.sim_cluster import simulate
from cluster.sim_spec import SimSpec, mode_of
from cluster.sim_validation import GOAL, Trial, fold_run, split_document
from cluster.slo import format_slos
from cluster.trace import ScaledTrace, planned_requests
from console.bench_cluster import BenchCluster, new_run, run_on_cluster
from console.bench_output import ProgressLine
from console.errors import UserError
from console.launch import LaunchError
from console.load_command import MAX_TRACE_IN_FLIGHT
from console.plan_trace import Subject, in_mode, known_of, learn, settle, this_machine
from console.plan_validate_text import plan_validate_text
from console.signals import Signals

EXIT_MISSED: Final = 1
MAX_REAL_S: Final = 600.0
"""A trace that lasts longer is not sent to a real cluster: --requests and --speed make it shorter."""

MAX_ROUNDS: Final = 100
CALIBRATION_SPLITS: Final = {"disagg": (1, 1), "colocated": (0, 2)}

_DRAIN_S: Final = 120.0


def check(args: argparse.Namespace, trace: ScaledTrace) -> None:
    """Before anything is measured. Raises UserError."""
    _splits(args.validate)
    if not 1 <= args.rounds <= MAX_ROUNDS:
        raise UserError(f"--rounds is {args.rounds}; allowed is 1 to {MAX_ROUNDS}")
    lasts_s = trace.requests[-1].at_s
    if lasts_s > MAX_REAL_S:
        raise UserError(
            f"--validate: the trace lasts {lasts_s:,.0f} s; allowed are {MAX_REAL_S:,.0f}: see --requests, --speed"
        )


def run(
    args: argparse.Namespace,
    subject: Subject,
    spec: SimSpec,
    learned: Mapping[str, Learned],
    trace: ScaledTrace,
    link: PlanLink,
) -> int:
    """Exit code 0 when p50, p90 and goodput of every split are within the goal, 1 when not. Raises UserError."""
    splits = _splits(args.validate)
    trials: dict[tuple[int, int], list[Trial]] = {split: [] for split in splits}
    modes = [] if learned else sorted({mode_of(prefill) for prefill, _ in splits})
    progress, total = ProgressLine(sys.stderr), args.rounds * (len(modes) + len(splits))
    try:
        for index in range(args.rounds):
            stage, done = f"round {index + 1} of {args.rounds}", index * (len(modes) + len(splits))
            if index and args.engine is None:
                subject = settle(args, subject.profile, subject.model_id, subject.model, subject.dtype)
                spec = dataclasses.replace(spec, costs=subject.costs)
            known = dict(learned)
            for mode in modes:
                progress.show(f"{stage}: calibration, {mode}", "its requests", done, total)
                known[mode] = _calibrated(subject, spec, mode, trace, link)
                done += 1
            for split in splits:
                progress.show(f"{stage}: {split[0]}:{split[1]}", "the trace", done, total)
                trials[split].append(_trial(subject, spec, known, split, trace, link))
                done += 1
    finally:
        progress.clear()
    documents = [split_document(each, spec.slos) for each in trials.values()]
    document = {
        "question": "forecast against real runs",
        "model": {"id": subject.model_id, "dtype": subject.dtype},
        "trace": trace.detail,
        "slo": format_slos(spec.slos),
        "link": link.name,
        "rounds": args.rounds,
        "goal": GOAL,
        "goal_met": all(each["goal_met"] for each in documents),
        "splits": documents,
        "machine": machine_facts(),
    }
    print(json.dumps(document, indent=2) if args.json else plan_validate_text(document), flush=True)
    return 0 if document["goal_met"] else EXIT_MISSED


def _calibrated(subject: Subject, spec: SimSpec, mode: str, trace: ScaledTrace, link: PlanLink) -> Learned:
    """What a cluster of that mode teaches."""
    load = calibration_trace(trace.requests, subject.costs)
    served = _served(subject.profile, *CALIBRATION_SPLITS[mode], link)
    run_dir, _ = asyncio.run(_measure(served, load))
    try:
        return learn(run_dir, served, spec)
    except (RunLogError, NothingToLearn) as error:
        raise UserError(f"--validate: the calibration failed: {error}", 1) from error


def _trial(
    subject: Subject,
    spec: SimSpec,
    learned: Mapping[str, Learned],
    split: tuple[int, int],
    trace: ScaledTrace,
    link: PlanLink,
) -> Trial:
    """Forecast first, then run."""
    profile = _served(subject.profile, *split, link)
    corrected = dataclasses.replace(in_mode(spec, learned, *split), machine=this_machine(profile))
    alone = dataclasses.replace(corrected, costs=spec.costs, overheads=spec.overheads)
    try:
        forecast, uncorrected = simulate(corrected, trace.requests), simulate(alone, trace.requests)
    except ValueError as error:
        raise UserError(f"--validate: {error}") from error
    run_dir, lag_s = asyncio.run(_measure(profile, trace))
    measured, duration_s = fold_run(read_events(run_dir / EVENTS_FILE))
    known = known_of(learned, split[0])
    return Trial(
        run_dir.name,
        forecast,
        uncorrected,
        measured,
        duration_s,
        lag_s,
        subject.costs_from,
        "" if known is None else str(known.correction),
    )


def _splits(text: str) -> list[tuple[int, int]]:
    """Each once."""
    return list(dict.fromkeys(_ratio(each) for each in text.split(",")))


def _ratio(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if found is None or int(found[2]) < 1:
        raise UserError(
            f"--validate is {text}; allowed is P:D, e.g. 1:1; 0:2 is two co-located workers; several with commas"
        )
    return int(found[1]), int(found[2])


def _served(profile: Profile, prefill: int, decode: int, link: PlanLink) -> Profile:
    """The profile as the simulation understands it."""
    cluster = msgspec.structs.replace(
        profile.cluster,
        prefill=prefill,
        decode=decode,
        mode=mode_of(prefill),
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


def _to_nobody(_: Event) -> None:
    """The load's own events are not in the log: the trace is named by the document."""
