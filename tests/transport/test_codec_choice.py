"""The decision as a table: link, codecs and permission in, codec and reason out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.codec_choice import MIN_GAIN, CodecChoice, CodecRate, LinkRate, choose_codec, transfer_s

RATES = {
    "int8": CodecRate(5e9, 6e9, 0.52, is_lossy=True),
    "lossless": CodecRate(0.6e9, 1.8e9, 0.68),
}
SLOW = {
    name: CodecRate(rate.encode_bytes_per_s / 50, 1e8, rate.ratio, rate.is_lossy)
    for name, rate in RATES.items()
}
GBIT = 1e9 / 8
BIG = 50_000_000


@pytest.mark.parametrize(
    ("asked", "gbits", "rates", "allow_lossy", "codec"),
    [
        ("raw", 0.1, RATES, True, "raw"),
        ("int8", 400, SLOW, False, "int8"),
        ("auto", 0.1, RATES, True, "int8"),
        ("auto", 0.1, RATES, False, "lossless"),
        ("auto", 1, RATES, True, "int8"),
        ("auto", 1, RATES, False, "lossless"),
        ("auto", 10, RATES, True, "int8"),
        ("auto", 10, RATES, False, "raw"),
        ("auto", 25, RATES, True, "raw"),  # encoding and sending are one core's work
        ("auto", 100, RATES, True, "raw"),
        ("auto", 10, SLOW, True, "raw"),
        ("auto", 0.1, SLOW, True, "int8"),
        ("lossless", 0.1, RATES, True, "lossless"),
        ("lossless", 1, RATES, False, "lossless"),
        ("lossless", 10, RATES, True, "raw"),
        ("lossless", 1, SLOW, True, "raw"),
    ],
)
def test_the_fastest_that_is_allowed_is_chosen(
    asked: str, gbits: float, rates: dict[str, CodecRate], allow_lossy: bool, codec: str
) -> None:
    choice = choose_codec(asked, BIG, LinkRate(gbits * GBIT, "measured"), rates, allow_lossy=allow_lossy)
    assert choice.codec == codec
    assert bool(choice.reason) == (asked in ("auto", "lossless"))


@pytest.mark.parametrize(
    ("asked", "link", "rates", "choice"),
    [
        ("auto", LinkRate(GBIT, "asked"), {}, CodecChoice("raw", "the codecs' rates are not measured yet")),
        ("auto", None, RATES, CodecChoice("raw", "the link is not measured yet")),
        ("lossless", None, RATES, CodecChoice("lossless", "the link is not measured yet")),
        ("lossless", None, {}, CodecChoice("lossless", "the codecs' rates are not measured yet")),
        ("int8", None, {}, CodecChoice("int8")),
    ],
)
def test_what_is_not_known_is_said(
    asked: str, link: LinkRate | None, rates: dict[str, CodecRate], choice: CodecChoice
) -> None:
    assert choose_codec(asked, BIG, link, rates, allow_lossy=True) == choice


def test_the_reason_gives_the_estimates_and_what_was_left_out() -> None:
    link = LinkRate(GBIT, "measured")
    assert choose_codec("auto", BIG, link, RATES, allow_lossy=True).reason == (
        "estimated int8 209 ms, lossless 275 ms, raw 401 ms for 50 MB over 125 MB/s measured"
    )
    assert choose_codec("auto", BIG, link, RATES, allow_lossy=False).reason == (
        "estimated lossless 275 ms, raw 401 ms for 50 MB over 125 MB/s measured; int8 may lose and is not allowed"
    )
    assert choose_codec("lossless", BIG, link, RATES, allow_lossy=False).reason.endswith("MB/s measured")


def test_the_slowest_stage_decides_after_one_frame_has_been_through_all() -> None:
    rate = CodecRate(1e8, 4e8, 0.5)
    frame = 1024 * 1024
    stages = (1 / 1e8 + 0.5 / 3e9, 0.5 / 1e9, 1 / 4e8 + 0.5 / 3e9)
    assert transfer_s(frame, LinkRate(1e9, "asked"), rate) == pytest.approx(frame * sum(stages))
    assert transfer_s(11 * frame, LinkRate(1e9, "asked"), rate) == pytest.approx(
        frame * (sum(stages) + 10 * stages[0])
    )


@given(
    st.floats(1e5, 1e11),
    st.integers(1, 10**10),
    st.floats(1e6, 1e11),
    st.floats(1e6, 1e11),
    st.floats(0.1, 1.0),
    st.booleans(),
)
def test_a_codec_is_never_chosen_that_would_slow_the_transfer(
    link_rate: float, raw_bytes: int, encode: float, decode: float, ratio: float, is_lossy: bool
) -> None:
    link = LinkRate(link_rate, "measured")
    rates = {"lossless": CodecRate(encode, decode, ratio, is_lossy)}
    raw_s = transfer_s(raw_bytes, link, CodecRate(float("inf"), float("inf"), 1.0))
    coded_s = transfer_s(raw_bytes, link, rates["lossless"])
    chosen = choose_codec("auto", raw_bytes, link, rates, allow_lossy=False).codec
    assert chosen == ("lossless" if coded_s <= (1 - MIN_GAIN) * raw_s and not is_lossy else "raw")
