"""Stop strings are found however the text is cut into pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cluster.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    sent = ""
    for piece in pieces:
        text, matched = finder.push(piece)
        sent += text
        if matched:
            return sent, True
    return sent + finder.flush(), False


def test_held_text_is_only_what_may_begin_a_stop() -> None:
    finder = StopStrings(["END"])
    assert finder.push("abcE") == ("abc", False)
    assert finder.push("N") == ("", False)
    assert finder.push("x") == ("ENx", False)
    assert finder.push("yEND of") == ("y", True)


def test_without_stops_nothing_is_held() -> None:
    assert StopStrings([]).push("any") == ("any", False)


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_cutting_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    sent, matched = run(stops, pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    assert matched == bool(found)
    if not found:
        assert sent == text
    else:  # nothing of the first complete stop string was sent; an earlier overlapping one may end the text sooner
        assert text.startswith(sent)
        assert any(text.startswith(stop, len(sent)) for stop in stops)
