"""Everything the console shows, as a fold of the run's events. No widget, no file and no clock in here.

Live and finished runs use the same fold; what is "now" is said by the caller (:meth:`ViewState.now`).
"""

import heapq
import itertools
from collections import deque
from typing import Final, NamedTuple

from cluster.events import (
    CodecChanged,
    Event,
    HandoffChanged,
    LinkConfigured,
    LinkTuned,
    LoadStarted,
    LoadStopped,
    ModeChanged,
    ModelDescribed,
    NoteAdded,
    RequestDispatched,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    TokensDelivered,
    WorkerExited,
    WorkerReady,
)
from cluster.request_filter import RequestFilter
from cluster.run_log import DamagedLine
from console.chart_marks import mark_letter
from console.drill_verdict import ended_drill
from console.event_kinds import is_of_request, is_of_worker
from console.feed_text import FAULTS, NOTABLE, SILENT, Line, feed_line, subject
from console.judgement import Judgement, judge
from console.request_book import RequestBook
from console.series import Mark
from console.worker_view import ROUTER, Topology

KEPT_LINES: Final = 500
KEPT_MARKS: Final = 200
KEPT_PICKS: Final = 8
KEPT_DRILLS: Final = 20
FLOOD_S: Final = 10.0
"""Lines of one flood that come within that time of its first are one."""


class FeedEntry(NamedTuple):
    """A line of the feed; ``number`` counts all lines of the run. It is about a request, a process, or neither ("").

    ``times`` and ``until`` are of a flood: how many lines are told as this one, and when the last of them came.
    """

    number: int
    at: float
    line: Line
    request_id: str = ""
    worker_id: str = ""
    times: int = 1
    until: float = 0.0

    @property
    def text(self) -> str:
        """As it is shown."""
        if self.times == 1:
            return self.line.text
        return f"{self.line.text} ({self.times} in {self.until - self.at:.1f} s)"


class FeedLog:
    """Newest KEPT_LINES of each kind, so that a flood of requests never pushes a fault out."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, bool], deque[FeedEntry]] = {}
        self.count = 0

    def add(self, at: float, line: Line, request_id: str = "", worker_id: str = "") -> FeedEntry:
        entries = self._kinds.setdefault((line.category, line.routine), deque(maxlen=KEPT_LINES))
        if line.flood and entries and entries[-1].line.flood == line.flood and at - entries[-1].at < FLOOD_S:
            newest = entries[-1]
            entries[-1] = newest._replace(times=newest.times + 1, until=max(at, newest.until, newest.at))
        else:
            entries.append(FeedEntry(self.count, at, line, request_id, worker_id))
            self.count += 1
        return entries[-1]

    def newest(self, wanted: str, limit: int = KEPT_LINES, text: str = "") -> list[FeedEntry]:
        """At most ``limit`` entries of one tab (feed_text.FILTERS) that hold ``text`` (lower case), newest first."""
        kinds = [
            reversed(entries)
            for (category, routine), entries in self._kinds.items()
            if (not routine if wanted == NOTABLE else category == wanted)
        ]
        merged = heapq.merge(*kinds, key=lambda entry: entry.number, reverse=True)
        found = (entry for entry in merged if not text or text in entry.line.text.lower())
        return list(itertools.islice(found, limit))


class ViewState:
    """Feed it every event of one run, in the log's order."""

    def __init__(self) -> None:
        self.run = ""
        self.profile = ""
        self.model = ""
        self.mode = ""
        self.codec = ""
        self.own_codec = ""  # the profile's
        self.handoff = ""
        self.started_at: float | None = None
        self.ready_after_s: float | None = None
        self.url = ""
        self.stopping = ""
        self.stopped = False
        self.described: ModelDescribed | None = None
        self.tuned: LinkTuned | None = None  # None: no rho was asked, or the link was changed since
        self.loads: dict[str, str] = {}
        self.last_load = ""
        self.topology = Topology()
        self.requests = RequestBook()
        self._filter = RequestFilter()
        self.feed = FeedLog()
        self.marks: deque[Mark] = deque(maxlen=KEPT_MARKS)
        self.picks: deque[RequestDispatched] = deque(maxlen=KEPT_PICKS)
        self.drills: deque[NoteAdded] = deque(maxlen=KEPT_DRILLS)  # how each ended
        self.last_at = 0.0
        self.num_events = 0

    def now(self, clock: float) -> float:
        """The moment to draw: the clock while the run lives, its last event once it has stopped."""
        return self.last_at if self.stopped else max(clock, self.last_at)

    def since_start(self, at: float) -> float:
        """Seconds since RunStarted."""
        return at - self.started_at if self.started_at is not None else 0.0

    @property
    def load_names(self) -> str:
        """ "steady", "a+b"; "off" while none runs."""
        return "+".join(self.loads) or "off"

    def judgement(self) -> Judgement:
        """Whether disaggregation pays here, by what was measured so far."""
        link, described = self.link_bytes_per_s, self.described
        link_tokens_per_s = link / described.kv_bytes_per_token if link and described is not None else None
        prefill_tokens_per_s = self.topology.prefill_tokens_per_s()
        return judge(self.requests.modes, self.mode, prefill_tokens_per_s, self.rho, link_tokens_per_s)

    @property
    def b_star_bytes_per_s(self) -> float | None:
        """KV bytes per token x prefill tokens per second; None until both were measured."""
        tokens_per_s = self.topology.prefill_tokens_per_s()
        if self.described is None or tokens_per_s <= 0:
            return None
        return self.described.kv_bytes_per_token * tokens_per_s

    @property
    def link_bytes_per_s(self) -> float | None:
        """Achieved, else asked; None for an unlimited link that was not probed."""
        asked = self.topology.asked.asked_bits_per_s if self.topology.asked is not None else 0.0
        bits_per_s = self.topology.achieved_bits_per_s() or asked
        return bits_per_s / 8 if bits_per_s > 0 else None

    @property
    def rho(self) -> float | None:
        """Link bandwidth / B*: above 1, moving KV is faster than computing it again."""
        b_star, link = self.b_star_bytes_per_s, self.link_bytes_per_s
        return link / b_star if b_star is not None and link is not None else None

    def add_failure(self, at: float, text: str) -> None:
        """A line that is no event: something the console itself was refused."""
        self.feed.add(at, Line(FAULTS, text, "bad"))

    def pass_over(self, line: DamagedLine) -> None:
        """Take in that a line of the log says nothing that is known here."""
        self.feed.add(
            self.last_at, Line(FAULTS, f"log line {line.number} passed over: {line.problem}", "bad")
        )

    def fold(self, event: Event) -> None:
        """Take one event in."""
        self.num_events += 1
        if event.at > self.last_at:
            self.last_at = event.at
        if type(event) is TokensDelivered:  # a third of a log, and nothing of the rest has to do with it
            if self._filter.pass_on(event):
                self.requests.add_tokens(event)
        elif is_of_request(event):
            for passed in self._filter.pass_on(event):
                self._take(passed)
        else:
            self.requests.modes.disturbed.fold(event)
            self._take(event)

    def _take(self, event: Event) -> None:
        if is_of_request(event):
            self.requests.fold(event)
            if type(event) is RequestDispatched:
                self.picks.append(event)
        if type(event) is LinkConfigured:
            self._forget_link(event)
        if is_of_worker(event):
            self.topology.fold(event)
            if type(event) is WorkerExited and event.role == ROUTER:
                self.requests.router_lost(event.at)
        elif not is_of_request(event):
            self._fold_run(event)
        if type(event) not in SILENT:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        """Its line in the feed and its mark on the charts, if any."""
        line = feed_line(event)
        if line is not None:
            request_id, worker_id = subject(event)
            self.feed.add(event.at, line, request_id, worker_id)
            if worker_id in self.topology.workers:
                self.topology.workers[worker_id].story.append((event.at, line.text, line.level))
        letter = mark_letter(event)
        if type(event) is WorkerReady and self.topology.workers[event.worker_id].restarts:
            letter = "R"
        if letter and self.ready_after_s is not None:
            self.marks.append(Mark(event.at, letter, line.text if line is not None else ""))

    def _forget_link(self, event: LinkConfigured) -> None:
        """What stood for the link before, if this is another."""
        before = self.topology.asked
        if before is not None and before.asked_bits_per_s != event.asked_bits_per_s:
            self.tuned = None
            self.requests.modes.transfers.clear()

    def _fold_run(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.run, self.profile, self.model = event.run, event.profile, event.model
                self.mode, self.codec, self.started_at = event.mode, event.codec, event.at
                self.requests.modes.mode = event.mode
                self.own_codec, self.handoff = event.codec, event.handoff
            case RunReady():
                self.ready_after_s, self.url = event.after_s, event.url
            case RunStopping():
                self.stopping = event.reason
            case RunStopped():
                self.stopped = True
            case ModelDescribed():
                self.described = event
            case ModeChanged():
                self.mode = self.requests.modes.mode = event.mode
            case CodecChanged():
                self.codec = event.codec
            case HandoffChanged():
                self.handoff = event.handoff
            case LinkTuned():
                self.tuned = event
            case NoteAdded() if ended_drill(event.text) is not None:
                self.drills.append(event)
            case LoadStarted():
                self.loads[event.name] = event.detail
                self.last_load = event.name
                self.requests.modes.loads = self.load_names
            case LoadStopped():
                self.loads.pop(event.name, None)
                self.requests.modes.loads = self.load_names
            case _:
                pass  # a line or a mark, no state
