"""What a run was and what became of its processes and links, as a pure fold over events. Knows no request."""

import statistics
from dataclasses import dataclass

from cluster.events import (
    MIN_PREFILL_TOKENS,
    BlocksStranded,
    CodecChanged,
    Event,
    HandoffChanged,
    LinkConfigured,
    LinkProbed,
    LinkTuned,
    ModeChanged,
    ModelDescribed,
    PrefillFinished,
    RoleChanged,
    RouterStats,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    WorkerExited,
    WorkerFailed,
    WorkerStarting,
    WorkerStats,
)

ROUTER_ROLE = "router"


@dataclass(slots=True)
class ProcessFacts:
    """One worker (or the router) under its id, over all its restarts."""

    process_id: str
    role: str
    pid: int = 0
    restarts: int = 0
    exits: int = 0  # not asked for
    failed: str = ""  # why it was given up
    held_blocks: int | None = None  # in its last sample; None: none yet, or the process died with its blocks
    peak_rss_bytes: int = 0
    stranded_blocks: int = 0  # most that it ever held with nobody to free them; must be 0
    late_frames: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0  # in the last sample
    _sampled_preemptions: int = 0  # in the last sample
    _rated_tokens: float = 0.0
    _rated_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Mean over the run, each sample weighted by the prompt tokens computed since the one before."""
        return self._rated_tokens / self._rated_s if self._rated_s > 0 else None

    @property
    def rated_prefill(self) -> tuple[float, float]:
        """Prompt tokens with a known rate, and the seconds they took at it."""
        return self._rated_tokens, self._rated_s

    def start(self, event: WorkerStarting) -> None:
        self.role, self.pid, self.restarts, self.failed = event.role, event.pid, event.restarts, ""
        self.held_blocks, self.prefill_tokens, self._sampled_preemptions = None, 0, 0

    def exit(self, event: WorkerExited) -> None:
        if event.cause not in ("stop", "restart"):
            self.exits += 1
            self.held_blocks = None

    def sample(self, event: WorkerStats) -> None:
        self.held_blocks = event.held_blocks
        self.peak_rss_bytes = max(self.peak_rss_bytes, event.rss_bytes)
        self.late_frames = max(self.late_frames, event.late_frames)
        self.preemptions += max(event.preemptions - self._sampled_preemptions, 0)
        self._sampled_preemptions = event.preemptions
        computed = event.prefill_tokens - self.prefill_tokens
        if computed > 0 and event.prefill_tokens_per_s > 0:
            self._rated_tokens += computed
            self._rated_s += computed / event.prefill_tokens_per_s
        self.prefill_tokens = event.prefill_tokens


class RunFacts:
    """Fold of a run's events: what summary and reports say about anything but requests. None: not seen."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.model: ModelDescribed | None = None
        self.link: LinkConfigured | None = None
        self.tuned: LinkTuned | None = None  # None: no rho was asked, or the link was changed since
        self.ready_at: float | None = None
        self.stopping_at: float | None = None
        self.stop_reason = ""
        self.orphans: int | None = None  # None: the log has no end
        self.modes: list[str] = []  # in order of use, the last is the mode now
        self.codecs: list[str] = []
        self.handoffs: list[str] = []
        self.processes: dict[str, ProcessFacts] = {}
        self._first_at: float | None = None
        self._last_at = 0.0
        self._probed: dict[tuple[str, str], LinkProbed] = {}  # the last of each way
        self._computed_tokens = 0
        self._compute_s = 0.0

    @property
    def duration_s(self) -> float:
        """Serving time: ready (or the first event) to stopping (or the last event)."""
        begin = self.ready_at if self.ready_at is not None else self._first_at
        if begin is None:
            return 0.0
        return max((self.stopping_at if self.stopping_at is not None else self._last_at) - begin, 0.0)

    @property
    def workers(self) -> list[ProcessFacts]:
        return [process for process in self.processes.values() if process.role != ROUTER_ROLE]

    @property
    def router(self) -> ProcessFacts | None:
        return next((process for process in self.processes.values() if process.role == ROUTER_ROLE), None)

    @property
    def asked_bits_per_s(self) -> float:
        """0: unlimited, or no link was configured."""
        return self.link.asked_bits_per_s if self.link else 0.0

    @property
    def achieved_bits_per_s(self) -> float | None:
        """Median over worker pairs of their last probe since the link was last shaped, the way KV goes."""
        return _median([probe.achieved_bits_per_s for probe in self._probes(back=False)])

    @property
    def back_bits_per_s(self) -> float | None:
        """The same of the way back, from decode to prefill workers."""
        return _median([probe.achieved_bits_per_s for probe in self._probes(back=True)])

    @property
    def rtt_ms(self) -> float | None:
        """The same of the round trips."""
        return _median([probe.rtt_ms for probe in self._probes(back=False)])

    def _probes(self, *, back: bool) -> list[LinkProbed]:
        return [probe for probe in self._probed.values() if self._is_back(probe) is back]

    def _is_back(self, probe: LinkProbed) -> bool:
        sender = self.processes.get(probe.from_worker)
        return sender is not None and sender.role == "decode"

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """What one worker prefills: from the workers' samples, else from finished prefills."""
        rated = [worker.rated_prefill for worker in self.workers]
        tokens, seconds = sum(tokens for tokens, _ in rated), sum(seconds for _, seconds in rated)
        if seconds <= 0:
            tokens, seconds = float(self._computed_tokens), self._compute_s
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def b_star_bytes_per_s(self) -> float | None:
        """The link speed at which moving KV takes as long as computing it again."""
        tokens_per_s = self.prefill_tokens_per_s
        if self.model is None or tokens_per_s is None:
            return None
        return self.model.kv_bytes_per_token * tokens_per_s

    @property
    def rho(self) -> float | None:
        """Link speed (probed, else asked) over B*; None where either is unknown or the link is unlimited."""
        bits_per_s = self.achieved_bits_per_s or self.asked_bits_per_s
        b_star = self.b_star_bytes_per_s
        return bits_per_s / 8 / b_star if bits_per_s > 0 and b_star else None

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._first_at = event.at if self._first_at is None else min(self._first_at, event.at)
        self._last_at = max(self._last_at, event.at)
        match event:
            case WorkerStats():
                self._process(event.worker_id, event.role).sample(event)
            case RouterStats():
                router = self._process(ROUTER_ROLE, ROUTER_ROLE)
                router.peak_rss_bytes = max(router.peak_rss_bytes, event.rss_bytes)
            case PrefillFinished():
                computed = event.prompt_tokens - event.cached_tokens
                if computed >= MIN_PREFILL_TOKENS:  # less, as a probe's, measures what a step costs at least
                    self._computed_tokens += computed
                    self._compute_s += event.compute_s
            case RunStarted():
                self.started = event
                self.modes, self.codecs = [event.mode], [event.codec]
                self.handoffs = [event.handoff]
            case RunReady():
                self.ready_at = event.at
            case RunStopping():
                self.stopping_at, self.stop_reason = event.at, event.reason
            case RunStopped():
                self.orphans = event.orphans
            case ModelDescribed():
                self.model = event
            case WorkerStarting():
                self._process(event.worker_id, event.role).start(event)
            case WorkerExited():
                self._process(event.worker_id, event.role).exit(event)
            case WorkerFailed():
                self._process(event.worker_id, "").failed = event.reason
            case RoleChanged():
                self._process(event.worker_id, event.role).role = event.role
            case BlocksStranded():
                process = self._process(event.worker_id, "")
                process.stranded_blocks = max(process.stranded_blocks, event.blocks)
            case LinkConfigured():
                self._shape_link(event)
            case LinkProbed():
                self._probed[event.from_worker, event.to_worker] = event
            case LinkTuned():
                self.tuned = event
            case ModeChanged():
                self.modes.append(event.mode)
            case CodecChanged():
                self.codecs.append(event.codec)
            case HandoffChanged():
                self.handoffs.append(event.handoff)

    def _shape_link(self, event: LinkConfigured) -> None:
        """A link that was only described anew (with what the host reaches) keeps its probes."""
        if self.link is None or _asked(self.link) != _asked(event):
            self._probed.clear()
            self.tuned = None
        self.link = event

    def _process(self, process_id: str, role: str) -> ProcessFacts:
        return self.processes.setdefault(process_id, ProcessFacts(process_id, role))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _asked(link: LinkConfigured) -> tuple[str | float, ...]:
    return link.backend, link.asked_bits_per_s, link.asked_delay_ms, link.asked_jitter_ms, link.asked_loss
