"""``pdconsole bench codec``: the real thing on the smallest model, its document and page, and mistakes."""

import io
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.codec_bench import CodecBenchResult, CodecBenchSpec, CodecSamples, LayerError
from cluster.codec_bench_report import codec_bench_document
from console.bench_codec_text import codec_bench_text
from console.cli import main
from engine.config import EngineConfig
from engine.model_ids import SYNTHETIC_PRESETS

NANO = SYNTHETIC_PRESETS["nano"]
QUICK = [
    *(
        "bench",
        "codec",
        "--model",
        "synthetic:nano",
        "--dtype",
        "bfloat16",
        "--tokens",
        "300",
        "--repeats",
        "2",
    ),
    *("--prompts", "2", "--prompt-tokens", "40", "--output-tokens", "6"),
]


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    p10: float
    median: float
    p90: float


class Error(msgspec.Struct, forbid_unknown_fields=True):
    mean: float
    max: float
    rms: float


class Layer(msgspec.Struct, forbid_unknown_fields=True):
    layer: int
    keys: Error
    values: Error


class Codec(msgspec.Struct, forbid_unknown_fields=True):
    codec: str
    wire_bytes: int
    ratio: float
    encode_bytes_per_s: Summary
    decode_bytes_per_s: Summary
    encode_s: list[float]
    decode_s: list[float]
    cpu_share: float
    error: list[Layer]
    agreement: float
    identical: int
    earliest_divergence: int | None
    median_divergence: float | None
    first_divergence: list[int | None]
    agreeing: list[int]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """The document's fields; a field more or less fails."""

    schema: int
    benchmark: str
    machine: dict[str, object]
    versions: dict[str, str]
    model: dict[str, str | int]
    dtype: str
    repeats: int
    kv: dict[str, int]
    outputs: dict[str, int]
    codecs: list[Codec]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """One real run: exit code, stdout, stderr, the directory it wrote to."""
    out_dir = tmp_path_factory.mktemp("bench") / "new"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONSOLE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main([*QUICK, "--json", "--out", str(out_dir)])
    return code, out.getvalue(), err.getvalue(), out_dir


def test_document_of_a_real_run(ran: tuple[int, str, str, Path]) -> None:
    code, out, _, _ = ran
    assert code == 0
    document = msgspec.json.decode(out, type=Document)
    assert (document.schema, document.benchmark, document.dtype) == (1, "codec", "bfloat16")
    assert document.machine["core"] in os.sched_getaffinity(0)
    assert sorted(document.versions) == ["numba", "pdconsole", "python", "torch", "zstandard"]
    bytes_per_token = NANO.kv_bytes_per_token("bfloat16")
    assert document.model["kv_bytes_per_token"] == bytes_per_token
    assert document.kv["raw_bytes"] == 300 * bytes_per_token
    assert document.outputs == {"prompts": 2, "prompt_tokens": 40, "output_tokens": 6}
    assert [codec.codec for codec in document.codecs] == ["raw", "int8", "lossless"]
    for codec in document.codecs:
        assert (len(codec.encode_s), len(codec.decode_s)) == (2, 2)
        assert codec.ratio == codec.wire_bytes / document.kv["raw_bytes"]
        assert codec.encode_bytes_per_s.median > 0
        assert [layer.layer for layer in codec.error] == list(range(NANO.num_layers))
        assert len(codec.first_divergence) == len(codec.agreeing) == 2
        assert codec.cpu_share > 0


def test_exact_codecs_change_nothing_and_int8_a_little(ran: tuple[int, str, str, Path]) -> None:
    raw, int8, lossless = msgspec.json.decode(ran[1], type=Document).codecs
    assert raw.ratio == 1.0
    assert int8.ratio == pytest.approx((NANO.head_dim + 2) / (2 * NANO.head_dim))
    assert 0.5 < lossless.ratio < 0.85
    for exact in (raw, lossless):
        assert (exact.agreement, exact.identical, exact.earliest_divergence) == (1.0, 2, None)
        assert {error.max for layer in exact.error for error in (layer.keys, layer.values)} == {0.0}
    for layer in int8.error:
        for error in (layer.keys, layer.values):
            assert 0 < error.mean < error.max < error.rms / 10


def test_progress_is_on_stderr_and_files_hold_both_forms(ran: tuple[int, str, str, Path]) -> None:
    _, out, err, out_dir = ran
    assert err.splitlines() == ["loading", "warm-up", "round 1 of 2", "round 2 of 2", "outputs"]
    assert sorted(path.name for path in out_dir.iterdir()) == ["codec.json", "codec.txt"]
    assert (out_dir / "codec.json").read_text() == out
    assert (out_dir / "codec.txt").read_text() == codec_bench_text(json.loads(out)) + "\n"


def test_figures_come_from_the_samples() -> None:
    """8 MB in 2 ms and 4 ms each way; of 2 x 4 tokens after the first, 4 + 1 agree."""
    error = LayerError(0.25, 0.5, 2.0)
    samples = CodecSamples(
        "int8", 4_000_000, (0.002, 0.004), (0.001, 0.001), 0.5, (error,), (error,), (4, 1), (None, 2)
    )
    spec = CodecBenchSpec(
        "synthetic:nano", "bfloat16", EngineConfig(), (1,) * 100, ((1, 2), (3, 4)), output_tokens=5, repeats=2
    )
    result = CodecBenchResult("bfloat16", 8_000_000, 1_000_000, "2", [samples])
    machine = {"cpu": "Some \x1b CPU", "flags": ["fma"], "caches": {}}
    document = codec_bench_document(spec, NANO, 1, machine, result)
    (codec,) = document["codecs"]
    assert codec["encode_bytes_per_s"]["median"] == pytest.approx(3e9)
    assert codec["decode_bytes_per_s"]["median"] == pytest.approx(8e9)
    assert (codec["ratio"], codec["agreement"], codec["identical"]) == (0.5, 5 / 8, 1)
    assert (codec["earliest_divergence"], codec["median_divergence"]) == (2, 2.0)
    page = codec_bench_text(document)
    for words in (
        "codecs on KV of synthetic:nano in bfloat16 on core 1",
        "Some ? CPU: fma",
        "100 tokens, 8.0 MB in frames of up to 1.00 MB; 2 repeats",
        "3.00 (2.20 - 3.80)",
        "62.5 %",
        "1 of    2",
        "token 2, token 2",
        "error of int8 by layer",
        "other processes had it 50 % of the time",
    ):
        assert words in page, words
    assert max(map(len, page.splitlines())) <= 130


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens is 0; allowed is 1 or more"),
        (["--prompts", "0"], "--prompts is 0; allowed is 1 or more"),
        (["--output-tokens", "1"], "--output-tokens is 1; allowed is 2 or more"),
        (["--repeats", "0"], "--repeats is 0; allowed is 1 or more"),
        (["--tokens", "9000"], "a prompt and its output are 9,001 tokens; the model's context is 8,192"),
        (["--prompt-tokens", "8190"], "a prompt and its output are 8,196 tokens"),
        (["--core", "9999"], "--core is 9999; allowed: "),
        (["--model", "gpt-9"], "model 'gpt-9' is neither"),
        (["--set", "link.delay_ms=1"], "--set link.delay_ms does not change an engine"),
        (["--out", "/dev/null/bench"], "--out: nothing can be written to /dev/null/bench"),
        (["--codec", "int8"], "unrecognized arguments: --codec int8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1
    assert words in err
