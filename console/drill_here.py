"""Runs a drill on the cluster that the console watches, which goes on afterwards.

The pieces are those of ``pdconsole drill``; only what it expects of the cluster's end is left out, since there is none.
"""

import asyncio
import json
import time
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.atomic_file import write_atomically
from cluster.control import AddNote, SetLoad, SupervisorSpec
from cluster.drill import DRILL_PROFILE, Drill
from cluster.drill_file import DrillError, builtin_drills, check_targets, load_drill
from cluster.drill_judge import Verdict, judge
from cluster.drill_run import DrillRun
from cluster.drill_story import DrillStory
from cluster.profile import Profile
from cluster.run_dir import RunDirError, RunInfo, read_run_info
from cluster.run_log import EVENTS_FILE, RunLogError, read_events
from console.drill_command import DrillPlan, verdict_document
from console.drill_verdict import VERDICT_FILE, DrillVerdict, end_of_drill, read_verdict
from console.operator_commands import DRILL_GROUP, OperatorApp
from console.screens.pick_drill import PickDrill
from console.view_state import ViewState
from console.worker_view import ROUTER
from engine.model_ids import ModelError

NOT_JUDGED: Final = ("orphans",)
"""Only a cluster that was stopped can be judged by these."""
QUIET_WITHIN_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
_NOT_NEEDED: Final = ("router.port",)
_CHANGED_BY_KEY: Final = ("cluster.mode", "kv.codec")


DRILL_ERRORS: Final = (RunDirError, DrillError, ModelError, RunLogError, OSError)
"""What ``run`` raises; each message is one line."""


class DrillHere:
    """One drill at a time, on the run in ``run_dir``."""

    def __init__(self, app: OperatorApp, run_dir: Path) -> None:
        self.running = ""
        """Name of the drill that runs, "" = none."""
        self._app = app
        self._run_dir = run_dir
        self._workers: list[str] = []

    def choose(self, state: ViewState) -> None:
        """Ask which drill, and run it."""
        if self.running:
            self._app.tell(f"Drills: {self.running} is running; x stops it", ok=False)
            return
        self._workers = [w.worker_id for w in state.topology.by_role() if w.role != ROUTER]
        try:
            profile = read_run_info(self._run_dir).profile
            drills = [load_drill(name) for name in builtin_drills()]
        except DRILL_ERRORS as error:
            self._app.tell(f"Drills: {error}", ok=False)
        else:
            before = f"first: the load {state.load_names} is stopped and drained" if state.loads else ""
            self._app.push_screen(
                PickDrill(drills, partial(all_differences, profile=profile, state=state), before),
                self._chosen,
            )

    def _chosen(self, drill: Drill | None) -> None:
        if drill is not None:
            self._app.focus_verdict()
            self._app.run_worker(self._tell_run(drill), group=DRILL_GROUP, exit_on_error=True)

    async def _tell_run(self, drill: Drill) -> None:
        self.running = drill.name
        try:
            await self._quieten(drill)
            verdict = await self.run(drill, self._workers)
        except DRILL_ERRORS as error:
            self._app.tell(f"Drill {drill.name}: {error}", ok=False)
        else:
            self._app.tell(_said(drill, verdict))
        finally:
            self.running = ""
            self._app.show_drill(read_verdict(self._run_dir))

    async def _quieten(self, drill: Drill) -> None:
        """Stop the load and wait for what still runs: a drill judges its own requests. Raises DrillError."""
        state = self._app.state
        if state.loads:
            await self._app.send_command(SetLoad(name="", cause=f"drill {drill.name}"))
        self._say(drill, "waits until no request runs")
        give_up_at = time.monotonic() + QUIET_WITHIN_S
        while state.loads or state.requests.live:
            if time.monotonic() > give_up_at:
                running = f"{len(state.requests.live)} requests still run after {QUIET_WITHIN_S:.0f} s"
                raise DrillError(f"{running}; stop what sends them (and go on, if the view is frozen)")
            await asyncio.sleep(LOOK_EVERY_S)

    async def run(self, drill: Drill, worker_ids: list[str]) -> Verdict:
        """The whole drill on a cluster with these workers; notes in the log say when it began and how it ended.

        Writes the verdict into the run's directory. Raises DRILL_ERRORS.
        """
        self._say(drill, "begins")
        await self._app.send_command(AddNote(text=f"drill {drill.name} begins"))
        verdict = await self._run(drill, worker_ids)
        await self._app.send_command(AddNote(text=_said(drill, verdict)))
        return verdict

    def _say(self, drill: Drill, text: str) -> None:
        self._app.show_drill(DrillVerdict(drill=drill.name, headline=text))

    async def _run(self, drill: Drill, worker_ids: list[str]) -> Verdict:
        info = read_run_info(self._run_dir)
        check_targets(drill, worker_ids)
        began_at = time.monotonic()
        drilling = DrillRun(
            drill,
            model_id=info.profile.model.id,
            run_dir=self._run_dir,
            worker_ids=worker_ids,
            supervisor_pid=info.supervisor_pid,
            send_command=self._app.send_command,
            say=partial(self._say, drill),
            on_event=lambda event: None,
        )
        following = asyncio.create_task(drilling.follow(), name="drill's log")
        try:
            await drilling.run(info.url)
        finally:
            following.cancel()
            await asyncio.wait({following})
        drilling.read()
        return await asyncio.to_thread(self._judge, drill, drilling, info, began_at)

    def _judge(self, drill: Drill, drilling: DrillRun, info: RunInfo, began_at: float) -> Verdict:
        events = [event for event in read_events(self._run_dir / EVENTS_FILE) if event.at >= began_at]
        judged = judge(DrillStory(drill, drilling.facts(()), events))
        kept = tuple(line for line in judged.expectations if line.name not in NOT_JUDGED)
        said = [part for part in judged.headline.split(", ") if not part.startswith(NOT_JUDGED)]
        verdict = Verdict(kept, ", ".join(said))
        spec = SupervisorSpec(run=info.run, run_dir=str(self._run_dir), profile=info.profile)
        document = verdict_document(DrillPlan(drill, spec, json=False, quiet=True), verdict, None)
        write_atomically(self._run_dir / VERDICT_FILE, json.dumps(document, indent=2).encode() + b"\n")
        return verdict


def _said(drill: Drill, verdict: Verdict) -> str:
    return end_of_drill(drill.name, is_pass=verdict.is_pass) + verdict.headline


def all_differences(drill: Drill, profile: Profile, state: ViewState) -> list[str]:
    """``differences``, and what an operator has changed since: "prefill-0 is drained"."""
    changed = [
        f"{name} {here} here, {asked} in the drill"
        for name, here, asked in (
            ("mode", state.mode, drill.settings.get("cluster.mode", profile.cluster.mode)),
            ("codec", state.codec, drill.settings.get("kv.codec", profile.kv.codec)),
        )
        if here != asked
    ]
    drained = [w.worker_id for w in state.topology.by_role() if w.draining]
    fixed = differences(drill, profile, left_out=(*_NOT_NEEDED, *_CHANGED_BY_KEY))
    return [*changed, *(f"{worker_id} is drained" for worker_id in drained), *fixed]


def differences(drill: Drill, profile: Profile, left_out: Container[str] = _NOT_NEEDED) -> list[str]:
    """What the drill would set and this cluster has otherwise: "cluster.prefill 1 here, 2 in the drill"."""
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(profile)
    found = []
    for key, value in (DRILL_PROFILE | drill.settings).items():
        section, _, name = key.partition(".")
        here = tree.get(section, {}).get(name)
        if key not in left_out and here != value:
            found.append(f"{key} {here} here, {value} in the drill")
    return found
