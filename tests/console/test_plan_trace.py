"""``plan --trace``: the page, the document, the chart, and one clear line for whatever a user gets wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from console.cli import main
from engine.dtypes import resolve_dtype

ENGINE: dict[str, Any] = {
    "benchmark": "engine",
    "model": {"id": "tiny"},
    "dtype": resolve_dtype("auto"),
    "prefill": [
        {"prompt_tokens": tokens, "ttft_ms": {"median": 2 + tokens * 0.1}} for tokens in (64, 512, 2048, 8000)
    ],
    "decode": [
        {"batch": batch, "context": context, "step_ms": {"median": 1 + batch * 0.05 + batch * context * 1e-5}}
        for batch in (1, 32)
        for context in (128, 2048)
    ],
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
    rows = [
        f"2023-11-16 18:15:{second:02d}.5,{400 + 100 * (second % 5)},{5 + second % 7}" for second in range(40)
    ]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = [
        {
            "timestamp": 200 * index,
            "input_length": 1024,
            "output_length": 4,
            "hash_ids": [index % 2, 7 + index % 2],
        }
        for index in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def plan(files: Path, *options: str, trace: str = "trace.csv") -> int:
    return main(["plan", "--trace", str(files / trace), "--engine", str(files / "engine.json"), *options])


def test_the_page_shows_every_split_the_chart_and_the_verdict(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, "--nodes", "4", "--speed", "3") == 0
    page = capsys.readouterr().out
    for name in ("1:3", "2:2", "3:1", "4 co-located", "good requests/s by split", "bottleneck at"):
        assert name in page
    assert "3 times as fast" in page
    assert "keep them together if" in page
    assert max(len(line) for line in page.split("\n")[:20] if str(files) not in line) <= 120


def test_the_document_has_what_the_page_has(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--nodes", "3", "--json", "--slo", "ttft=300ms,itl=40ms", "--link", "1gbit") == 0
    document = json.loads(capsys.readouterr().out)
    assert [split["name"] for split in document["splits"]] == ["1:2", "2:1"]
    assert document["slo"] == "ttft=300ms,itl=40ms"
    assert document["link"]["bytes_per_s"] == 125e6
    assert all(split["finished"] == 40 for split in [*document["splits"], document["colocated"]])


def test_without_a_number_of_workers_it_finds_one(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["nodes"] == 2
    assert "are wanted" not in document["verdict"]


def test_prompts_that_begin_alike_are_reused_as_the_trace_says(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, "--nodes", "2", "--json", trace="trace.jsonl") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["worker"]["prefix_caching"] is True
    assert document["splits"][0]["ttft_ms"]["p50"] < 30, "1,024 tokens would take 104 ms"


def test_a_chart_is_drawn(files: Path) -> None:
    for ending in ("png", "svg"):
        chart = files / f"plan.{ending}"
        assert plan(files, "--nodes", "3", "--out", str(chart)) == 0
        assert chart.stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slo", "ttft=soon"], "--slo: 'ttft=soon'; allowed are ttft, itl"),
        (["--nodes", "1"], "--nodes is 1; allowed is 2 to 4096"),
        (["--nodes", "5000"], "--nodes is 5000; allowed is 2 to 4096"),
        (["--speed", "0"], "--speed is 0; allowed is above 0"),
        (["--lengths", "nan"], "--lengths is nan; allowed is above 0"),
        (["--requests", "-3"], "--requests is -3; allowed is above 0"),
        (["--link", "fast"], "--link has 'fast'; allowed:"),
        (["--out", "plan.gif"], "plan.gif: the ending must be one of .png, .svg"),
        (["--out", "/nowhere/plan.svg", "--nodes", "2"], "--out: /nowhere/plan.svg cannot be written"),
        (["--tokens", "100"], "--tokens does not go with --trace"),
        (["--target", "h100-8b"], "--target does not go with --trace"),
        (["--model", "synthetic:nano"], "measured tiny in"),
        (["--profile", "nosuch"], "profile 'nosuch' is unknown"),
        (["--validate", "two"], "--validate is two; allowed is P:D"),
        (["--validate", "1:0"], "--validate is 1:0; allowed is P:D"),
        (["--validate", "1:1,0:2,"], "--validate is ; allowed is P:D"),
        (["--validate", "1:1", "--rounds", "0"], "--rounds is 0; allowed is 1 to 100"),
        (["--rounds", "2"], "--rounds needs --validate"),
        (["--validate", "1:1", "--speed", "0.01"], "--validate: the trace lasts"),
        (["--like", "nosuch"], "--like: "),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert plan(files, *options) in (1, 2)
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no document of bench engine"),
        (json.dumps(ENGINE | {"prefill": []}), "0 prompt lengths are measured"),
        (json.dumps(ENGINE | {"decode": [{}]}), "it is no document of bench engine"),
    ],
)
def test_a_wrong_benchmark_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (files / "engine.json").write_text(content)
    assert plan(files) == 2
    assert said in capsys.readouterr().err


def test_traces_that_cannot_be_read_and_options_without_one(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, trace="nosuch.csv") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["plan", "--nodes", "4"]) == 2
    assert "--nodes needs --trace FILE" in capsys.readouterr().err
