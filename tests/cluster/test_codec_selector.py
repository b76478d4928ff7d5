"""What a worker learns of its links and codecs, and that its transfers follow."""

import pytest

from cluster.codec_selector import MIN_TRANSFER_BYTES, CodecSelector
from transport.codec_choice import CodecRate

PEER, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)
RATES = {"int8": CodecRate(5e9, 6e9, 0.52, is_lossy=True), "lossless": CodecRate(0.6e9, 1.8e9, 0.68)}
MB = 1_000_000


def selector(*, allow_lossy: bool = True) -> CodecSelector:
    made = CodecSelector(allow_lossy=allow_lossy)
    made.codecs_measured(RATES)
    return made


def rate_named_in(reason: str) -> str:
    return reason.partition(" over ")[2]


def test_the_asked_rate_serves_until_one_is_measured_and_bounds_that() -> None:
    known = selector()
    assert known.choose("auto", PEER, 50 * MB).reason == "the link is not measured yet"
    known.link_set(100e6)
    assert rate_named_in(known.choose("auto", PEER, 50 * MB).reason) == "100 MB/s asked"
    known.link_measured(PEER, 80e6)
    assert rate_named_in(known.choose("auto", PEER, 50 * MB).reason) == "80 MB/s measured"
    assert rate_named_in(known.choose("auto", OTHER, 50 * MB).reason) == "100 MB/s asked"
    for _ in range(20):
        known.link_measured(PEER, 300e6)
    assert rate_named_in(known.choose("auto", PEER, 50 * MB).reason) == "100 MB/s measured"


def test_a_new_shape_makes_what_was_measured_history() -> None:
    known = selector()
    known.link_measured(PEER, 12.5e6)
    assert known.choose("auto", PEER, 50 * MB).codec == "int8"
    known.link_set(None)
    assert known.choose("auto", PEER, 50 * MB).reason == "the link is not measured yet"
    known.link_set(12.5e9)
    assert known.choose("auto", PEER, 50 * MB).codec == "raw"


def test_raw_transfers_say_what_the_link_gives() -> None:
    known = selector()
    known.transferred(PEER, "raw", 10 * MB, 10 * MB, 0.1, 0.1)
    assert rate_named_in(known.choose("auto", PEER, 50 * MB).reason) == "100 MB/s measured"
    known.transferred(PEER, "raw", 10 * MB, 10 * MB, 0.05, 0.05)
    assert rate_named_in(known.choose("auto", PEER, 50 * MB).reason) == "130 MB/s measured"


@pytest.mark.parametrize(
    ("codec", "wire_bytes", "busy_s"),
    [("raw", MIN_TRANSFER_BYTES - 1, 1.0), ("raw", 10 * MB, 0.0), ("int8", 10 * MB, 1.0)],
)
def test_what_says_little_about_the_link_is_not_learnt(codec: str, wire_bytes: int, busy_s: float) -> None:
    known = selector()
    known.transferred(PEER, codec, 20 * MB, wire_bytes, busy_s, busy_s)
    assert known.choose("auto", PEER, 50 * MB).reason == "the link is not measured yet"


def test_real_transfers_correct_the_ratio() -> None:
    known = selector(allow_lossy=False)
    known.link_set(125e6)
    assert known.choose("auto", PEER, 50 * MB).codec == "lossless"
    for _ in range(20):
        known.transferred(PEER, "lossless", 10 * MB, 9_900_000, 0.1, 0.1)
    assert known.choose("auto", PEER, 50 * MB).codec == "raw"


def test_until_the_codecs_are_measured_auto_is_raw() -> None:
    known = CodecSelector(allow_lossy=True)
    known.link_set(1e6)
    assert known.choose("auto", PEER, MB).codec == "raw"
    assert known.choose("int8", PEER, MB).codec == "int8"


def test_a_transfer_with_pauses_only_shows_that_a_link_is_at_least_so_fast() -> None:
    known = selector()
    known.link_measured(PEER, 500e6)
    known.transferred(PEER, "raw", 10 * MB, 10 * MB, 0.1, 1.0)
    assert known.links() == {"127.0.0.1:1": 500e6}
    known.transferred(PEER, "raw", 10 * MB, 10 * MB, 0.01, 1.0)
    assert known.links()["127.0.0.1:1"] == pytest.approx(650e6)
    known.transferred(PEER, "raw", 10 * MB, 10 * MB, 0.1, 0.1)
    assert known.links()["127.0.0.1:1"] == pytest.approx(485e6)


def test_what_others_are_told_is_measured_and_within_what_was_asked() -> None:
    known = selector()
    assert known.rates() == RATES
    assert known.links() == {}
    known.link_measured(PEER, 300e6)
    known.link_measured(OTHER, 50e6)
    assert known.links() == {"127.0.0.1:1": 300e6, "127.0.0.1:2": 50e6}
    known.link_set(100e6)
    assert known.links() == {}
    known.link_measured(PEER, 300e6)
    assert known.links() == {"127.0.0.1:1": 100e6}
