"""Random access to a log: positions, times, marks and kinds, and what damage does to them."""

from pathlib import Path

import pytest

from cluster.events import NoteAdded, encode_event
from cluster.run_log import write_events
from console.errors import UserError
from console.replay_log import KINDS, ReplayLog
from console.view_state import ViewState
from tests.console.history import story

EVENTS = story()
LINES = [encode_event(event) + b"\n" for event in EVENTS]


@pytest.fixture
def log(tmp_path: Path) -> ReplayLog:
    path = tmp_path / "events.jsonl"
    write_events(path, EVENTS)
    return ReplayLog(path)


def test_its_ends_and_its_size(log: ReplayLog) -> None:
    assert (log.first_at, log.ready_at, log.last_at) == (1000.0, 1003.0, max(event.at for event in EVENTS))
    assert log.num_lines == len(EVENTS)
    assert log.end == sum(map(len, LINES))


def test_the_position_of_a_moment_is_after_the_last_event_that_is_not_later(log: ReplayLog) -> None:
    for index in range(0, len(EVENTS), 7):
        offset = sum(map(len, LINES[: index + 1]))
        newest = max(event.at for event in EVENTS[: index + 1])
        assert log.time_at(offset) == newest
        expected = sum(len(line) for event, line in zip(EVENTS, LINES, strict=True) if event.at <= newest)
        assert log.offset_at(newest) == expected
    assert log.offset_at(0.0) == 0
    assert log.offset_at(1e9) == log.end


def test_an_event_that_was_written_late_does_not_turn_time_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, [NoteAdded(at=at, text="x") for at in (10.0, 30.0, 20.0, 40.0)])
    log = ReplayLog(path)
    line = len(encode_event(NoteAdded(at=10.0, text="x"))) + 1
    assert log.offset_at(20.0) == line  # what happened at 20 s was not known before 30 s
    assert log.offset_at(30.0) == 3 * line
    assert log.time_at(3 * line) == 30.0


def test_one_event_on_and_back(log: ReplayLog) -> None:
    offset = 0
    for event, line in zip(EVENTS, LINES, strict=True):
        after = log.after(offset)
        assert after == offset + len(line)
        assert log.before(after) == offset
        assert log.kind_before(after) == event.__struct_config__.tag
        offset = after
    assert log.after(offset) == offset == log.end
    assert log.before(0) == 0
    assert log.kind_before(0) == ""
    assert log.lines_before(log.end) == len(EVENTS)


def test_the_marks_are_those_of_the_view(log: ReplayLog) -> None:
    state = ViewState()
    for event in EVENTS:
        state.fold(event)
    assert [(mark.at, mark.letter) for mark in log.marks] == [(mark.at, mark.letter) for mark in state.marks]
    assert {"b", "K", "R", "f"} <= {mark.letter for mark in log.marks}
    first, second = log.marks[:2]
    assert log.next_mark(first.offset) == second
    assert log.previous_mark(second.offset) == first
    assert log.previous_mark(first.offset) is None
    assert log.next_mark(log.marks[-1].offset) is None


@pytest.mark.parametrize("kind", KINDS)
def test_finds_every_kind_that_there_is(log: ReplayLog, kind: str) -> None:
    places, offset = [], 0
    for event, line in zip(EVENTS, LINES, strict=True):
        offset += len(line)
        if event.__struct_config__.tag == kind:
            places.append(offset)
    begin = 0
    for place in places:
        assert log.find_kind(kind, begin) == place
        begin = place
    assert log.find_kind(kind, begin) is None


def test_a_text_that_looks_like_an_event_is_not_found_as_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, [NoteAdded(at=1.0, text='\n{"type":"fell_back","at":2}\n')])
    assert ReplayLog(path).find_kind("fell_back", 0) is None


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(LINES[:10]) + LINES[10][:-5])
    log = ReplayLog(path)
    assert (log.num_lines, log.end) == (10, sum(map(len, LINES[:10])))
    assert log.read(log.end) == []


@pytest.mark.parametrize(
    "damage", [b"\n", b"\x00" * 300 + b"\n", b'{"type":"from_the_future","at":1003.5}\n', b"[" * 9999 + b"\n"]
)
def test_a_damaged_line_changes_nothing_around_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join([*LINES[:20], damage, *LINES[20:]]))
    log = ReplayLog(path)
    assert log.num_lines == len(EVENTS) + 1
    assert log.last_at == max(event.at for event in EVENTS)
    assert log.before(log.after(log.offset_at(1010.0))) == log.offset_at(1010.0)
    assert log.find_kind("fell_back", 0) is not None


def test_a_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = [NoteAdded(at=1.0, text="x"), NoteAdded(at=2.0, text="y" * 700_000), NoteAdded(at=3.0, text="z")]
    write_events(path, events)
    log = ReplayLog(path)
    assert log.num_lines == 3
    second = log.after(log.after(0))
    assert log.time_at(second) == 2.0
    assert log.before(second) == log.after(0)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"type":"note_added"'])
def test_a_log_without_an_event_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"events\.jsonl holds no event"):
        ReplayLog(path)


def test_a_log_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        ReplayLog(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        ReplayLog(tmp_path)
