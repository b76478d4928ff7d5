import stat
from pathlib import Path

import pytest

from cluster.events import NoteAdded, encode_event
from cluster.run_log import EVENTS_FILE, LogTail, PassedOver, RunLog, RunLogError, read_events, write_events
from tests.cluster.full_disk import largest_file
from tests.cluster.histories import handed_off, run_started


def note(text: str, index: int = -1) -> NoteAdded:
    return NoteAdded(at=1.0, text=text, index=index)


def test_appended_events_get_their_index_and_come_back_in_order(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    returned = [log.append(event) for event in (*run_started(), *handed_off())]
    log.close()
    assert [event.index for event in returned] == list(range(len(returned)))
    assert list(read_events(tmp_path / EVENTS_FILE)) == returned


def test_log_is_its_owners_alone(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    assert stat.S_IMODE((tmp_path / EVENTS_FILE).stat().st_mode) == 0o600


def test_flushed_events_can_be_read_while_the_writer_lives(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(note("a"))
    log.flush()
    assert [event.index for event in read_events(log.path)] == [0]
    log.close()


@pytest.mark.parametrize("kept", range(1, len(encode_event(note("b", 1)))))
def test_last_line_cut_off_by_a_crash_is_dropped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(encode_event(note("a", 0)) + b"\n" + encode_event(note("b", 1))[:kept])
    assert list(read_events(path)) == [note("a", 0)]


def test_continued_log_cuts_the_half_line_and_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    write_events(path, [note("a", 0), note("b", 1)])
    with path.open("ab") as file:
        file.write(encode_event(note("lost", 2))[:10])
    log = RunLog(tmp_path)
    assert log.append(note("c")).index == 2
    log.close()
    assert list(read_events(path)) == [note("a", 0), note("b", 1), note("c", 2)]


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(encode_event(note("a", 0)) + b"\nnonsense\n")
    with pytest.raises(RunLogError, match=r"events\.jsonl, line 2: not an event of schema 1"):
        list(read_events(path))


def test_reader_that_counts_damaged_lines_gets_every_other(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    line = encode_event(note("a", 0)) + b"\n"
    path.write_bytes(line + b"nonsense\n" + line + b"\n" + line + b"half")
    passed = PassedOver()
    for _ in range(2):  # who reads twice does not count twice
        assert len(list(read_events(path, passed))) == 3
    assert str(passed) == "2 damaged lines passed over (first: line 2)"
    assert str(PassedOver({7})) == "1 damaged line passed over (first: line 7)"
    assert str(PassedOver()) == ""


def test_log_without_one_event_is_refused_by_every_reader(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(b"nonsense\n" * 3)
    with pytest.raises(RunLogError, match=r"events\.jsonl, line 1: not an event"):
        list(read_events(path, PassedOver()))


def test_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    tail = LogTail(path)
    assert tail.read_new() == []  # no file yet
    line = encode_event(note("a", 0)) + b"\n"
    found = []
    for byte in line * 2:
        with path.open("ab") as file:
            file.write(bytes([byte]))
        found.append(len(tail.read_new()))
    assert sum(found) == 2
    assert found[len(line) - 1] == found[-1] == 1
    assert tail.read_new() == []


def test_tail_in_small_bites_reads_what_one_reading_reads(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    events = [*run_started(), *handed_off()]
    write_events(path, events)
    tail = LogTail(path)
    found = []
    for _ in range(path.stat().st_size // 100 + 1):
        found += tail.read_new(max_bytes=100)
    assert found == events


def test_tail_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    write_events(path, [note("a", 0), note("b", 1)])
    tail = LogTail(path)
    assert len(tail.read_new()) == 2
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(RunLogError, match="line 3"):
        tail.read_new()


def test_what_a_full_disk_does_not_take_is_kept_and_written_later(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    events = []
    with largest_file(1000):
        for number in range(40):
            events.append(log.append(note(f"event {number}")))
        with pytest.raises(OSError, match="File too large"):
            log.flush()
        assert log.path.stat().st_size == 1000, "it may end in half a line"
        assert list(read_events(log.path)) == events[: len(list(read_events(log.path)))]
        events.append(log.append(note("while it is full")))
        with pytest.raises(OSError, match="File too large"):
            log.flush()
        assert log.unwritten_bytes > 0
    log.flush()
    assert log.unwritten_bytes == 0
    log.close()
    assert list(read_events(log.path)) == events


def test_closing_on_a_full_disk_says_what_is_lost(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(note("a"))
    log.flush()
    log.append(note("b" * 5000))
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        log.close()
    assert log.unwritten_bytes > 4000
    assert list(read_events(log.path)) == [note("a", 0)]
