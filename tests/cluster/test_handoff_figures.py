"""What is counted of weighed handoffs: the same in summary, page, Prometheus and console."""

import json

import pytest

from cluster.events import Event, HandoffChanged, HandoffChosen, HandoffMeasured, LinkTuned
from cluster.summary import summarize
from console.feed_text import REQUESTS, feed_line
from console.request_book import RequestBook
from console.run_page import render_page
from tests.cluster.histories import arrived, handed_off, run_started, run_stopped, worker_stats
from tests.cluster.test_prometheus import plain, scrape


def weighed(
    request_id: str, choice: str = "remote", forecast_ms: float = 80.0, actual_ms: float = 100.0
) -> list[Event]:
    return [
        HandoffChosen(
            at=10.0,
            request_id=request_id,
            attempt=1,
            choice=choice,
            reason="remote 80.0 ms (queue 0.0, prefill 78.0, transfer 2.0) beats local 300.0 ms",
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            remote_ms=80.0,
            local_ms=300.0,
        ),
        HandoffMeasured(
            at=10.1,
            request_id=request_id,
            attempt=1,
            choice=choice,
            forecast_ms=forecast_ms,
            actual_ms=actual_ms,
            queue_ms=0.0,
            prefill_ms=actual_ms,
            transfer_ms=0.0,
        ),
    ]


@pytest.fixture
def run() -> list[Event]:
    """Errors of +20, -10 and +40 ms; the third way was unweighed, the fourth request a probe."""
    unweighed = HandoffChosen(
        at=10.0,
        request_id="d",
        attempt=1,
        choice="remote",
        reason="nothing",
        prefill_worker="p",
        decode_worker="d",
    )
    return [
        *run_started(),
        HandoffChanged(at=3.0, handoff="auto"),
        *handed_off("a"), *weighed("a"),
        *handed_off("b"), *weighed("b", "local", 110.0, 100.0),
        *handed_off("c"), *weighed("c", "remote", 60.0, 100.0),
        *handed_off("d"), unweighed,
        arrived("e", label="probe"), *weighed("e", "remote", 1.0, 9999.0),
    ]  # fmt: skip


def test_summary_and_page(run: list[Event]) -> None:
    summary = summarize([*run, *run_stopped(20.0)])
    handoff = summary["handoff"]
    assert handoff["settings"] == ["always", "auto"]
    assert (handoff["remote"], handoff["local"], handoff["unweighed"]) == (3, 1, 1)
    assert (handoff["forecast_error_ms"]["p50"], handoff["forecast_error_ms"]["max"]) == (20.0, 40.0)
    assert handoff["forecast_error_ms"]["count"] == 3
    assert handoff["forecast_bias_ms"] == pytest.approx(50 / 3, abs=1e-6)
    assert handoff["forecast_error_share"] == pytest.approx(70 / 300, abs=1e-6)
    page = render_page(json.loads(json.dumps(summary)), alive=False, path="x", event_lines=[])
    assert "handoff always > auto\n  3 remote (1 for want of measurements), 1 local\n" in page
    assert "off by p50 20.0 p90 36.0 max 40.0 ms, 23% of what it took; mean +16.7 ms (3 forecasts)" in page


def test_a_run_that_weighed_nothing_has_no_such_section() -> None:
    summary = summarize([*run_started(), *handed_off(), *run_stopped(20.0)])
    assert summary["handoff"]["forecast_error_ms"]["p50"] is None
    assert "\nhandoff" not in render_page(summary, alive=False, path="x", event_lines=[])
    del summary["handoff"]  # an older run's
    render_page(summary, alive=False, path="x", event_lines=[])


def test_prometheus(run: list[Event]) -> None:
    found = scrape(*run)
    assert found[plain("handoffs_weighed_total", choice="remote")] == 3
    assert found[plain("handoffs_weighed_total", choice="local")] == 1
    assert found[plain("handoff_forecast_error_seconds_count")] == 3
    assert found[plain("handoff_forecast_error_seconds_sum")] == pytest.approx(0.07)


def test_rho_b_star_and_the_targets_rho_are_gauges() -> None:
    rated = worker_stats(
        at=5.0, worker_id="prefill-0", role="prefill", prefill_tokens=1000, prefill_tokens_per_s=2000.0
    )
    tuned = LinkTuned(
        at=4.0, target="t", target_rho=0.65, prefill_tokens_per_s=2e3, b_star_bytes_per_s=1e6, asked_bits_per_s=1e10,
        achieved_bits_per_s=9.4e9, rho=0.66,
    )  # fmt: skip
    found = scrape(*run_started(), tuned, rated)
    assert found[plain("b_star_bytes_per_second")] == pytest.approx(2000 * 512)
    assert found[plain("rho")] == pytest.approx(9.4e9 / 8 / (2000 * 512))
    assert found[plain("target_rho")] == 0.65
    untuned = scrape(*run_started())
    assert not {plain("rho"), plain("b_star_bytes_per_second"), plain("target_rho")} & set(untuned)


def test_the_console_tells_why_and_what_it_took() -> None:
    chosen, measured = weighed("a")
    line = feed_line(chosen)
    assert line is not None
    assert (line.category, line.routine) == (REQUESTS, True)
    assert line.text == f"a to P0>D0: {chosen.reason}"  # type: ignore[union-attr]
    local = feed_line(weighed("a", "local")[0])
    assert local is not None
    assert local.text.startswith("a to D0: ")
    book = RequestBook()
    for event in (arrived("a"), chosen, measured):
        book.fold(event)  # type: ignore[arg-type]
    request = book.get("a")
    assert request is not None
    story = [text for _, text in request.story]
    assert story[-2:] == [
        f"weighed: {chosen.reason}",  # type: ignore[union-attr]
        "remote took 100.0 ms to the first token, forecast 80.0",
    ]
