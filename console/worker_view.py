"""The processes and links of a run as the log tells them. A fold over process, stats and link events; pure data."""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.events import (
    BlocksStranded,
    FaultHealed,
    FaultInjected,
    HeartbeatMissed,
    LinkConfigured,
    LinkProbed,
    RoleChanged,
    RouterStats,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
    WorkerAdded,
    WorkerDrained,
    WorkerDraining,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRemoved,
    WorkerRestarting,
    WorkerResumed,
    WorkerStarting,
    WorkerStats,
)

STALE_S: Final = 3.0
"""Stats older than this are greyed out with their age."""

ROUTER: Final = "router"
GONE: Final = ("exited", "restarting", "failed")

STORY_LINES: Final = 200
KEPT_PREFILL_RATES: Final = 64
KEPT_RATES: Final = 240
"""Two minutes of samples."""

_ROLE_ORDER: Final = {ROUTER: 0, "prefill": 1, "both": 2, "decode": 3}

WorkerEvent = (
    WorkerStarting | WorkerReady | WorkerExited | WorkerRestarting | WorkerFailed | HeartbeatMissed
    | WorkerDraining | WorkerDrained | WorkerResumed | WorkerAdded | WorkerRemoved | RoleChanged | BlocksStranded
    | WorkerStats | RouterStats | LinkConfigured | LinkProbed | FaultInjected | FaultHealed
    | TransferStarted | TransferCompleted | TransferFailed
)  # fmt: skip


class Throughput(NamedTuple):
    """Between two samples of one worker."""

    at: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    busy_share: float


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
    prefill_rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PREFILL_RATES))
    """Tokens per second as sampled: an idle worker reports 0, which says nothing about how fast it is."""
    draining: str = ""  # drain | restart | remove: takes no new requests
    drained: bool = False
    rates: deque[Throughput] = field(default_factory=lambda: deque(maxlen=KEPT_RATES))
    story: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=STORY_LINES))
    """(at, text, level) of what the log says of this process, oldest first."""

    @property
    def stats_at(self) -> float | None:
        newest = self.stats or self.router_stats
        return newest.at if newest is not None else None

    def is_stale(self, now: float) -> bool:
        """Ready, but nothing was heard of it for STALE_S."""
        if self.state != "ready":
            return False
        return now - max(self.stats_at or 0.0, self.state_at) > STALE_S

    def sample(self, event: WorkerStats) -> None:
        """Take statistics in; throughput is what changed since the sample before."""
        before = self.stats
        if before is not None and event.at > before.at and event.busy_s >= before.busy_s:
            span_s = event.at - before.at
            self.rates.append(
                Throughput(
                    event.at,
                    max(event.prefill_tokens - before.prefill_tokens, 0) / span_s,
                    max(event.decode_tokens - before.decode_tokens, 0) / span_s,
                    min((event.busy_s - before.busy_s) / span_s, 1.0),
                )
            )
        self.stats = event
        self.total_blocks = event.total_blocks or self.total_blocks
        if event.prefill_tokens_per_s > 0:
            self.prefill_rates.append(event.prefill_tokens_per_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Median of the newest samples, so that one prompt beside a burst does not move it; 0.0 before the first."""
        return statistics.median(self.prefill_rates) if self.prefill_rates else 0.0

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
            case "ready" if self.draining:
                return ("~", "drained" if self.drained else "draining")
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
        """Blocks that nobody will free: as the worker says, or held although no sequence is there to hold them."""
        if self.stats is None or self.state != "ready":
            return 0
        return self.stats.stranded_blocks or (0 if self.busy else self.stats.held_blocks)

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
    back_bits_per_s: float = 0.0
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
        self.faults: dict[tuple[str, str], FaultInjected] = {}
        """What was broken and is not healed yet, by (fault, target)."""

    def fold(self, event: WorkerEvent) -> None:
        """Take one event in."""
        match event:  # the frequent ones first
            case WorkerStats():
                worker = self._worker(event.worker_id, event.role)
                if worker.state in GONE:
                    return  # sampled before it died, written after
                worker.sample(event)
                if worker.state == "silent":
                    self._set_state(worker, "ready", event.at)
            case RouterStats():
                worker = self._worker(ROUTER, ROUTER)
                worker.router_stats = event
                if worker.state == "silent":
                    self._set_state(worker, "ready", event.at)
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
            case WorkerStarting():
                worker = self._worker(event.worker_id, event.role)
                self._set_state(worker, "starting", event.at)
                worker.pid, worker.cpus, worker.restarts = event.pid, event.cpus, event.restarts
                worker.log = event.log or worker.log
                worker.draining, worker.drained = "", False
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
                self.faults = {key: fault for key, fault in self.faults.items() if key[1] != event.worker_id}
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
                    not_started_words(event)
                    if event.part == "start"
                    else f"no answer for {event.silent_s:.1f} s",
                )
            case WorkerDraining():
                worker = self._worker(event.worker_id, "")
                worker.draining, worker.drained = event.reason, False
            case WorkerDrained():
                self._worker(event.worker_id, "").drained = True
            case WorkerResumed():
                worker = self._worker(event.worker_id, "")
                worker.draining, worker.drained = "", False
            case WorkerAdded():
                self._set_state(self._worker(event.worker_id, event.role), "starting", event.at)
            case WorkerRemoved():
                self.workers.pop(event.worker_id, None)
                self.links = {key: link for key, link in self.links.items() if event.worker_id not in key}
            case RoleChanged():
                self._worker(event.worker_id, event.role)
            case BlocksStranded():
                pass  # its line is enough; the count comes with the statistics
            case FaultInjected() if event.seconds or event.fault == "hang":
                self.faults[event.fault, event.target] = event
            case FaultInjected() if event.fault == "resume":
                self.faults.pop(("hang", event.target), None)
            case FaultInjected():
                pass
            case FaultHealed():
                self.faults.pop((event.fault, event.target), None)
            case LinkConfigured():
                self.asked = event
            case LinkProbed() if (event.to_worker, event.from_worker) in self.links:
                self._link(event.to_worker, event.from_worker).back_bits_per_s = event.achieved_bits_per_s
            case LinkProbed():
                link = self._link(event.from_worker, event.to_worker)
                link.achieved_bits_per_s, link.rtt_ms = event.achieved_bits_per_s, event.rtt_ms

    def by_role(self) -> list[WorkerView]:
        """Router, prefill workers, decode workers; each by id."""
        return sorted(
            self.workers.values(), key=lambda w: (_ROLE_ORDER.get(w.role, 4), _natural(w.worker_id))
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
        """The fastest prefill worker's measured rate; of any worker where none prefilled. 0.0 = none yet."""
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


def not_started_words(event: HeartbeatMissed) -> str:
    """Of a process that was not ready in time."""
    return f"did not start within {event.silent_s:g} s (supervisor.start_timeout_s)"


def _natural(worker_id: str) -> tuple[str, int]:
    head, _, tail = worker_id.rpartition("-")
    return (head, int(tail)) if tail.isdecimal() else (worker_id, 0)
