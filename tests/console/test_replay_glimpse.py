"""What is seen of a moment far ahead before the log up to it has been read."""

from itertools import islice
from pathlib import Path

import pytest

from cluster.run_log import write_events
from console.panels.header import UNREAD
from console.replay_app import ReplayApp
from console.replay_cursor import ReplayCursor
from console.replay_glimpse import ReplayGlimpse
from console.replay_log import ReplayLog
from console.view_snapshot import Snapshots
from console.view_state import ViewState
from tests.console.long_log import long_run
from tests.console.plain import plain

NUM_EVENTS = 12_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    write_events(path, islice(long_run(requests_per_s=2.0), NUM_EVENTS))
    return path


@pytest.fixture
def short_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the log were a hundred times as long."""
    monkeypatch.setattr("console.replay_glimpse.STRETCH_BYTES", 400_000)
    monkeypatch.setattr("console.replay_feed.FAR_BYTES", 600_000)


def glimpse(log: ReplayLog, offset: int) -> ViewState:
    made = ReplayGlimpse(log, offset)
    while not made.is_made:
        made.work()
    return made.state


def whole(log: ReplayLog, offset: int) -> ViewState:
    cursor = ReplayCursor(log, Snapshots())
    cursor.aim(offset)
    while not cursor.work():
        pass
    return cursor.state


@pytest.mark.usefixtures("short_stretch")
@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_it_has_what_there_is_and_what_happened_last(path: Path, share: float) -> None:
    log = ReplayLog(path)
    offset = log.before(round(share * log.end))
    seen, right = glimpse(log, offset), whole(log, offset)
    assert seen.num_events < right.num_events / 2
    for name in ("mode", "codec", "loads", "url", "described", "stopped", "last_at"):
        assert plain(getattr(seen, name)) == plain(getattr(right, name))
    workers = [
        {it: (w.state, w.pid, w.restarts) for it, w in state.topology.workers.items()}
        for state in (seen, right)
    ]
    assert workers[0] == workers[1]
    assert seen.topology.held_blocks() == right.topology.held_blocks()
    newest = [[plain(request) for request in state.requests][-20:] for state in (seen, right)]
    assert len(newest[0]) == 20
    assert newest[0] == newest[1]
    log.close()


def test_near_the_beginning_it_is_the_whole_view(path: Path) -> None:
    log = ReplayLog(path)
    offset = log.after(log.after(0))
    assert plain(glimpse(log, offset)) == plain(whole(log, offset))
    log.close()


@pytest.mark.usefixtures("short_stretch")
async def test_a_far_jump_shows_it_at_once_and_says_what_is_missing(path: Path) -> None:
    log = ReplayLog(path)
    app = ReplayApp([log], lambda wanted: path.parent / wanted, ["long"], refresh_s=3600.0)
    drawn: list[tuple[str, int]] = []
    draw = app.draw

    def watch(*, charts: bool = True) -> None:
        draw(charts=charts)
        drawn.append((str(app._main._header.visual), app.state.requests.finished))

    app.draw = watch  # type: ignore[method-assign]
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("end")
        while app.replay.progress is not None:
            await pilot.pause(0.01)
        right = whole(log, log.end)
        told = [finished for header, finished in drawn if UNREAD in header]
        assert told
        assert 0 < told[0] < right.requests.finished
        assert UNREAD not in drawn[-1][0]
        assert plain(app.state) == plain(right)
    log.close()
