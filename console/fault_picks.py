"""What the pickers offer: targets and deeds for breaking a process or a link, restarting, draining, changing a role.

Faults come from the table of fault kinds, so that what a drill injects, what a key does and the line shown are one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.control import (
    ChangeLink,
    Command,
    DrainWorker,
    RemoveWorker,
    RestartWorker,
    ResumeWorker,
    SetRole,
)
from cluster.fault_kinds import (
    LINK,
    PROCESS,
    WORKER,
    Fault,
    command_of,
    find_fault,
    operator_line,
    shell_line,
)
from cluster.units import format_bits_per_s
from console.screens.pick_target import Deed, Target
from console.text_format import fit
from console.view_state import ViewState
from console.worker_view import GONE, ROUTER, WorkerView

LINK_TARGET: Final = "all links"
ROLES: Final = ("prefill", "decode", "both")
SLOW_FACTOR: Final = 10.0
"""A slowed link has a tenth of its rate and SLOW_DELAY_MS more delay."""
SLOW_DELAY_MS: Final = 20.0
UNLIMITED_SLOWED_BITS_PER_S: Final = 1e8


@dataclass(frozen=True, slots=True)
class FaultPicks:
    """``token_path`` is where a shell finds the operator's token."""

    state: ViewState
    token_path: str

    def processes(self) -> list[Target]:
        return [_target(worker, PROCESS) for worker in self.state.topology.by_role()]

    def workers(self) -> list[Target]:
        return [_target(worker, WORKER) for worker in self.state.topology.by_role() if worker.role != ROUTER]

    def links(self) -> list[Target]:
        """The links as one, then each worker as a sender of KV."""
        asked = self.state.topology.asked
        rate = format_bits_per_s(asked.asked_bits_per_s) if asked is not None else "-"
        delay = f", {asked.asked_delay_ms:g} ms one way" if asked is not None else ""
        senders = [
            Target(target.target_id, target.kind, f"KV sent by {target.text}") for target in self.workers()
        ]
        return [*senders, Target(LINK_TARGET, LINK, f"{LINK_TARGET:<12} asked {rate}{delay}")]

    def process_deeds(self) -> list[Deed]:
        return [
            self._fault("k", "KILL", "kill"),
            self._fault("t", "TERM", "terminate"),
            self._fault("s", "STOP, CONT after", "hang"),
            self._fault("c", "CONT", "resume"),
        ]

    def link_deeds(self) -> list[Deed]:
        return [
            self._fault("c", "cut for", "cut"),
            self._fault("o", "corrupt for", "corrupt"),
            self._fault("a", "stall for", "stall"),
            self._fault("w", "slow for", "slow"),
            Deed("r", "set rate and delay...", (LINK,), self._keep_link, self._keep_link_line, asks=True),
        ]

    def restart_deeds(self) -> list[Deed]:
        return [
            self._send(
                "R", "drain, then restart", lambda w: RestartWorker(worker_id=w, cause="operator, key R")
            ),
            self._send(
                "n", "restart now", lambda w: RestartWorker(worker_id=w, drain_s=0.0, cause="operator, key R")
            ),
        ]

    def drain_deeds(self) -> list[Deed]:
        return [
            self._send("D", "drain, or end a drain", self._drain),
        ]

    def remove_deeds(self) -> list[Deed]:
        return [
            self._send(
                "r", "drain and remove", lambda w: RemoveWorker(worker_id=w, cause="operator, palette")
            )
        ]

    def role_deeds(self) -> list[Deed]:
        def deed(role: str) -> Deed:
            return self._send(
                role[0], f"role {role}", lambda w: SetRole(worker_id=w, role=role, cause="operator, palette")
            )

        return [deed(role) for role in ROLES]

    def _fault(self, key: str, word: str, kind: str) -> Deed:
        found = find_fault(kind)
        kinds = (PROCESS, WORKER) if found.hits == PROCESS else (found.hits,)

        def fault(target: str, seconds: float) -> Fault:
            asked = self.state.topology.asked
            rate = asked.asked_bits_per_s if asked is not None else 0.0
            delay_ms = asked.asked_delay_ms if asked is not None else 0.0
            slowed = rate / SLOW_FACTOR if rate > 0 else UNLIMITED_SLOWED_BITS_PER_S
            is_slow = kind == "slow"
            return Fault(
                kind=kind,
                target="" if target == LINK_TARGET else target,
                seconds=seconds,
                bits_per_s=slowed if is_slow else 0.0,
                delay_ms=delay_ms + SLOW_DELAY_MS if is_slow else 0.0,
                cause=f"operator, key {'k' if found.hits == PROCESS else 'l'}",
            )

        def line(target: str, seconds: float) -> str:
            worker = self.state.topology.workers.get(target)
            pid = worker.pid if worker is not None and worker.state not in GONE else 0
            if found.shell is not None and pid <= 0:
                return f"{target} is not running: it has no pid now"
            return shell_line(fault(target, seconds), pid=pid, url=self.state.url, token_path=self.token_path)

        return Deed(
            key, word, kinds, lambda target, seconds: command_of(fault(target, seconds)), line,
            takes_seconds=found.takes_seconds,
        )  # fmt: skip

    def _send(self, key: str, word: str, command: Callable[[str], Command]) -> Deed:
        """A deed that only the supervisor can do: by hand it goes through the operator's port."""
        return Deed(
            key, word, (WORKER,), lambda target, seconds: command(target),
            lambda target, seconds: operator_line(
                command(target), url=self.state.url, token_path=self.token_path
            ),
        )  # fmt: skip

    def _drain(self, worker_id: str) -> Command:
        worker = self.state.topology.workers.get(worker_id)
        if worker is not None and worker.draining:
            return ResumeWorker(worker_id=worker_id, cause="operator, key D")
        return DrainWorker(worker_id=worker_id, cause="operator, key D")

    def _keep_link(self, target: str, seconds: float) -> Command:
        asked = self.state.topology.asked
        if asked is None:
            return ChangeLink(bits_per_s=0.0, cause="operator, key l")
        return ChangeLink(
            bits_per_s=asked.asked_bits_per_s, delay_ms=asked.asked_delay_ms, jitter_ms=asked.asked_jitter_ms,
            cause="operator, key l",
        )  # fmt: skip

    def _keep_link_line(self, target: str, seconds: float) -> str:
        return "asks the rate, delay and jitter, and shows the line"


def _target(worker: WorkerView, kind: str) -> Target:
    glyph, word = worker.word
    return Target(
        worker.worker_id,
        kind,
        f"{fit(worker.worker_id, 12)} {glyph} {word:<8} {fit(worker.role, 8)} pid {worker.pid:>7}",
    )
