"""Moves one or two runs along a replay clock, in pieces short enough that keys are never kept waiting.

Two runs are laid over each other at the moment at which their clusters were ready.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from console.own_cost import LoopLag
from console.replay_clock import ReplayClock, parse_go_to
from console.replay_cursor import ReplayCursor
from console.replay_glimpse import FAR_BYTES, ReplayGlimpse
from console.replay_log import KINDS, ReplayLog
from console.view_snapshot import Snapshots, Store
from console.view_state import ViewState

IDLE_S: Final = 0.05
"""Between two turns when there is nothing to fold."""


def overlay(logs: Sequence[ReplayLog], stores: Sequence[Store | None] = ()) -> "list[ReplayTrack]":
    """One run from its first event on; two so that they were ready at the same moment. ``stores``: of each log, if any
    has one."""
    stores = stores or [None] * len(logs)
    if len(logs) == 1:
        return [ReplayTrack(logs[0], logs[0].first_at, stores[0])]
    ready = [log.first_at if log.ready_at is None else log.ready_at for log in logs]
    before_s = max(at - log.first_at for at, log in zip(ready, logs, strict=True))
    return [
        ReplayTrack(log, at - before_s, store) for at, log, store in zip(ready, logs, stores, strict=True)
    ]


class ReplayTrack:
    """One run: its log, the view at the clock's position, and where its time 0 lies on its own clock."""

    def __init__(self, log: ReplayLog, zero_at: float, store: Store | None = None) -> None:
        self.log = log
        self.zero_at = zero_at
        self.snapshots = Snapshots(store=store)
        self.cursor = ReplayCursor(log, self.snapshots)
        self._ahead = ReplayCursor(log, self.snapshots)
        self._found = (0.0, log.offset_at(zero_at))

    def offset_at(self, position_s: float) -> int:
        """Where in the log that moment of the clock is."""
        if self._found[0] != position_s:
            self._found = (position_s, self.log.offset_at(self.zero_at + position_s))
        return self._found[1]

    @property
    def indexed(self) -> float:
        """The share of the log within reach of a snapshot."""
        return min(max(self._ahead.offset, self.snapshots.furthest) / max(self.log.end, 1), 1.0)

    def fold_ahead(self) -> bool:
        """Take the snapshots of the log's next stretch; True when there is none left."""
        self._ahead.aim(max(self.snapshots.furthest, self.log.end))
        return self._ahead.work()


class ReplayFeed:
    """The task of a replay. ``on_moved`` is called when what is shown is another moment than the clock led to by
    itself: after a jump. The first track is the one whose log events are stepped through."""

    def __init__(self, tracks: list[ReplayTrack], clock: ReplayClock, on_moved: Callable[[], None]) -> None:
        self.tracks = tracks
        self.clock = clock
        self.slices = 0
        self._on_moved = on_moved
        self._pinned: int | None = None  # a position of the first log that its time alone does not tell
        self._lag = LoopLag()
        self._jump_from: list[int] | None = (
            None  # where the cursors were when a jump began that is still going on
        )
        self._glimpse: ReplayGlimpse | None = None  # of where that jump goes, if it takes long

    @property
    def paused(self) -> bool:
        return not self.clock.playing

    @paused.setter
    def paused(self, value: bool) -> None:
        self.clock.playing = not value

    @property
    def caught_up(self) -> bool:
        return all(track.cursor.offset == self._aim_of(track) for track in self.tracks)

    @property
    def progress(self) -> float | None:
        """Of a jump: the share that is done. None when what is shown is where the clock is."""
        if self._jump_from is None:
            return None
        shares = [
            (track.cursor.reached - begin) / max(self._aim_of(track) - begin, 1)
            for track, begin in zip(self.tracks, self._jump_from, strict=True)
        ]
        return min(max(min(shares), 0.0), 1.0)

    @property
    def glimpse(self) -> ViewState | None:
        """What is to be drawn until a jump that takes long has arrived; None: what the cursor has."""
        return self._glimpse.state if self._glimpse is not None and self._glimpse.is_made else None

    @property
    def lag_s(self) -> float:
        return self._lag.worst_s

    @property
    def log_bytes(self) -> int:
        return self.tracks[0].log.end

    @property
    def position(self) -> int:
        """Where in the first log the replay is, or is going."""
        return self._aim_of(self.tracks[0])

    def seek(self, position_s: float) -> None:
        """Go to a moment."""
        self._pinned = None
        self.clock.seek(position_s)
        self._jump()

    def go_to(self, offset: int) -> None:
        """Go to a position of the first log."""
        first = self.tracks[0]
        self.clock.seek(first.log.time_at(offset) - first.zero_at)
        self._pinned = offset
        self._jump()

    def go_where(self, text: str) -> str:
        """Go where the operator typed: a time, or the next event of a kind. Returns what is to be said of it.

        Raises ValueError with one line for the operator.
        """
        wanted = parse_go_to(text, self.clock, KINDS)
        if isinstance(wanted, float):
            self.seek(wanted)
            return ""
        log = self.tracks[0].log
        found = log.find_kind(wanted, self.position)
        note = "" if found is not None else f"no {wanted} after this; here is the first of the run"
        found = log.find_kind(wanted, 0) if found is None else found
        if found is None:
            raise ValueError(f"this run has no event {wanted}")
        self.clock.playing = False
        self.go_to(found)
        return note

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if self.clock.playing and self._jump_from is None:
                self._pinned = None
                self.clock.advance(now - before)
            before = now
            arrived = self._work()
            if arrived and self._jump_from is not None:
                self._jump_from = self._glimpse = None
                self._on_moved()
            if arrived and all([track.fold_ahead() for track in self.tracks]):
                await self._lag.sleep(IDLE_S)
            else:
                await self._lag.sleep(0.0)

    async def read_available(self) -> None:
        """Fold up to the clock's position."""
        while not self._work():
            await self._lag.sleep(0.0)

    def _work(self) -> bool:
        """One piece of what is to be folded; True when there is nothing."""
        if self._glimpse is not None and not self._glimpse.is_made:
            self._glimpse.work()
            if self._glimpse.is_made:
                self._on_moved()
            return False
        arrived = True
        for track in self.tracks:
            track.cursor.aim(self._aim_of(track))
            if not track.cursor.work():
                arrived = False
                self.slices += 1
        if not arrived and self._jump_from is None:
            self._hold()
        return arrived

    def _jump(self) -> None:
        """To where the clock has been set, as far from there as it may be."""
        for track in self.tracks:
            track.cursor.aim(self._aim_of(track))
        self._jump_from = [track.cursor.reached for track in self.tracks]
        first, aim = self.tracks[0].cursor, self._aim_of(self.tracks[0])
        is_far = first.offset != aim and aim - first.reached > FAR_BYTES
        # Two runs are compared by their totals too, which a glimpse does not have.
        self._glimpse = ReplayGlimpse(first.log, aim) if is_far and len(self.tracks) == 1 else None

    def _hold(self) -> None:
        """Folding does not keep up with the speed asked: the clock waits for it."""
        reached = [
            track.log.time_at(track.cursor.offset) - track.zero_at
            for track in self.tracks
            if track.cursor.offset < self._aim_of(track)
        ]
        if reached:
            self.clock.seek(min(reached))

    def _aim_of(self, track: ReplayTrack) -> int:
        if self._pinned is not None and track is self.tracks[0]:
            return self._pinned
        return track.offset_at(self.clock.position_s)
