"""iperf3 as a yardstick: its report read, its complaints told, and the real one where it is installed."""

from typing import Any

import pytest

from cluster import iperf3
from cluster.iperf3 import Iperf3Error, Iperf3Server, parse, run_iperf3


def report(**changes: Any) -> dict[str, object]:
    end = {
        "sum_received": {"bytes": 3_000_000_000, "seconds": 1.5, "bits_per_second": 16e9},
        "cpu_utilization_percent": {"host_total": 50.0, "remote_total": 20.0},
    }
    return {"end": end | changes}


def test_cpu_shares_are_seconds_of_the_test() -> None:
    result = parse(report())
    assert (result.num_bytes, result.duration_s) == (3_000_000_000, 1.5)
    assert (result.sender_cpu_s, result.receiver_cpu_s) == pytest.approx((0.75, 0.3))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"error": "unable to connect"}, "iperf3: unable to connect"),
        ({}, "iperf3's report has no 'end'"),
        (report(sum_received={"bytes": 1}), "iperf3's report has no 'seconds'"),
    ],
)
def test_a_report_without_figures_is_an_error(document: dict[str, object], words: str) -> None:
    with pytest.raises(Iperf3Error, match=words):
        parse(document)


@pytest.mark.skipif(not iperf3.is_installed(), reason=iperf3.NOT_INSTALLED)
def test_the_real_one_moves_bytes_and_a_second_client_is_refused() -> None:
    server = Iperf3Server("127.0.0.1")
    try:
        result = run_iperf3("127.0.0.1", server.port, 1, 1e9, "reno")
        assert result.num_bytes > 0
        assert result.sender_cpu_s > 0
    finally:
        server.close()
    with pytest.raises(Iperf3Error, match="iperf3: "):
        run_iperf3("127.0.0.1", server.port, 1, 0.0, "")


@pytest.mark.skipif(not iperf3.is_installed(), reason=iperf3.NOT_INSTALLED)
def test_an_address_that_is_not_here_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        Iperf3Server("203.0.113.7")
