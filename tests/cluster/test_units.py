import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.units import format_bits_per_s, format_bytes, parse_bits_per_s, parse_bytes


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("10gbit", 1e10),
        ("100 Mbit", 1e8),
        ("2.5gbit", 2.5e9),
        ("200kbit/s", 2e5),
        ("8bit", 8.0),
        ("1tbit", 1e12),
        ("40Gbitps", 4e10),
        (" unlimited ", 0.0),
        ("UNLIMITED", 0.0),
    ],
)
def test_rates_are_decimal_bits(text: str, bits_per_s: float) -> None:
    assert parse_bits_per_s(text) == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "10", "gbit", "10gb", "-1gbit", "0gbit", "1e9bit", "10 gbit fast", "nanbit"]
)
def test_what_is_no_rate_is_refused_by_value(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate; allowed") as error:
        parse_bits_per_s(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512MiB", 2**29), ("1GB", 10**9), ("1 kB", 1000), ("1KiB", 1024), ("8B", 8), ("1.5GiB", 3 * 2**29),
     ("2tb", 2 * 10**12)],
)  # fmt: skip
def test_sizes_are_binary_with_an_i_and_decimal_without(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "512", "MiB", "-1MiB", "1MiBs", "1 PiB"])
def test_what_is_no_size_is_refused_by_value(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; allowed") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [
        (1e10, "10.00 Gb/s"),
        (9.4e8, "940.00 Mb/s"),
        (1500.0, "1.50 kb/s"),
        (12.0, "12 b/s"),
        (0.0, "unlimited"),
    ],
)
def test_rates_for_people(bits_per_s: float, text: str) -> None:
    assert format_bits_per_s(bits_per_s) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (184_320_000, "175.8 MiB"), (3 * 2**30, "3.0 GiB")],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 10**6), st.sampled_from(["kbit", "mbit", "gbit"]))
def test_rates_survive_parsing_whatever_the_case(number: int, unit: str) -> None:
    assert parse_bits_per_s(f"{number}{unit}") == parse_bits_per_s(f"{number} {unit.upper()}/s") > 0
