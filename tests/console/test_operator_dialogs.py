"""What an operator types, as numbers, or one line that says what is allowed."""

import pytest

from cluster.control import ChangeLink
from console.operator_dialogs import parse_burst, parse_link
from console.screens.worker_page import parse_time


@pytest.mark.parametrize(("text", "found"), [("3", (3, 8000)), ("4 2000", (4, 2000)), ("1 8,000", (1, 8000))])
def test_bursts(text: str, found: tuple[int, int]) -> None:
    assert parse_burst(text) == found


@pytest.mark.parametrize("text", ["0", "-1", "x", "2 0", "1 2 3", "1001", "2.5", "١ x"])
def test_bursts_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_burst(text)


def test_links() -> None:
    cause = "operator, key l"
    assert parse_link("1gbit 5ms 1ms") == ChangeLink(bits_per_s=1e9, delay_ms=5.0, jitter_ms=1.0, cause=cause)
    assert parse_link("unlimited") == ChangeLink(bits_per_s=0.0, cause=cause)
    assert parse_link("100mbit 20") == ChangeLink(bits_per_s=1e8, delay_ms=20.0, cause=cause)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "0gbit",
        "-1gbit",
        "1gbit -5ms",
        "1gbit nan",
        "1gbit inf",
        "1gbit 5s",
        "1gbit 1 2 3",
        "1gbit 10001",
    ],
)
def test_links_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("247.9", 247.9), ("4:07.9", 247.9), ("1:04:07", 3847.0), ("0", 0.0)]
)
def test_times_of_the_run(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "x", "4:", ":3", "-1", "nan", "inf", "1:xx"])
def test_times_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_time(text)
