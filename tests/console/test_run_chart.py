"""Pictures and pages of runs: what they are drawn from, and that they hold it."""

import re
from pathlib import Path

import pytest

from cluster.events import Event, FaultInjected, LinkConfigured
from cluster.run_dir import LOG_DIR
from cluster.run_log import EVENTS_FILE, write_events
from console.cli import main
from console.report_page import render_report
from console.run_chart import mark_key_lines, run_chart_svg
from console.run_chart_data import ChartData, Transfer, chart_data, transfer_rate
from tests.cluster.histories import arrived, handed_off, run_started, run_stopped


def data_of(*events: Event, run: str = "r1") -> ChartData:
    return chart_data(run, [*run_started(), *events, *run_stopped(22.0)])


def run_dir(home: Path, name: str, *events: Event) -> Path:
    directory = home / "runs" / name
    (directory / LOG_DIR).mkdir(parents=True)
    write_events(directory / EVENTS_FILE, [*run_started(), *events, *run_stopped(22.0)])
    return directory


def test_gaps_lie_at_the_later_token_and_are_those_of_finished_requests() -> None:
    data = data_of(*handed_off("a"), arrived("open", at=12.0))
    assert data.gap_ms == pytest.approx([10.0, 10.0, 20.0])
    assert data.gap_at_s == pytest.approx([10.11, 10.12, 10.14])
    assert [timeline.request_id for timeline in data.finished] == ["a"]


def test_marks_and_the_asked_rate_count_from_the_first_event() -> None:
    fault = FaultInjected(at=12.0, fault="kill", target="prefill-0", cause="operator")
    slower = LinkConfigured(at=15.0, backend="pacing", asked_bits_per_s=8e8)
    data = chart_data("r1", [*run_started(at=2.0), fault, slower])
    assert [(mark.at, "prefill-0" in mark.text) for mark in data.marks if mark.letter == "K"] == [
        (10.0, True)
    ]
    assert data.asked == [(0.0, 1.25e9), (13.0, 1e8)]


def test_the_key_to_the_marks_is_two_lines_of_whole_entries() -> None:
    told = {letter: f"{letter}{number} " + "word " * 30 for number, letter in enumerate("bKhRfgDmisla")}
    lines = mark_key_lines(told)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 160
    entries = [entry for line in lines for entry in line.split("   ")]
    assert [entry[0] for entry in entries] == list("bKhRfgDmisla")[: len(entries)]
    assert all(entry.endswith("word ...") for entry in entries)
    assert mark_key_lines({"b": "short", "m": "mode"}) == ["b: short   m: mode"]


def test_rate_of_transfers_keeps_every_byte() -> None:
    data = ChartData("r1", {}, duration_s=10.0)
    data.transfers = [Transfer(0.5, 2.5, 1000), Transfer(9.9, 10.0, 70), Transfer(3.0, 3.0, 8)]
    edges, rates = transfer_rate(data, 10)
    assert edges == pytest.approx(list(range(11)))
    assert rates[:4] == pytest.approx([250.0, 500.0, 250.0, 0.0], abs=9)
    assert rates[9] == pytest.approx(70.0)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_chart_is_a_picture_of_the_kind_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    run_dir(tmp_path, "r1", *handed_off("a"))
    out = tmp_path / f"out.{ending}"
    assert main(["chart", "r1", "-o", str(out)]) == 0
    head = out.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head


def test_chart_of_a_run_without_requests_says_so() -> None:
    svg = run_chart_svg(data_of()).decode()
    for words in ("no request finished", "no KV was moved", "no request with two tokens finished"):
        assert words in svg


def test_same_run_gives_the_same_svg() -> None:
    assert run_chart_svg(data_of(*handed_off("a"))) == run_chart_svg(data_of(*handed_off("a")))


def test_report_stands_alone_and_escapes_what_a_log_says() -> None:
    runs = [data_of(*handed_off("a"), run="<b>one</b>"), data_of(*handed_off("b", gaps_s=(0.05,)), run="two")]
    page = render_report(runs)
    assert "<b>one" not in page
    assert "&lt;b&gt;one" in page
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", page) == []
    assert "<script" not in page
    assert "http" not in page
    assert page.count("<img ") == 3  # one of both, one of each


def test_report_marks_the_better_figure_only_where_one_is() -> None:
    slow, fast = data_of(*handed_off("a", gaps_s=(0.05,)), run="slow"), data_of(*handed_off("b"), run="fast")
    page = render_report([slow, fast])
    (row,) = re.findall(r"<tr><td>ITL p50</td>(.*?)</tr>", page)
    assert re.findall(r"<td( class=best)?>", row) == ["", " class=best"]
    (same,) = re.findall(r"<tr><td>TTFT p50</td>(.*?)</tr>", page)
    assert "best" not in same


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["chart", "RUN", "-o", "x.pdf"], "must be one of .png, .svg"),
        (["chart", "RUN", "-o", "/nonexistent/x.png"], "cannot be written: No such file"),
        (["chart", "nowhere"], "'nowhere' is not the name of a run"),
        (["report", "RUN", "-o", "x.txt"], "must be one of .html, .htm"),
        (["report", "RUN", "RUN"], "named twice"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    run_dir(tmp_path, "RUN", *handed_off("a"))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
