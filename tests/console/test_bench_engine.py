"""``pdconsole bench engine``: the real thing on the smallest model, its document and page, mistakes and Ctrl+C."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from cluster import engine_bench
from cluster.engine_bench_report import engine_bench_document
from console import bench_engine
from console.bench_engine_text import engine_bench_text
from console.bench_output import ProgressLine
from console.cli import main
from engine.benchmark_plan import MEASURED_STEPS, BenchmarkSpec
from engine.benchmark_result import BenchmarkResult, DecodeSamples, PrefillSamples
from tests.cluster.test_engine_bench import NANO, make_result, make_spec

QUICK = ["bench", "engine", "--model", "synthetic:nano", "--repeats", "2"]
CASES = ["--prefill", "8,600,9000", "--batch", "1,3", "--context", "20"]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """The document's fields; a field more or less fails."""

    schema: int
    benchmark: str
    machine: "Machine"
    versions: "Versions"
    model: "Model"
    dtype: str
    kernels: str
    repeats: int
    engine: dict[str, int | str | bool]
    limits: "Limits"
    prefill: list["Prefill"]
    decode: list["Decode"]
    where: list["Where"]


class Machine(msgspec.Struct, forbid_unknown_fields=True):
    cpu: str
    flags: list[str]
    cores: int
    cores_of_machine: int
    caches: dict[str, int]
    memory_bytes: int
    system: str
    load_average: float
    core: int


class Versions(msgspec.Struct, forbid_unknown_fields=True):
    pdconsole: str
    python: str
    torch: str
    numba: str | None


class Model(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    architecture: str
    parameters: int
    kv_bytes_per_token: int
    max_model_len: int


class Product(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rows_in_out: tuple[int, int, int]
    flops_per_s: float
    samples: list[float]


class Matmul(msgspec.Struct, forbid_unknown_fields=True):
    flops_per_s: float
    products: list[Product]


class MemoryRead(msgspec.Struct, forbid_unknown_fields=True):
    bytes_per_s: float
    buffer_bytes: int
    samples: list[float]


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    matmul: Matmul
    memory_read: MemoryRead


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    p10: float | None
    median: float | None
    p90: float | None


class Prefill(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: int
    problem: str
    flops: int
    ttft_s: list[float]
    ttft_ms: Summary
    tokens_per_s: Summary
    flops_per_s: float | None
    share_of_limit: float | None
    cpu_share: float | None


class Decode(msgspec.Struct, forbid_unknown_fields=True):
    batch: int
    context: int
    problem: str
    bytes: int
    step_s: list[list[float]]
    step_ms: Summary
    tokens_per_s: Summary
    bytes_per_s: float | None
    share_of_limit: float | None
    cpu_share: float | None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    part: str
    ms: float
    share: float
    work: int | None
    work_per_s: float | None
    share_of_limit: float | None


class Where(msgspec.Struct, forbid_unknown_fields=True):
    total_ms: float
    work_unit: str
    parts: list[Part]
    prefill_tokens: int = 0
    batch: int = 0
    context: int = 0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """One real run: exit code, stdout, stderr, the directory it wrote to."""
    out_dir = tmp_path_factory.mktemp("bench") / "new"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_bench, "cache_bytes", dict)  # a small buffer: the caches' sizes are unknown
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main([*QUICK, *CASES, "--where", "--json", "--out", str(out_dir)])
    return code, out.getvalue(), err.getvalue(), out_dir


def test_document_of_a_real_run(ran: tuple[int, str, str, Path]) -> None:
    code, out, _, _ = ran
    assert code == 0
    document = msgspec.json.decode(out, type=Document)
    assert (document.schema, document.benchmark, document.repeats) == (1, "engine", 2)
    assert document.machine.core in os.sched_getaffinity(0)
    assert document.model == Model(
        "synthetic:nano", "LlamaForCausalLM", NANO.num_parameters, document.model.kv_bytes_per_token, 8192
    )
    assert document.kernels in ("compiled", "torch")
    assert document.dtype in ("float32", "bfloat16")
    assert (document.engine["num_threads"], document.engine["enable_prefix_caching"]) == (1, False)
    assert [len(product.samples) for product in document.limits.matmul.products] == [2] * 5
    assert document.limits.matmul.flops_per_s == max(p.flops_per_s for p in document.limits.matmul.products)
    assert document.limits.memory_read.bytes_per_s == max(document.limits.memory_read.samples)
    assert [(case.prompt_tokens, len(case.ttft_s)) for case in document.prefill] == [
        (8, 2),
        (600, 2),
        (9000, 0),
    ]
    assert document.prefill[2].problem == "needs 9,001 tokens; the model's context is 8,192"
    assert [(case.batch, case.context) for case in document.decode] == [(1, 20), (3, 20)]
    for case in document.decode:
        assert [len(steps) for steps in case.step_s] == [MEASURED_STEPS] * 2


def test_figures_of_a_real_run_agree_with_its_samples(ran: tuple[int, str, str, Path]) -> None:
    document = msgspec.json.decode(ran[1], type=Document)
    for prefill in document.prefill[:2]:
        assert prefill.ttft_ms.median == pytest.approx(sum(prefill.ttft_s) / 2 * 1000)
        assert prefill.flops_per_s is not None
        assert prefill.share_of_limit == pytest.approx(
            prefill.flops_per_s / document.limits.matmul.flops_per_s
        )
        assert prefill.cpu_share is not None
        assert 0.0 < prefill.cpu_share < 1.1
    for decode in document.decode:
        steps = [seconds for repeat in decode.step_s for seconds in repeat]
        assert min(steps) > 0.0
        assert decode.step_ms.p10 is not None
        assert decode.step_ms.median is not None
        assert decode.step_ms.p90 is not None
        assert decode.step_ms.p10 <= decode.step_ms.median <= decode.step_ms.p90


def test_parts_of_a_real_run_are_the_whole(ran: tuple[int, str, str, Path]) -> None:
    where = msgspec.json.decode(ran[1], type=Document).where
    assert [(one.prefill_tokens, one.batch, one.work_unit) for one in where] == [
        (600, 0, "flops"),
        (0, 3, "bytes"),
    ]
    for one in where:
        assert sum(part.ms for part in one.parts) == pytest.approx(one.total_ms)
        assert sum(part.share for part in one.parts) == pytest.approx(1.0)
        worked = {part.part for part in one.parts if part.work}
        assert worked == {"qkv", "out", "gate_up", "down", "head", "attention"}


def test_progress_is_on_stderr_and_files_hold_both_forms(ran: tuple[int, str, str, Path]) -> None:
    _, out, err, out_dir = ran
    assert err.splitlines() == ["loading", "warm-up", "round 1 of 2", "round 2 of 2", "parts"]
    assert sorted(path.name for path in out_dir.iterdir()) == ["engine.json", "engine.txt"]
    assert (out_dir / "engine.json").read_text() == out
    page = (out_dir / "engine.txt").read_text()
    assert page == engine_bench_text(json.loads(out)) + "\n"


def test_page_shows_every_case_and_what_was_not_measured() -> None:
    machine = {"cpu": "Some \x1b CPU", "flags": ["fma"], "caches": {"L3": 2**20}}
    page = engine_bench_text(engine_bench_document(make_spec(), NANO, 1, machine, make_result()))
    lines = page.splitlines()
    assert "engine of synthetic:nano in float32 on core 1" in lines[0]
    assert lines[1] == "Some ? CPU: fma"
    assert "100.0 GFLOP/s in matrix products, 10.0 GB/s from memory" in lines[2]
    for words in (
        "16,000 (6,400 - 28,800)",
        "4.00 (2.40 - 13.6)",
        "9,000  not measured: too long",
        "3.50 (1.50 - 8.00)",
        "where the time goes: prefill of 64 tokens, 4.00 ms with timers",
        "where the time goes: one decode step, batch 4, context 128, 2.00 ms with timers",
        "other processes had it 10 % of the time",
    ):
        assert words in page, words
    assert max(map(len, lines)) <= 130
    starts = {line.index("75 %") for line in lines if "75 %" in line}
    assert len(starts) == 1, "the columns of the parts are not aligned"


def test_page_says_that_more_than_the_memory_gives_came_from_a_cache() -> None:
    result = make_result()
    slow = msgspec.structs.replace(result.limits, memory_bytes_per_s=[1e6])
    machine = {"cpu": "", "flags": [], "caches": {"L2": 2**20, "L3": 2**21}}
    document = engine_bench_document(
        make_spec(), NANO, 1, machine, msgspec.structs.replace(result, limits=slow)
    )
    assert "above 100 %: part of the weights was read from a cache (L3, 2.0 MiB)" in engine_bench_text(
        document
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_is_cleared() -> None:
    stream = Terminal()
    progress = ProgressLine(stream)
    progress.show("round 1 of 2", "prefill", 1, 4)
    progress.show("round 1 of 2", "decode", 2, 4)
    progress.clear()
    assert stream.getvalue() == (
        "\r\x1b[K 25 %  round 1 of 2: prefill\r\x1b[K 50 %  round 1 of 2: decode\r\x1b[K"
    )


def test_nothing_that_fits_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[BenchmarkSpec] = []

    def run(spec: BenchmarkSpec, *_: object) -> BenchmarkResult:
        asked.append(spec)
        prefill = [PrefillSamples(case, "too long") for case in spec.prefill_cases()]
        decode = [DecodeSamples(case, "too many") for case in spec.decode_cases()]
        return msgspec.structs.replace(make_result(), prefill=prefill, decode=decode, where=[])

    monkeypatch.setattr(bench_engine, "run_benchmark", run)
    assert main([*QUICK, *CASES, "--set", "engine.kv_cache=16kB"]) == 1
    assert (asked[0].engine.num_blocks, asked[0].engine.kv_cache_bytes) == (0, 16_000)
    out = capsys.readouterr().out
    assert (out.count("not measured: too long"), out.count("not measured: too many")) == (3, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefill", "128,many"], "--prefill has 'many'; allowed are whole numbers from 1 on"),
        (["--prefill", ""], "--prefill has ''"),
        (["--batch", "0"], "--batch has '0'"),
        (["--context", "1.5"], "--context has '1.5'"),
        (["--repeats", "0"], "--repeats is 0; allowed is 1 or more"),
        (["--repeats", "two"], "argument --repeats: invalid int value: 'two'"),
        (["--core", "9999"], "--core is 9999; allowed: "),
        (["--core", "-1"], "--core is -1; allowed: "),
        (["--dtype", "int4"], "model.dtype is 'int4'; allowed: auto, float32, bfloat16"),
        (["--model", "gpt-9"], "model 'gpt-9' is neither"),
        (["--profile", "10gb"], "did you mean 10gbe?"),
        (["--set", "engine.max_num_seq=4"], "did you mean engine.max_num_seqs?"),
        (["--set", "engine.max_num_batched_tokens=4"], "engine.max_num_batched_tokens is 4"),
        (["--set", "link.delay_ms=1"], "--set link.delay_ms does not change an engine"),
        (["--set", "engine.prefix_caching=true"], "every token is computed here; allowed is false"),
        (["--set", "model.device=cuda"], "model.device is 'cuda'; one core is measured: allowed is cpu"),
        (["--out", "/dev/null/bench"], "--out: nothing can be written to /dev/null/bench"),
        (["--rounds", "3"], "unrecognized arguments: --rounds 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("words", [["bench"], ["bench", "speed"]])
def test_a_benchmark_has_to_be_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "engine" in capsys.readouterr().err


@contextlib.contextmanager
def running(stage: str) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process, int]]:
    """A run that would take minutes, the process that measures for it, and that one's pidfd; at ``stage``."""
    command = [sys.executable, "-m", "console", *QUICK, "--repeats", "100000", "--prefill", "64"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert run.stderr is not None
        while (line := run.stderr.readline()) != f"{stage}\n":
            assert line, f"it ended before {stage}"
        (child,) = psutil.Process(run.pid).children()
        pidfd = os.pidfd_open(child.pid)
        try:
            yield run, child, pidfd
        finally:
            os.close(pidfd)
    finally:
        run.kill()
        run.communicate()


def has_ended(pidfd: int) -> bool:
    """Within ten seconds."""
    return bool(select.select([pidfd], [], [], 10.0)[0])


@pytest.mark.parametrize("stage", ["loading", "warm-up"])
def test_ctrl_c_leaves_no_process(stage: str) -> None:
    with running(stage) as (run, child, pidfd):
        if stage == "warm-up":
            assert child.cpu_affinity() == [max(os.sched_getaffinity(0))]
            assert child.num_threads() == 1
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)
        assert (run.returncode, out) == (130, "")
        assert "Traceback" not in err
        assert has_ended(pidfd)


def test_measuring_ends_with_the_command_however_that_ends() -> None:
    with running("warm-up") as (run, _, pidfd):
        run.kill()
        assert has_ended(pidfd)
