"""The processes and links of a run as the log tells them. A fold over process, stats and link events; pure data."""

from dataclasses import dataclass, field
from typing import Final

from cluster.events import (
    HeartbeatMissed,
    LinkConfigured,
    LinkProbed,
    RouterStats,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRestarting,
    WorkerStarting,
    WorkerStats,
)

STALE_S: Final = 3.0
"""Stats older than this are greyed out with their age."""

ROUTER: Final = "router"
GONE: Final = ("exited", "restarting", "failed")

_ROLE_ORDER: Final = {ROUTER: 0, "prefill": 1, "decode": 2}

WorkerEvent = (
    WorkerStarting | WorkerReady | WorkerExited | WorkerRestarting | WorkerFailed | HeartbeatMissed
    | WorkerStats | RouterStats | LinkConfigured | LinkProbed
    | TransferStarted | TransferCompleted | TransferFailed
)  # fmt: skip


@dataclass(slots=True)
class WorkerView:
    """One process. ``state``: starting | ready | silent | exited | restarting | failed."""

    worker_id: str
    role: str = ""
    state: str = "starting"
    pid: int = 0
    cpus: tuple[int, ...] = ()
    restarts: int = 0
    log: str = ""
    state_at: float = 0.0
    ready_after_s: float = 0.0
    total_blocks: int = 0
    detail: str = ""
    stats: WorkerStats | None = None
    router_stats: RouterStats | None = None
    prefill_tokens_per_s: float = 0.0
    """Last measured rate: an idle worker reports 0, which says nothing about how fast it is."""

    @property
    def stats_at(self) -> float | None:
        newest = self.stats or self.router_stats
        return newest.at if newest is not None else None

    def is_stale(self, now: float) -> bool:
        """Ready, but nothing was heard of it for STALE_S."""
        if self.state != "ready":
            return False
        return now - max(self.stats_at or 0.0, self.state_at) > STALE_S

    @property
    def busy(self) -> bool:
        if self.router_stats is not None:
            return self.router_stats.in_flight > 0
        stats = self.stats
        return stats is not None and stats.waiting + stats.running + stats.reserved + stats.handing_off > 0

    @property
    def word(self) -> tuple[str, str]:
        """Glyph and word of the state; colour only repeats them."""
        match self.state:
            case "ready":
                return ("*", "busy" if self.busy else "ready")
            case "starting":
                return ("~", "starting")
            case "restarting":
                return ("~", "waiting")
            case "exited":
                return ("-", "down")
            case "silent":
                return ("!", "silent")
            case _:
                return ("!", "failed")

    @property
    def stranded_blocks(self) -> int:
        """Blocks held although no sequence is there to hold them."""
        return (
            self.stats.held_blocks
            if self.stats is not None and self.state == "ready" and not self.busy
            else 0
        )

    @property
    def cpu_percent(self) -> float | None:
        newest = self.stats or self.router_stats
        return newest.cpu_percent if newest is not None and self.state == "ready" else None


@dataclass(slots=True)
class LinkView:
    """One direction prefill -> decode."""

    from_worker: str
    to_worker: str
    achieved_bits_per_s: float = 0.0
    rtt_ms: float | None = None
    active: dict[tuple[str, int], TransferStarted] = field(default_factory=dict)
    last: TransferCompleted | None = None
    transfers: int = 0
    failures: int = 0


class Topology:
    """Workers (router first, then by role and id) and the links between them."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.links: dict[tuple[str, str], LinkView] = {}
        self.asked: LinkConfigured | None = None

    def fold(self, event: WorkerEvent) -> None:
        """Take one event in."""
        match event:
            case WorkerStarting():
                worker = self._worker(event.worker_id, event.role)
                self._set_state(worker, "starting", event.at)
                worker.pid, worker.cpus, worker.restarts = event.pid, event.cpus, event.restarts
                worker.log = event.log or worker.log
                worker.stats = worker.router_stats = None
            case WorkerReady():
                worker = self._worker(event.worker_id, event.role)
                self._set_state(worker, "ready", event.at)
                worker.pid, worker.ready_after_s = event.pid, event.after_s
                worker.total_blocks = event.total_blocks or worker.total_blocks
            case WorkerExited():
                worker = self._worker(event.worker_id, event.role)
                self._set_state(worker, "exited", event.at, exit_words(event))
                worker.stats = worker.router_stats = None
                self._drop_transfers(event.worker_id)
            case WorkerRestarting():
                worker = self._worker(event.worker_id, "")
                self._set_state(
                    worker, "restarting", event.at, f"restart {event.restarts} in {event.backoff_s:.1f} s"
                )
                worker.restarts = event.restarts
            case WorkerFailed():
                self._set_state(self._worker(event.worker_id, ""), "failed", event.at, event.reason)
            case HeartbeatMissed():
                self._set_state(
                    self._worker(event.worker_id, ""),
                    "silent",
                    event.at,
                    f"no answer for {event.silent_s:.1f} s",
                )
            case WorkerStats():
                worker = self._worker(event.worker_id, event.role)
                if worker.state in GONE:
                    return  # sampled before it died, written after
                worker.stats = event
                worker.total_blocks = event.total_blocks or worker.total_blocks
                if event.prefill_tokens_per_s > 0:
                    worker.prefill_tokens_per_s = event.prefill_tokens_per_s
                if worker.state == "silent":
                    self._set_state(worker, "ready", event.at)
            case RouterStats():
                worker = self._worker(ROUTER, ROUTER)
                worker.router_stats = event
                if worker.state == "silent":
                    self._set_state(worker, "ready", event.at)
            case LinkConfigured():
                self.asked = event
            case LinkProbed():
                link = self._link(event.from_worker, event.to_worker)
                link.achieved_bits_per_s, link.rtt_ms = event.achieved_bits_per_s, event.rtt_ms
            case TransferStarted():
                link = self._link(event.from_worker, event.to_worker)
                link.active[event.request_id, event.attempt] = event
            case TransferCompleted():
                link = self._link(event.from_worker, event.to_worker)
                link.active.pop((event.request_id, event.attempt), None)
                link.last = event
                link.transfers += 1
            case TransferFailed():
                for link in self.links.values():
                    if link.active.pop((event.request_id, event.attempt), None) is not None:
                        link.failures += 1

    def by_role(self) -> list[WorkerView]:
        """Router, prefill workers, decode workers; each by id."""
        return sorted(
            self.workers.values(), key=lambda w: (_ROLE_ORDER.get(w.role, 3), _natural(w.worker_id))
        )

    def links_from(self, worker_id: str) -> list[LinkView]:
        return [self.links[key] for key in sorted(self.links) if key[0] == worker_id]

    def achieved_bits_per_s(self) -> float:
        """The slowest probed link: what a transfer can count on. 0.0 before the first probe."""
        return min(
            (link.achieved_bits_per_s for link in self.links.values() if link.achieved_bits_per_s > 0),
            default=0.0,
        )

    def prefill_tokens_per_s(self) -> float:
        """The fastest prefill worker's last measured rate; of any worker where none prefilled. 0.0 = none yet."""
        rates = [w.prefill_tokens_per_s for w in self.workers.values() if w.role == "prefill"]
        return max(rates, default=0.0) or max(
            (w.prefill_tokens_per_s for w in self.workers.values()), default=0.0
        )

    def held_blocks(self) -> int:
        return sum(w.stats.held_blocks for w in self.workers.values() if w.stats is not None)

    def stranded_blocks(self) -> int:
        return sum(w.stranded_blocks for w in self.workers.values())

    def _worker(self, worker_id: str, role: str) -> WorkerView:
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = WorkerView(worker_id)
        worker.role = role or worker.role
        return worker

    def _link(self, from_worker: str, to_worker: str) -> LinkView:
        key = (from_worker, to_worker)
        if key not in self.links:
            self.links[key] = LinkView(*key)
        return self.links[key]

    def _set_state(self, worker: WorkerView, state: str, at: float, detail: str = "") -> None:
        worker.state, worker.state_at, worker.detail = state, at, detail

    def _drop_transfers(self, worker_id: str) -> None:
        """A dead end carries nothing; its peer's report may never come."""
        for (source, target), link in self.links.items():
            if worker_id in (source, target):
                link.active.clear()


def exit_words(event: WorkerExited) -> str:
    """ "signal 9", "exit code 3"."""
    return f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"


def _natural(worker_id: str) -> tuple[str, int]:
    head, _, tail = worker_id.rpartition("-")
    return (head, int(tail)) if tail.isdecimal() else (worker_id, 0)
