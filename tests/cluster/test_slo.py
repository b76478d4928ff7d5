"""SLOs as people write them, and what meets them."""

import pytest

from cluster.metrics import RequestLatency, Slos
from cluster.slo import format_slos, parse_slos


def test_limits_are_read_in_ms_and_written_back() -> None:
    slos = parse_slos("ttft=2s, itl=50ms,tpot = 7.5ms,e2el=90s")
    assert slos == Slos(ttft_ms=2000.0, itl_ms=50.0, tpot_ms=7.5, e2el_ms=90_000.0)
    assert parse_slos(format_slos(slos)) == slos
    assert format_slos(parse_slos("itl=50ms,ttft=2s")) == "ttft=2s,itl=50ms"


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=2", "ttft=-2s", "ttft=0s", "latency=2s", "itl=50us", "itl=1e3ms", "ttft=2s,"],
)
def test_what_is_no_limit_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_slos(text)


def test_a_limit_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft twice"):
        parse_slos("ttft=2s,ttft=3s")


def test_an_itl_limit_is_a_limit_on_every_gap() -> None:
    """A mean would hide the one long gap that a burst makes."""
    request = RequestLatency(ttft_ms=10.0, tpot_ms=5.0, e2el_ms=1000.0, worst_itl_ms=400.0)
    assert Slos(ttft_ms=10.0, tpot_ms=5.0).are_met_by(request)
    assert not Slos(itl_ms=399.0).are_met_by(request)
    assert Slos(itl_ms=400.0).are_met_by(request)
