"""Wherever a cursor goes, and by whatever way, the view is the fold of what lies before that place."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.events import Event, encode_event
from cluster.run_log import DamagedLine, decode_line
from console.feed import LogFeed
from console.replay_cursor import ReplayCursor
from console.replay_log import ReplayLog
from console.view_snapshot import Snapshots
from console.view_state import ViewState
from tests.console.history import story
from tests.console.plain import plain

DAMAGE = b'{"type":"from_the_future","at":1005}\n'
LINES = [encode_event(event) + b"\n" for event in story(32.0)]
LINES[40:40] = [DAMAGE, b"\xff\x00[]\n"]
CONTENT = b"".join(LINES)


def folded(content: bytes) -> ViewState:
    """The plain fold of every whole line."""
    state = ViewState()
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        found: Event | DamagedLine = decode_line(line, number)
        if isinstance(found, DamagedLine):
            state.pass_over(found)
        else:
            state.fold(found)
    return state


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    path.write_bytes(CONTENT)
    return path


@settings(max_examples=25, deadline=None)
@given(places=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), impatient=st.booleans(), data=st.data())
def test_any_way_leads_to_the_same_view(
    path: Path, places: list[float], impatient: bool, data: st.DataObject
) -> None:
    log = ReplayLog(path)
    cursor = ReplayCursor(log, Snapshots(spacing_bytes=20_000, limit=4))
    for place in places:
        offset = log.before(round(place * log.end))
        cursor.aim(offset)
        if impatient and data.draw(st.booleans()):
            cursor.work()
            continue  # somewhere else, before it has arrived
        while not cursor.work():
            pass
        assert cursor.offset == offset
        assert plain(cursor.state) == plain(folded(CONTENT[:offset]))
    log.close()


def test_a_jump_is_seen_when_it_has_arrived(path: Path) -> None:
    log = ReplayLog(path)
    snapshots = Snapshots(spacing_bytes=20_000)
    cursor = ReplayCursor(log, snapshots)
    cursor.aim(log.end)
    while not cursor.work():
        pass
    shown = cursor.state
    goal = log.after(snapshots.nearest(log.end // 2))
    cursor.aim(goal)
    assert (cursor.state is shown, cursor.offset) == (True, log.end)
    while not cursor.work():
        pass
    assert cursor.offset == goal
    log.close()


def test_snapshots_are_thinned_and_stay_right(path: Path) -> None:
    log = ReplayLog(path)
    snapshots = Snapshots(spacing_bytes=2_000, limit=8)
    cursor = ReplayCursor(log, snapshots)
    for offset in sorted(random.Random(5).sample(range(log.end), 60)):
        cursor.aim(log.before(offset))
        while not cursor.work():
            pass
    assert snapshots.spacing_bytes > 2_000
    place, seen = log.end, set()
    while (place := snapshots.nearest(place - 1)) > 0:
        seen.add(place)
        assert plain(snapshots.load(place)[1]) == plain(folded(CONTENT[:place]))
    assert 0 < len(seen) <= 8


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=6), end=st.integers(0, len(CONTENT)))
async def test_any_prefix_written_in_any_pieces_folds_to_the_same_view(
    tmp_path: Path, cuts: list[int], end: int
) -> None:
    """Also in the middle of a line: the writer is another process."""
    path = tmp_path / "growing.jsonl"
    path.unlink(missing_ok=True)
    state = ViewState()
    feed = LogFeed(path, state, lambda line: None)
    written = 0
    for cut in [*sorted(cut for cut in cuts if cut < end), end]:
        with path.open("ab") as file:
            file.write(CONTENT[written:cut])
        written = cut
        await feed.read_available()
    assert plain(state) == plain(folded(CONTENT[:end]))
