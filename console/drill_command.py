"""Run a drill: bring a cluster up, send requests, break something, and judge what became of what was promised.

NAME is one of --list, a TOML file of the same form, or soak: random faults from a seed, one after the other. The
options of pdconsole up change the cluster; what a drill needs (float32, no prefix cache, its number of workers) is set
unless they say otherwise. Exit code: 0 the verdict is pass, 1 it is fail.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.atomic_file import write_atomically
from cluster.control import SupervisorSpec
from cluster.drill import DRILL_PROFILE, Drill
from cluster.drill_file import DrillError, builtin_drills, check_targets, load_drill
from cluster.drill_judge import Verdict, judge
from cluster.drill_run import DrillRun
from cluster.drill_story import DrillStory
from cluster.events import Event
from cluster.profile import Profile
from cluster.run_dir import make_run_dir
from cluster.run_log import EVENTS_FILE, read_events
from cluster.soak import DEFAULT_FAULTS, soak_drill
from cluster.soak import NAME as SOAK
from console.drill_text import list_text, verdict_text
from console.errors import EXIT_USAGE, UserError
from console.feed_text import feed_line
from console.launch import LaunchError, SupervisorClient, stop_supervisor
from console.signals import Outcome, Signals
from console.summary_text import read_summary
from console.text_format import clean
from console.up import add_profile_arguments, profile_from_args
from engine.model_ids import ModelError, resolve_model

VERDICT_FILE: Final = "verdict.json"
EXIT_FAIL: Final = 1
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """The run directory exists and is this drill's own."""

    drill: Drill
    spec: SupervisorSpec
    json: bool
    quiet: bool

    @property
    def run_dir(self) -> Path:
        return Path(self.spec.run_dir)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"a drill of --list, {SOAK}, or a .toml file")
    parser.add_argument("--list", action="store_true", help="the drills there are, and what each is to show")
    parser.add_argument(
        "--faults", type=int, metavar="N", help=f"{SOAK}: this many (default: {DEFAULT_FAULTS})"
    )
    parser.add_argument("--seed", type=int, metavar="N", help=f"{SOAK}: another seed gives other faults")
    add_profile_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="this run's directory (default: a new one)")
    run.add_argument("--json", action="store_true", help="print the verdict as one JSON document")
    run.add_argument("--quiet", action="store_true", help="only errors on stderr")


def run(args: argparse.Namespace) -> int:
    if args.list:
        drills = [load_drill(name) for name in builtin_drills()]
        print(json.dumps([_listed(drill) for drill in drills], indent=2) if args.json else list_text(drills))
        return 0
    if args.name is None:
        raise UserError(
            f"which drill? allowed: {', '.join(builtin_drills())}, {SOAK}, or a .toml file", EXIT_USAGE
        )
    if args.name != SOAK and (args.faults is not None or args.seed is not None):
        raise UserError(f"--faults and --seed go with drill {SOAK}, not with {args.name}", EXIT_USAGE)
    try:
        drill = _soak(args) if args.name == SOAK else load_drill(args.name)
        return run_drill(drill, args)
    except DrillError as error:
        raise UserError(str(error), EXIT_USAGE) from error


def _soak(args: argparse.Namespace) -> Drill:
    try:
        return soak_drill(DEFAULT_FAULTS if args.faults is None else args.faults, args.seed or 0)
    except ValueError as error:
        raise UserError(f"--faults: {error}", EXIT_USAGE) from error


def run_drill(drill: Drill, args: argparse.Namespace) -> int:
    """Bring a cluster up by the options, run the drill on it, print the verdict; the exit code.

    Raises DrillError, ProfileError, RunDirError and LaunchError.
    """
    profile = profile_from_args(args, DRILL_PROFILE | drill.settings)
    check_targets(drill, worker_ids(profile))
    try:
        resolve_model(profile.model.id)
    except ModelError as error:
        raise UserError(f"--model: {error}") from error
    name, run_dir = make_run_dir(args.run_dir)
    spec = SupervisorSpec(run=name, run_dir=str(run_dir), profile=profile)
    return asyncio.run(_run(DrillPlan(drill, spec, args.json, args.quiet)))


def worker_ids(profile: Profile) -> list[str]:
    """Of the workers a cluster of this profile begins with."""
    cluster = profile.cluster
    return [
        *(f"prefill-{number}" for number in range(cluster.prefill)),
        *(f"decode-{number}" for number in range(cluster.decode)),
    ]


class Teller:
    """Progress on stderr, stamped with seconds since this command began."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._began_at = time.monotonic()

    def say(self, text: str, at: float | None = None) -> None:
        if not self._quiet:
            since_s = (time.monotonic() if at is None else at) - self._began_at
            print(f"{since_s:7.2f} s  {clean(text)}", file=sys.stderr, flush=True)

    def tell_event(self, event: Event) -> None:
        line = feed_line(event)
        if line is not None and not line.routine:
            self.say(line.text, event.at)


async def _run(plan: DrillPlan) -> int:
    signals, teller = Signals(), Teller(quiet=plan.quiet)
    teller.say(f"drill {plan.drill.name}: {plan.drill.title}")
    teller.say(f"run {plan.spec.run} in {plan.run_dir}")
    client = await SupervisorClient.launch(plan.spec)
    drilling = _drill_run(plan, client, teller)
    following = asyncio.create_task(drilling.follow(), name="log")
    outcome = Outcome.SIGNAL
    try:
        outcome = await signals.race(_run_beside(client, drilling, following))
    finally:
        await stop_supervisor(client, signals, "drill is over" if outcome is Outcome.DONE else "interrupted")
        following.cancel()
        await asyncio.wait({following})
        drilling.read()
    if outcome is Outcome.SIGNAL:
        return EXIT_INTERRUPTED
    facts = drilling.facts(drilling.processes.living())
    verdict = judge(DrillStory(plan.drill, facts, read_events(plan.run_dir / EVENTS_FILE)))
    document = verdict_document(plan, verdict, read_summary(plan.run_dir))
    write_atomically(plan.run_dir / VERDICT_FILE, json.dumps(document, indent=2).encode() + b"\n")
    print(
        json.dumps(document, indent=2)
        if plan.json
        else verdict_text(plan.drill, verdict, plan.spec.run, str(plan.run_dir))
    )
    return 0 if verdict.is_pass else EXIT_FAIL


def _drill_run(plan: DrillPlan, client: SupervisorClient, teller: Teller) -> DrillRun:
    return DrillRun(
        plan.drill,
        model_id=plan.spec.profile.model.id,
        run_dir=plan.run_dir,
        worker_ids=worker_ids(plan.spec.profile),
        supervisor_pid=client.pid,
        send_command=client.send_command,
        say=teller.say,
        on_event=teller.tell_event,
    )


async def _run_beside(client: SupervisorClient, drilling: DrillRun, following: "asyncio.Task[None]") -> None:
    """The drill, to its end. Raises LaunchError when the cluster does not start or the supervisor ends first."""
    up = await client.wait_up()
    work = asyncio.ensure_future(drilling.run(up.url))
    gone = asyncio.ensure_future(client.wait_gone())
    try:
        await asyncio.wait({work, gone, following}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            raise LaunchError(f"the run's log cannot be read: {following.exception()}", exit_code=EXIT_FAIL)
        if not work.done():
            raise LaunchError(await client.death_report(), exit_code=EXIT_FAIL)
        work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})


def verdict_document(plan: DrillPlan, verdict: Verdict, summary: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "drill": plan.drill.name,
        "verdict": "pass" if verdict.is_pass else "fail",
        "headline": verdict.headline,
        "promise": plan.drill.promise,
        "run": plan.spec.run,
        "run_dir": str(plan.run_dir),
        "faults": dict(Counter(f"{fault.fault} {fault.target}" for fault in plan.drill.faults)),
        "expectations": [judged.as_json() for judged in verdict.expectations],
        "summary": summary,
    }


def _listed(drill: Drill) -> dict[str, str]:
    return {"name": drill.name, "title": drill.title, "promise": drill.promise}
