import pytest

from console.replay_bar import bar_line
from console.replay_clock import SPEEDS, ReplayClock, parse_go_to

KINDS = ("fell_back", "fault_injected", "fault_healed", "run_ready")


@pytest.fixture
def clock() -> ReplayClock:
    clock = ReplayClock(100.0)
    clock.seek(60.0)
    return clock


def test_it_advances_only_while_it_plays_and_stops_at_the_end(clock: ReplayClock) -> None:
    clock.advance(5.0)
    assert clock.position_s == 60.0
    clock.toggle()
    clock.change_speed(2)
    clock.advance(5.0)
    assert (clock.position_s, clock.speed, clock.playing) == (80.0, 4.0, True)
    clock.advance(5.0)
    assert (clock.position_s, clock.playing, clock.at_end) == (100.0, False, True)


def test_play_at_the_end_begins_anew(clock: ReplayClock) -> None:
    clock.seek(1e9)
    clock.toggle()
    assert (clock.position_s, clock.playing) == (0.0, True)


def test_the_speed_stays_within_its_steps(clock: ReplayClock) -> None:
    clock.change_speed(-99)
    assert clock.speed == SPEEDS[0] == 0.25
    clock.change_speed(99)
    assert clock.speed == SPEEDS[-1] == 64.0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0", 0.0), ("7", 7.0), ("1:23", 83.0), ("1:40.9", 100.9), ("+30", 90.0), ("-2m", -60.0),
        ("+ 0.5 h", 1860.0),         ("50%", 50.0), (" 12.5 % ", 12.5), ("fell_back", "fell_back"),
        ("Fell back", "fell_back"), ("fell", "fell_back"),
        ("run-ready", "run_ready"), ("fault_h", "fault_healed"),
    ],
)  # fmt: skip
def test_what_can_be_typed(clock: ReplayClock, text: str, place: float | str) -> None:
    assert parse_go_to(text, clock, KINDS) == place


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fault", "'fault' fits 2 kinds of events: fault_injected, fault_healed"),
        ("nothing", "'nothing' is no place in the run; allowed: 1:23, "),
        ("1:2:3:4", "'1:2:3:4' is no place"),
        ("", "'' is no place"),
        ("-", "'-' is no place"),
        ("nan", "'nan' is no place"),
        ("1:60", "'1:60' is no time; minutes and seconds"),
        ("1:60:00", "'1:60:00' is no time"),
        ("1:42", "'1:42' is behind the end of the run, which lasts 00:01:40"),
        ("1:02:03.5", "'1:02:03.5' is behind the end"),
        ("102%", "'102%' is behind the end"),
    ],
)
def test_what_cannot(clock: ReplayClock, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="^" + complaint.replace("(", r"\(")):
        parse_go_to(text, clock, KINDS)


def test_hours_can_be_typed() -> None:
    assert parse_go_to("1:02:03.5", ReplayClock(7200.0), KINDS) == 3723.5


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("length_s", [0.0, 1.0, 36_000.0])
def test_the_bar_has_its_width_and_every_mark_stays_on_the_track(width: int, length_s: float) -> None:
    marks = [(share * length_s, letter) for share, letter in ((0.0, "l"), (0.5, "b"), (0.5, "K"), (1.0, "R"))]
    line = bar_line(
        width, word="PLAYING", speed=0.25, position_s=length_s / 4, length_s=length_s, marks=marks, note="note",
        ascii_mode=True,
    ).plain  # fmt: skip
    assert len(line) <= width
    assert line.isascii()
    if width >= 80:
        track = line[line.index("[") : line.index("]")]
        assert "K" in track  # the kill wins over the burst in its cell
        if length_s:
            assert (track[1], track[-1]) == ("l", "R")
            assert track.index("|") == 1 + len(track[1:]) // 4
