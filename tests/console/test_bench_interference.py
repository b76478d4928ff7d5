"""``pdconsole bench interference``: page and chart from a fixed document; mistakes. The real thing is in e2e."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cluster.interference_bench import ClientFigures, InterferenceResult, InterferenceSpec, Round, make_arms
from cluster.interference_bench_fold import PhaseFigures
from cluster.interference_bench_report import interference_document
from cluster.profile import Profile
from cluster.slo import parse_slos
from console.bench_interference_chart import save_interference_charts
from console.bench_interference_text import interference_text
from console.cli import main
from engine.model_ids import SYNTHETIC_PRESETS

MACHINE = {"cpu": "Some \x1b CPU", "flags": ["fma"], "cores": 2, "load_average": 0.5, "system": "Linux 6"}
ARMS = make_arms(Profile(), [512, 128], ["always", "auto"])
GAPS_MS = (400.0, 60.0, 30.0, 4.0, 5.0)


def make_document(lag_ms: float = 1.0) -> dict[str, Any]:
    """Two rounds; the second is a tenth slower in everything."""
    result = InterferenceResult()
    for repeat, slower in enumerate((1.0, 1.1)):
        for arm, gap_ms in zip(ARMS, GAPS_MS, strict=True):
            alone = PhaseFigures(
                10.0, itl_ms=[2.0 * slower] * 5, ttft_ms=[20.0], stream_tokens=9000, tokens=9900
            )
            bursts = PhaseFigures(
                10.0,
                burst_seconds=5.0,
                bursts=4,
                itl_ms=[2.0] * 5,
                burst_itl_ms=[gap_ms * slower] * 5,
                burst_ttft_ms=[40.0 * slower],
                prompt_ttft_ms=[1300.0 * slower if arm.is_disagg else 700.0],
                unanswered=3,
                burst_stream_tokens=1000,
                tokens=20_000,
                kv_wire_bytes=40_000_000 if arm.is_disagg else 0,
                cpu={"prefill-0": 0.9, "decode-0": 0.8, "router": 0.1},
            )
            bursts.finished["steady"], bursts.good["steady"] = 40, 30
            bursts.failed["too \x1b bad"] = repeat
            client = ClientFigures(lag_p99_ms=lag_ms, lag_max_ms=9.0, burst_lag_ms=0.5, cpu=0.2)
            result.rounds.append(Round(arm.name, repeat, f"run-{repeat}", alone, bursts, client, client))
    spec = InterferenceSpec(ARMS, 10.0, 2, parse_slos("ttft=2s,itl=50ms"))
    return interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "bfloat16", MACHINE, result)


def test_the_page_says_gain_and_cost_of_every_arm() -> None:
    page = interference_text(make_document())
    unwrapped = " ".join(page.split())
    for words in (
        "long prompts beside running streams: tiny in bfloat16, 1 prefill + 1 decode workers on 2 cores",
        "4 streams of 64 + 200 tokens; bursts of 2 x 8,000 + 16 tokens every 2 s, none while one is unanswered",
        "Some ? CPU: fma; 2 cores, load 0.5 at start",
        "2 rounds of every arm in turns",
        "(ttft=2s,itl=50ms)",
        "co-located whole prompts",
        "400.0 - 440.0",
        "3.00 (75 %)",
        "decode-0 0.80, prefill-0 0.90, router 0.10",
        "2 of 2",
        "disaggregated WINS: streams' ITL in bursts p99 4.2 ms, longest 4.2 ms; p99 100x better than 420 ms,",
        "TTFT of burst prompts 1.36 s (1.9x worse than 700 ms of co-located 128 a step)",
    ):
        assert words in page or words in unwrapped, words
    assert "\x1b" not in page
    assert "INVALID" not in page
    assert max(map(len, page.splitlines())) <= 250


def test_columns_stand_under_their_heads() -> None:
    lines = interference_text(make_document()).splitlines()
    for title, last in (("STREAMS", "tok/s"), ("PROMPTS", "none"), ("LOAD GENERATOR", "valid")):
        at = next(number for number, line in enumerate(lines) if line.startswith(title))
        assert lines[at + 1].endswith(last)
        assert {len(line) for line in lines[at + 1 : at + 2 + len(ARMS)]} == {len(lines[at + 1])}, title


def test_invalid_rounds_are_named_and_marked() -> None:
    page = interference_text(make_document(lag_ms=60.0))
    assert "co-located whole prompts !" in page
    assert "0 of 2" in page
    assert (
        "INVALID: disaggregated, round 1 (run run-0): the load generator was 60 ms late; the limit is 50 ms"
        in page
    )


def test_the_chart_is_saved_as_png_and_as_svg_with_its_words_as_text(tmp_path: Path) -> None:
    document = make_document()
    save_interference_charts(document, tmp_path)
    assert (tmp_path / "interference.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "interference.svg").read_text(encoding="utf-8")
    words = " ".join(text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip())
    for expected in (
        "4 streams beside bursts of 2 x 8,000 tokens: tiny in bfloat16, 2 cores",
        "streams alone: gaps between tokens",
        "in bursts",
        "TTFT of burst prompts, p50",
        *(arm.name for arm in ARMS),
    ):
        assert expected in words, expected
    other = tmp_path / "again"
    other.mkdir()
    save_interference_charts(document, other)
    assert (other / "interference.svg").read_text(encoding="utf-8") == svg, "the same data, the same file"


def test_a_chart_of_arms_without_a_gap_in_a_burst_is_drawn_all_the_same(tmp_path: Path) -> None:
    document = make_document()
    for arm in document["arms"]:
        arm["curves"]["in_burst"] = []
        arm["summary"]["bursts"]["prompt_ttft_ms"]["p50"] = None
    save_interference_charts(document, tmp_path)
    assert (tmp_path / "interference.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "1"], "--seconds is 1; the first burst comes after 1 s: allowed is more than that"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--repeats", "0"], "--repeats is 0; allowed is 1 or more"),
        (["--streams", "0"], "--streams is 0; allowed is 1 or more"),
        (["--burst-tokens", "-5"], "--burst-tokens is -5; allowed is 1 or more"),
        (
            ["--burst-tokens", "8190"],
            "--burst-tokens (burst.prompt_tokens) is 8,190 with 16 tokens of output",
        ),
        (["--burst-tokens", "8190"], "the context of synthetic:nano is 8,192 tokens: allowed is up to 8,176"),
        (
            ["--set", "load.mixed.prompt_tokens=9000"],
            "load.mixed.prompt_tokens is 9,000 with 200 tokens of output",
        ),
        (["--budgets", "16"], "--budgets has '16'; a step takes every running request"),
        (["--budgets", "512,8000"], "allowed are whole numbers from 32 to 7,999"),
        (["--budgets", "512,,128"], "--budgets has ''"),
        (["--handoffs", "never"], "--handoffs has 'never'; allowed: always, auto"),
        (["--slo", "ttft=2"], "--slo has 'ttft=2'; allowed are ttft, itl, tpot, e2el, each as in ttft=2s"),
        (["--set", "load.mixed.streams=0"], "load.mixed has streams 0"),
        (["--set", "cluster.prefill=0"], "cluster.prefill is 0; mode disagg needs 1 or more"),
        (["--set", "cluster.mode=disagg"], "--set cluster.mode is given; the benchmark decides that itself"),
        (["--set", "engine.prefix_caching=true"], "--set engine.prefix_caching is given"),
        (["--streams", "1000000"], "load.mixed.streams is 1,000,000; allowed is up to 256"),
        (["--set", "burst.prompts=257"], "burst.prompts is 257; allowed is up to 256"),
        (["--set", "burst.prompt=1"], "did you mean burst.prompts?"),
        (["--model", "gpt-9"], "model 'gpt-9' is neither"),
        (["--profile", "1gb"], "profile '1gb' is unknown"),
        (["--out", "/dev/null/bench"], "--out: nothing can be written to /dev/null/bench"),
        (["--codec", "raw"], "unrecognized arguments: --codec raw"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "interference", "--model", "synthetic:nano", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1
    assert words in err
