"""``pdconsole bench transport``: real processes on the smallest model, its document and page, and mistakes."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster import iperf3
from cluster.transport_bench_messages import (
    CONDITIONS,
    Case,
    Measured,
    Sample,
    Stepped,
    StepsMeasured,
    TakeSteps,
    TransportBenchResult,
    TransportBenchSpec,
)
from cluster.transport_bench_report import transport_bench_document
from console.bench_transport_text import transport_bench_text
from console.cli import main
from engine.config import EngineConfig
from engine.model_ids import SYNTHETIC_PRESETS

NANO = SYNTHETIC_PRESETS["nano"]
BYTES_PER_TOKEN = NANO.kv_bytes_per_token("float32")
BENCH = ["bench", "transport", "--model", "synthetic:nano", "--dtype", "float32"]
SMALL, LARGE = 200_000, 8_000_000
TOKENS = {size: round(size / BYTES_PER_TOKEN) for size in (SMALL, LARGE)}


class Spread(msgspec.Struct, forbid_unknown_fields=True):
    p10: float
    median: float
    p90: float


class Path_(msgspec.Struct, forbid_unknown_fields=True):
    place: str
    way: str
    bytes: int | None
    asked_bits_per_s: float
    bytes_per_s: Spread
    share_of_asked: float | None
    share_of_iperf3: float | None
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float
    sender_extra_bytes: int | None
    receiver_extra_bytes: int | None
    samples: list[dict[str, Any]]


class Condition(msgspec.Struct, forbid_unknown_fields=True):
    condition: str
    prefill_ms: Spread
    delay: float
    sent_bytes: float
    step_s: list[list[float]]


class Steps(msgspec.Struct, forbid_unknown_fields=True):
    place: str
    asked_bits_per_s: float
    prompt_tokens: int
    conditions: list[Condition]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """The document's fields; a field more or less fails."""

    schema: int
    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, str | int]
    dtype: str
    repeats: int
    congestion_control: str
    paths: list[Path_]
    steps: list[Steps]
    goals: list[dict[str, Any]]
    missing: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """One real run without iperf3: exit code, stdout, stderr, the directory it wrote to."""
    out_dir = tmp_path_factory.mktemp("bench") / "new"
    options = ["--sizes", f"{SMALL}B,{LARGE}B", "--rates", "2gbit", "--repeats", "1"]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONSOLE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(iperf3, "is_installed", lambda: False)
        code = main([*BENCH, *options, "--json", "--out", str(out_dir)])
    return code, out.getvalue(), err.getvalue(), out_dir


@pytest.mark.slow
def test_document_of_a_real_run(ran: tuple[int, str, str, Path]) -> None:
    code, out, _, _ = ran
    assert code == 0
    document = msgspec.json.decode(out, type=Document)
    assert (document.schema, document.benchmark, document.dtype) == (1, "transport", "float32")
    assert document.versions["iperf3"] == ""
    assert "iperf3 is not installed" in document.missing
    places = list(dict.fromkeys(path.place for path in document.paths))
    assert places == ["loopback", "netns"] or any(
        reason.startswith("between namespaces: ") for reason in document.missing
    )
    sizes = {size: TOKENS[size] * BYTES_PER_TOKEN for size in TOKENS}
    for place in places:
        measured = [
            (path.way, path.bytes, path.asked_bits_per_s) for path in document.paths if path.place == place
        ]
        assert measured == [
            *((way, size, 0.0) for size in sizes.values() for way in ("v2", "v2-scattered", "v1", "gloo")),
            ("v2", sizes[LARGE], 2e9),
        ]
    for path in document.paths:
        (sample,) = path.samples
        assert sample["num_bytes"] % path.bytes == 0  # every transfer whole
        assert sample["num_bytes"] >= path.bytes
        assert path.bytes_per_s.median == sample["num_bytes"] / sample["duration_s"]
        assert min(path.sender_cpu_s_per_gb, path.receiver_cpu_s_per_gb) > 0
        assert (path.share_of_asked is None) == (path.asked_bits_per_s == 0)


@pytest.mark.slow
def test_steps_are_measured_in_every_condition(ran: tuple[int, str, str, Path]) -> None:
    document = msgspec.json.decode(ran[1], type=Document)
    assert document.steps
    for steps in document.steps:
        assert [condition.condition for condition in steps.conditions] == list(CONDITIONS)
        alone, streamed, beside = steps.conditions
        assert (alone.sent_bytes, streamed.sent_bytes) == (0, steps.prompt_tokens * BYTES_PER_TOKEN)
        assert beside.sent_bytes >= 0
        chunks = steps.prompt_tokens // 512
        assert {len(taken) for condition in steps.conditions for taken in condition.step_s} == {chunks}


@pytest.mark.slow
def test_files_hold_both_forms(ran: tuple[int, str, str, Path]) -> None:
    _, out, err, out_dir = ran
    assert err.splitlines()[:4] == [
        "loopback: loading", "loopback: warm-up", "loopback: round 1 of 1", "loopback: engine steps",
    ]  # fmt: skip
    assert (out_dir / "transport.json").read_text() == out
    assert (out_dir / "transport.txt").read_text() == transport_bench_text(json.loads(out)) + "\n"


def make_sample(num_bytes: int, duration_s: float, cpu_s: float) -> Sample:
    return Sample(num_bytes, duration_s, cpu_s, 2 * cpu_s, 1_000_000, None)


def make_spec() -> TransportBenchSpec:
    return TransportBenchSpec(
        model="synthetic:nano",
        dtype="float32",
        engine=EngineConfig(),
        bytes_per_token=BYTES_PER_TOKEN,
        sizes=(TOKENS[LARGE],),
        shaped_sizes=(TOKENS[LARGE],),
        rates_bits_per_s=(1e9,),
        repeats=2,
        steps=TakeSteps(2048, TOKENS[LARGE], 2),
        steps_bits_per_s=1e10,
    )


def test_figures_come_from_the_samples() -> None:
    """v2 moves 2 GB/s, then 1; iperf3 1 GB/s in both rounds; a step takes 10 ms alone, 11 or 12 beside."""
    tokens = TOKENS[LARGE]
    measured = [
        Measured(
            Case("loopback", "v2", tokens, 0.0),
            [make_sample(8_000_000, 0.004, 0.0016), make_sample(8_000_000, 0.008, 0.0016)],
        ),
        Measured(
            Case("loopback", "iperf3", 0, 0.0), [make_sample(10**9, 1.0, 0.1), make_sample(10**9, 1.0, 0.1)]
        ),
        Measured(Case("loopback", "v2", tokens, 1e9), [make_sample(8_000_000, 0.08, 0.004)] * 2),
    ]
    stepped = Stepped(
        {"alone": [[0.01]] * 2, "streamed": [[0.01], [0.0102]], "beside": [[0.011], [0.012]]},
        {"alone": [0, 0], "streamed": [5, 5], "beside": [10, 30]},
    )
    result = TransportBenchResult(
        torch_version="2",
        iperf3_version="3.12",
        congestion_control="cubic",
        cores={"sender": (0,), "receiver": (1,)},
        measured=measured,
        steps=[StepsMeasured("loopback", 1e10, stepped)],
        missing=["nccl: no GPU"],
    )
    machine = {"cpu": "Some \x1b CPU", "system": "Linux", "load_average": 0.5}
    document = transport_bench_document(make_spec(), NANO, machine, result)
    v2, other, limited = document["paths"]
    assert v2["bytes_per_s"]["median"] == pytest.approx(1.5e9)
    assert v2["share_of_iperf3"] == pytest.approx(1.5)
    assert (v2["sender_cpu_s_per_gb"], v2["receiver_cpu_s_per_gb"]) == pytest.approx((0.2, 0.4))
    assert (v2["sender_extra_bytes"], v2["receiver_extra_bytes"]) == (1_000_000, None)
    assert (other["bytes"], other["share_of_iperf3"]) == (None, None)
    assert limited["share_of_asked"] == pytest.approx(0.8)
    delays = [condition["delay"] for condition in document["steps"][0]["conditions"]]
    assert delays == pytest.approx([0.0, 0.01, 0.15])
    assert [goal["ok"] for goal in document["goals"]] == [True, False, True, False]
    page = transport_bench_text(document)
    for words in (
        "transport of KV of synthetic:nano in float32, 512 bytes a token: sender on core 0, receiver on core 1",
        "Some ? CPU, Linux, load 0.5 before; congestion control cubic",
        "1.50 (1.10 - 1.90)",
        "150 %",
        "another prompt's KV leaves",
        "15.0 %",
        "v2 reaches 1 Gb/s, 8 MB over loopback",
        "80 %  missed",
        "not measured: nccl: no GPU",
    ):
        assert words in page, words
    assert max(map(len, page.splitlines())) <= 130


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--repeats", "0"], "--repeats is 0; allowed is 1 or more"),
        (["--sizes", "8"], "--sizes: '8' is not a size; allowed: a number with B"),
        (["--sizes", "0MB"], "--sizes has '0MB'; allowed is 1 B or more"),
        (
            ["--sizes", "100TB"],
            "a transfer of 1e+08 MB needs as much memory at either end; allowed here is up to",
        ),
        (["--rates", "fast"], "--rates: 'fast' is not a rate"),
        (["--rates", "1gbit,unlimited"], "--rates has 'unlimited'; a limited link is meant"),
        (["--model", "gpt-9"], "model 'gpt-9' is neither"),
        (["--set", "link.delay_ms=1"], "--set link.delay_ms does not change an engine"),
        (["--out", "/dev/null/bench"], "--out: nothing can be written to /dev/null/bench"),
        (["--core", "1"], "unrecognized arguments: --core 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1
    assert words in err
