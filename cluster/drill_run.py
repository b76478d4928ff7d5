"""One drill on a running cluster: sends, breaks, waits, and hands over what it saw. The verdict is ``drill_judge``'s.

undisturbed round -> disturbed round: requests, faults by ``drill_triggers``; until all is answered and healed
    -> a request each afterwards -> every worker says that it is idle
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from cluster.control import Command, CommandDone
from cluster.drill import Drill
from cluster.drill_load import DrillLoad
from cluster.drill_open_faults import OpenFaults
from cluster.drill_processes import ClusterProcesses
from cluster.drill_story import DoneFault, DrillFacts
from cluster.drill_triggers import DueFault, Triggers
from cluster.events import Event, RouterStats, WorkerStarting, WorkerStats
from cluster.fault_kinds import Fault, command_of
from cluster.load import model_corpus
from cluster.run_log import EVENTS_FILE, LogTail
from cluster.units import parse_bits_per_s

POLL_S: Final = 0.02
READY_TIMEOUT_S: Final = 20.0
IDLE_TIMEOUT_S: Final = 10.0
MEMORY_EVERY_S: Final = 2.0


class DrillRun:
    """``send_command`` has the supervisor carry out a command; ``say`` tells the operator where the drill is;
    ``on_event`` gets every event of the run's log. ``facts`` is what is known so far, also after a drill that was cut
    short.
    """

    def __init__(
        self,
        drill: Drill,
        *,
        model_id: str,
        run_dir: Path,
        worker_ids: Sequence[str],
        supervisor_pid: int,
        send_command: Callable[[Command], Awaitable[CommandDone]],
        say: Callable[[str], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self._drill = drill
        self._model_id = model_id
        self._worker_ids = worker_ids
        self._send_command = send_command
        self._say = say
        self._on_event = on_event
        self._tail = LogTail(run_dir / EVENTS_FILE)
        self._load: DrillLoad | None = None
        self._triggers: Triggers | None = None
        self._open_faults = OpenFaults()
        self._done: list[DoneFault] = []
        self._names: dict[int, str] = {}
        self._stats: dict[str, WorkerStats] = {}
        self._router_at = 0.0
        self._idle_at: float | None = None
        self._log_grew = asyncio.Event()
        self._memory: dict[str, list[tuple[float, int]]] = {}
        self.processes: Final = ClusterProcesses(supervisor_pid)

    async def run(self, url: str) -> None:
        """The whole drill on the ready cluster whose router is at ``url``; ``follow`` runs beside it.

        Raises engine.model_ids.ModelError for a model that has no text to make prompts of.
        """
        corpus = await asyncio.to_thread(model_corpus, self._model_id)
        self._load = load = DrillLoad(self._drill, url, self._model_id, corpus)
        try:
            self._say("undisturbed round")
            await self._within(load.undisturbed(), self._drill.timeout_s, "the undisturbed round is not over")
            began_at = time.monotonic()
            self._triggers = Triggers(self._drill, self._worker_ids, began_at)
            self._say("disturbed round")
            load.begin()
            await self._within(
                self._break_things(began_at, load), self._drill.timeout_s, "the disturbed round is not over"
            )
            await self._within(load.end_streams(), READY_TIMEOUT_S, "requests are still open")
            await self._within(self._until_ready(load), READY_TIMEOUT_S, "the router is not ready again")
            self._say("one request each afterwards")
            await self._within(
                load.after(), self._drill.timeout_s, "the requests afterwards are not answered"
            )
            await self._within(self._until_idle(), IDLE_TIMEOUT_S, "not every worker says that it is idle")
        finally:
            self.processes.look(self._names)
            await load.close()

    def facts(self, orphans: tuple[str, ...]) -> DrillFacts:
        """``orphans`` as found after the cluster's stop."""
        missed = (
            self._triggers.missed() if self._triggers is not None else ["the disturbed round did not begin"]
        )
        return DrillFacts(
            sent=self._load.sent if self._load is not None else (),
            faults=tuple(self._done),
            missed=tuple(missed),
            orphans=orphans,
            idle_at=self._idle_at,
            memory=self._memory,
        )

    # --- rounds -----------------------------------------------------------------------------------------------

    async def _break_things(self, began_at: float, load: DrillLoad) -> None:
        triggers = self._triggers
        assert triggers is not None
        measured_at = 0.0
        answered_at: float | None = None
        while True:
            now = time.monotonic()
            for due in triggers.due(now, is_healed=self._open_faults.are_over(now)):
                await self._inject(due, load)
            if not load.is_sent_and_answered:
                answered_at = None
            elif answered_at is None:
                answered_at = now
            elif self._open_faults.are_over(now) and (
                triggers.is_done or (triggers.is_stuck and self._is_read_until(answered_at))
            ):
                return
            if now - measured_at >= MEMORY_EVERY_S:
                measured_at = now
                for name, size in self.processes.look(self._names).items():
                    self._memory.setdefault(name, []).append((now - began_at, size))
            await asyncio.sleep(POLL_S)

    async def _inject(self, due: DueFault, load: DrillLoad) -> None:
        rule = due.fault
        at = time.monotonic()
        if not due.targets:
            if await load.leave(due.client_id):
                self._done.append(DoneFault(due.rule, rule.fault, due.client_id, at))
                self._say(f"{due.client_id} leaves")
            elif self._triggers is not None:
                self._triggers.again(due)  # it had been answered: the next one
            return
        for target in due.targets:
            at = time.monotonic()
            fault = Fault(
                kind=rule.fault,
                target=target,
                seconds=rule.seconds,
                bits_per_s=parse_bits_per_s(rule.bandwidth) if rule.bandwidth else 0.0,
                delay_ms=rule.delay_ms,
                cause=f"drill {self._drill.name}",
            )
            answer = await self._send_command(command_of(fault))
            refusal = "" if answer.ok else answer.message
            done = DoneFault(due.rule, rule.fault, target, at, refusal, rule.seconds)
            self._done.append(done)
            self._open_faults.add(done)

    async def _until_ready(self, load: DrillLoad) -> None:
        while True:
            if await load.is_ready():
                return
            await asyncio.sleep(POLL_S * 5)

    async def _until_idle(self) -> None:
        since = time.monotonic()
        while not all(self._is_idle(worker_id, since) for worker_id in self._worker_ids):
            self._log_grew.clear()
            await self._log_grew.wait()
        self._idle_at = time.monotonic()

    def _is_read_until(self, at: float) -> bool:
        """Whatever the router or a worker said before ``at`` has been read from the log."""
        heard = (self._stats.get(worker_id) for worker_id in self._worker_ids)
        return self._router_at > at and all(stats is not None and stats.at > at for stats in heard)

    def _is_idle(self, worker_id: str, since: float) -> bool:
        stats = self._stats.get(worker_id)
        return (
            stats is not None
            and stats.at > since
            and not (stats.held_blocks or stats.running or stats.waiting)
        )

    async def _within(self, work: Awaitable[None], limit_s: float, otherwise: str) -> None:
        """A round that takes too long is cut off and judged as it is."""
        try:
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError:
            self._say(f"{otherwise} after {limit_s:g} s: it is cut off")

    # --- the log ----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read the run's log until cancelled. From the cluster's start to its end."""
        while True:
            self.read()
            await asyncio.sleep(POLL_S)

    def read(self) -> None:
        """Take in what the log has grown by. Raises RunLogError."""
        while events := self._tail.read_new():
            self._log_grew.set()
            for event in events:
                match event:
                    case WorkerStarting():
                        self._names[event.pid] = event.worker_id
                    case WorkerStats():
                        self._stats[event.worker_id] = event
                    case RouterStats():
                        self._router_at = event.at
                self._open_faults.take(event)
                if self._triggers is not None:
                    self._triggers.take(event)
                self._on_event(event)
