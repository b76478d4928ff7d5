"""runs, plan, export and doctor: commands that need no cluster."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.doctor import MISSING, OK, Check, DoctorReport
from cluster.events import NoteAdded, WorkerExited
from cluster.profile import Profile
from cluster.run_dir import ClockAnchor, RunInfo, RunLock, write_run_info
from cluster.run_log import EVENTS_FILE, write_events
from cluster.summary import write_summary
from console.cli import main
from console.doctor_command import show_report
from console.run_page import flattery
from tests.cluster.histories import handed_off, run_started, run_stopped


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path


def make_run(home: Path, name: str, *, stopped: bool = True) -> Path:
    run_dir = home / "runs" / name
    (run_dir / "logs").mkdir(parents=True)
    crash = WorkerExited(at=9.0, worker_id="decode-0", role="decode", pid=12, signal=9, cause="crash")
    note = NoteAdded(at=9.5, text="evil \x1b[2J note")
    events = [*run_started(), crash, note, *handed_off("a"), *handed_off("b", label="burst")]
    if stopped:
        events += run_stopped(22.0)
    write_events(run_dir / EVENTS_FILE, events)
    if stopped:
        write_summary(run_dir)
    return run_dir


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_no_runs_is_no_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list"]) == 0
    assert "no runs yet" in capsys.readouterr().out
    assert main(["runs", "list", "--json"]) == 0
    assert document(capsys) == {"runs": []}


def test_runs_are_listed_with_what_became_of_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home, "2026-a")
    make_run(home, "2026-b", stopped=False)
    (make_run(home, "2026-c", stopped=False) / EVENTS_FILE).write_text("nonsense\n")
    lock = RunLock.acquire(home / "runs" / "2026-b")
    try:
        assert main(["runs", "list", "--json"]) == 0
        runs = {run["run"]: run for run in document(capsys)["runs"]}
        assert main(["runs", "list"]) == 0
        table = capsys.readouterr().out.splitlines()
    finally:
        lock.release()
    assert runs["2026-a"] | {"path": ""} == {
        "run": "2026-a", "log_of": "2026-a", "started_wall_at": 1.7e9, "profile": "10gbe", "model": "tiny",
        "mode": "disagg", "duration_s": 20.0, "finished": 2, "failed": 0, "alive": False, "problem": "", "path": "",
    }  # fmt: skip
    assert (runs["2026-b"]["alive"], runs["2026-b"]["finished"]) == (True, 2)
    assert "line 1" in runs["2026-c"]["problem"]
    assert [line.split()[-1] for line in table[1:]] == ["ended", "up", "log"]


def test_a_copied_run_is_listed_by_the_directory_that_finds_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = RunInfo(
        run="2026-a", profile=Profile(), versions={}, clock=ClockAnchor(monotonic=0.0, wall=1.7e9), supervisor_pid=1,
        url="", token_path="",
    )  # fmt: skip
    write_run_info(make_run(home, "2026-a"), info)
    shutil.copytree(home / "runs" / "2026-a", home / "runs" / "before-the-fix")
    assert main(["runs", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["2026-a", "before-the-fix"]
    assert [row.split()[-1] for row in rows] == ["ended", "2026-a"]
    assert "ended, a copy of 2026-a" in rows[1]
    assert main(["runs", "list", "--json"]) == 0
    assert [(run["run"], run["log_of"]) for run in document(capsys)["runs"]] == [
        ("2026-a", "2026-a"), ("before-the-fix", "2026-a"),
    ]  # fmt: skip


def damage(log: Path, *numbers: int) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    for number in numbers:
        lines[number - 1] = b'{"garbage": \xff\n'
    log.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "argv",
    [
        ["runs", "show", "2026-a"],
        ["runs", "show", "2026-a", "--json"],
        *(["export", "2026-a", "--format", fmt] for fmt in ("csv", "parquet", "perfetto", "vllm-bench")),
        ["chart", "2026-a", "-o", "chart.svg"],
        ["report", "2026-a", "-o", "report.html"],
    ],
)
def test_damaged_lines_are_passed_over_and_said_once(
    home: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.chdir(home)
    run_dir = make_run(home, "2026-a")
    (run_dir / "summary.json").unlink()
    damage(run_dir / EVENTS_FILE, 4, 8)
    assert main(argv) == 0
    said = capfdbinary.readouterr().err.decode()
    assert said.count("run 2026-a: 2 damaged lines passed over (first: line 4)\n") == 1
    assert main(["runs", "list"]) == 0
    assert capfdbinary.readouterr().out.decode().rstrip().endswith("damaged log")


def test_run_is_shown_on_a_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home, "2026-a")
    assert main(["runs", "show", "latest"]) == 0
    page = capsys.readouterr().out
    for words in (
        "2 finished",
        "TTFT",
        "ITL burst",
        "transfer after prefill's end",
        "rho ",
        "decode-0 EXITED",
    ):
        assert words in page, words
    assert "raw bytes equal to tokens x 512 bytes" in page
    assert "\x1b" not in page
    assert max(map(len, page.splitlines())) <= 130


def test_parts_on_the_page_sum_to_ttft(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home, "2026-a")
    main(["runs", "show", "2026"])
    assert "100.0  together; measured 100.0" in capsys.readouterr().out


def test_run_shown_as_json_is_its_summary(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(home, "2026-a")
    assert main(["runs", "show", "2026-a", "--json"]) == 0
    assert document(capsys) == json.loads((run_dir / "summary.json").read_text()) | {"alive": False}


def test_run_that_crashed_is_summarized_from_its_log(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(home, "2026-a", stopped=False)
    with (run_dir / EVENTS_FILE).open("ab") as log:
        log.write(b'{"type":"note_ad')
    assert main(["runs", "show", "latest"]) == 0
    assert "without a stop" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [["runs", "show", "nope"], ["export", "nope"], ["runs"], ["export", "latest", "--format", "xml"]],
)
def test_mistakes_are_one_line_and_exit_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    make_run(home, "2026-a")
    assert main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_export_to_stdout_and_to_a_file_are_the_same(
    home: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run_dir = make_run(home, "2026-a")
    target = home / "out.csv"
    assert main(["export", "latest", "--format", "csv", "-o", str(target)]) == 0
    assert capsysbinary.readouterr().out == b""
    assert main(["export", "latest", "--format", "csv"]) == 0
    out = capsysbinary.readouterr().out
    assert out == target.read_bytes()
    assert [row["request_id"] for row in csv.DictReader(io.StringIO(out.decode()))] == ["a", "b"]
    assert main(["export", str(run_dir), "--format", "jsonl", "-o", "-"]) == 0
    assert capsysbinary.readouterr().out == (run_dir / EVENTS_FILE).read_bytes()


PLAN = ["plan", "--model", "synthetic:smollm2-135m", "--dtype", "bfloat16"]


def test_plan_with_a_given_rate(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*PLAN, "--tokens", "100,8000", "--link", "1gbe,40gbit", "--prefill-tps", "900", "--json"]) == 0
    )
    plan = document(capsys)
    assert plan["kv_bytes_per_token"] == 23_040
    assert plan["b_star_bytes_per_s"] == 23_040 * 900
    assert [(row["link"], row["tokens"]) for row in plan["rows"]] == [
        ("1gbe", 100), ("1gbe", 8000), ("40gbit", 100), ("40gbit", 8000),
    ]  # fmt: skip
    assert plan["rows"][0]["rho"] == pytest.approx(125e6 / (23_040 * 900))
    assert plan["verdict"].startswith("yes")


def test_plan_says_no_when_it_does_not_pay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--prefill-tps", "1e6", "--link", "1gbe,10gbe"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no: ")


def test_plan_without_a_rate_says_what_is_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    out = capsys.readouterr().out
    assert "give --prefill-tps N" in out
    assert "no verdict" in out
    assert "100gbe" in out


SERVED = {"duration_s": 20.0, "throughput": {"prompt_tokens_per_s": 50.0}}
"""As much as a run must have answered to have measured a prefill rate."""


def write_summary_of(home: Path, name: str, **fields: object) -> None:
    (home / "runs" / name / "logs").mkdir(parents=True)
    (home / "runs" / name / "summary.json").write_text(json.dumps(SERVED | fields))


def test_plan_does_not_take_start_up_probes_for_a_measurement(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(home, "2026-a")  # whose two prompts have 200 tokens
    assert main(["plan", "--model", "tiny"]) == 0
    assert "no run of this model answered 1,000 prompt tokens here" in capsys.readouterr().out


def test_plan_takes_the_rate_of_the_youngest_run_of_the_model_and_dtype(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, model, dtype, rate in (
        ("2026-1", "synthetic:smollm2-135m", "bfloat16", 700.0),
        ("2026-2", "synthetic:smollm2-135m", "bfloat16", 800.0),
        ("2026-3", "synthetic:smollm2-135m", "float32", 300.0),
        ("2026-4", "tiny", "bfloat16", 9000.0),
        ("2026-5", "synthetic:smollm2-135m", "bfloat16", None),
    ):
        (home / "runs" / name / "logs").mkdir(parents=True)
        summary = {"model": model, "dtype": dtype, "prefill_tokens_per_s": rate} | SERVED
        (home / "runs" / name / "summary.json").write_text(json.dumps(summary))
    idle = {"prefill_tokens_per_s": 101.0, "duration_s": 20.0}
    for name, throughput in (("2026-6", {}), ("2026-7", {"prompt_tokens_per_s": 49.9})):
        write_summary_of(
            home, name, model="synthetic:smollm2-135m", dtype="bfloat16", throughput=throughput, **idle
        )
    assert main([*PLAN, "--json"]) == 0
    plan = document(capsys)
    assert (plan["prefill_tokens_per_s"], plan["prefill_rate_from"]) == (800.0, "measured in run 2026-2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "100,many"], "--tokens has 'many'"),
        (["--tokens", "0"], "--tokens has '0'"),
        (["--link", "1gbe,2gbe"], "--link has '2gbe'; allowed: 100gbe"),
        (["--link", "loopback"], "unlimited link"),
        (["--prefill-tps", "-3"], "--prefill-tps is -3"),
        (["--prefill-tps", "nan"], "--prefill-tps is nan"),
        (["--dtype", "int4"], "dtype is 'int4'"),
        (["--model", "gpt-9"], "gpt-9"),
    ],
)
def test_plan_refuses_what_it_cannot_read(
    home: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main([*PLAN, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_plan_for_a_target_is_of_its_published_figures(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--target", "h800x8-8b", "--tokens", "100,8192", "--json"]) == 0
    plan = document(capsys)
    assert (plan["target"], plan["model"], plan["gpus"]) == ("h800x8-8b", "Qwen3-8B", 8)
    assert (plan["kv_bytes_per_token"], plan["prefill_rate"]) == (147_456, "published")
    assert plan["b_star_bytes_per_s"] == pytest.approx(5.94e9, rel=1e-3)
    assert plan["source"]["year"] == 2025
    assert [link["name"] for link in plan["links"]] == ["10gbe", "25gbe", "100gbe", "ib-400g", "8x200g"]
    ten, hundred = plan["links"][0], plan["links"][2]
    assert ten["rho"] == pytest.approx(0.2103, abs=1e-4)
    assert (ten["break_even_tokens"], ten["rho_here"], plan["here"]) == (None, None, None)
    assert [row["transfer_pays"] for row in plan["rows"] if row["link"] == "10gbe"] == [False, False]
    assert [row["transfer_pays"] for row in plan["rows"] if row["link"] == "100gbe"] == [False, True]
    assert 100 < hundred["break_even_tokens"] < 200
    assert plan["verdict"].startswith(
        "disaggregation is the wrong choice on 10gbe (rho 0.21), 25gbe (rho 0.526), "
    )


def test_plan_for_a_target_says_where_this_machine_stands(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--target", "a100-7b@10gbe"]) == 0
    out = capsys.readouterr().out
    assert "no run was measured here" in out
    assert out.splitlines()[-1] == (
        "disaggregation is the wrong choice on 10gbe (rho 0.65), where computing KV again is faster than moving it at "
        "any prompt length"
    )
    write_summary_of(home, "2026-1", model="tiny", b_star_bytes_per_s=1.25e9 / 40)
    write_summary_of(home, "2026-2", model="tiny", b_star_bytes_per_s=None)
    assert main(["plan", "--target", "a100-7b@10gbe"]) == 0
    assert (
        "this machine (tiny, run 2026-1) has rho 40 on 10gbe, the target 0.65: a run without --target a100-7b@10gbe "
        "flatters disaggregation\n"
    ) in capsys.readouterr().out
    assert main(["plan", "--target", "a100-7b", "--link", "10gbe,40gbit", "--json"]) == 0
    plan = document(capsys)
    assert plan["here"] == {
        "run": "2026-1", "model": "tiny", "b_star_bytes_per_s": 1.25e9 / 40, "flatters": True,
    }  # fmt: skip
    assert [link["rho_here"] for link in plan["links"]] == [40.0, 160.0]


def test_a_machine_faster_than_the_target_does_not_flatter(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary_of(home, "2026-1", model="fast \x1b", b_star_bytes_per_s=2e9)
    assert main(["plan", "--target", "a100-7b@10gbe"]) == 0
    out = capsys.readouterr().out
    assert "has rho 0.625 on 10gbe, the target 0.65\n" in out
    assert "flatters" not in out
    assert "\x1b" not in out


def test_targets_and_their_links_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-targets"]) == 0
    table = capsys.readouterr().out
    assert main(["plan", "--list-targets", "--json"]) == 0
    listed = document(capsys)
    names = [row["target"] for row in listed["targets"]] + [row["name"] for row in listed["links"]]
    assert {"a100-7b", "h100x8-70b", "nvlink4", "10gbe"} <= set(names)
    assert [line.split()[0] for line in table.splitlines() if line and line.split()[0] in names] == names
    assert {row["target"] for row in listed["targets"] if row["prefill_rate"] == "derived"} == {"h100-8b"}
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "a100-8b"], "--target: 'a100-8b' is not a target; allowed: a100-7b, "),
        (["--target", "a100-7b@10gb"], "on no known link; allowed: 10gbe, "),
        (["--target", "a100-7b@10gb"], "did you mean 10gbe?"),
        (["--target", "a100-7b", "--link", "10gbe,fast"], "--link has 'fast'"),
        (
            ["--target", "a100-7b@10gbe", "--link", "25gbe"],
            "--link 25gbe is given beside --target a100-7b@10gbe",
        ),
        (
            ["--target", "a100-7b", "--model", "tiny"],
            "--model is given beside --target a100-7b, which says it",
        ),
        (["--target", "a100-7b", "--prefill-tps", "9"], "--prefill-tps is given beside --target"),
        (["--target", "a100-7b", "--dtype", "float32"], "--dtype is given beside --target"),
        (["--target", "a100-7b", "--tokens", "0"], "--tokens has '0'"),
    ],
)
def test_plan_for_a_target_refuses_what_it_cannot_read(
    home: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_plan_knows_the_links_of_targets_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--prefill-tps", "900", "--link", "nvlink4", "--json"]) == 0
    assert document(capsys)["rows"][0]["link_bits_per_s"] == 3.6e12


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rho": 30.0}, "GPUs on a link of this rate have rho 0.21 to 0.7: this run flatters disaggregation "),
        ({"rho": 0.8}, ""),
        ({"rho": 0.7, "target": "x@10gbe", "target_rho": 0.65, "rho_at_start": 0.66},
         "target x@10gbe: rho 0.65; this link at start 0.66"),
        ({"rho": 0.9, "target": "", "target_rho": 0.4, "rho_at_start": 0.6},
         "asked: rho 0.4; this link at start 0.6; this run flatters disaggregation"),
        ({"rho": 30.0, "link": {"asked_bits_per_s": 0.0}}, ""),
    ],
)  # fmt: skip
def test_a_run_says_when_it_flatters(fields: dict[str, Any], expected: str) -> None:
    text = flattery({"link": {"asked_bits_per_s": 1e10}, **fields})
    assert text == expected or (text.startswith(expected) and "--target NAME" in text and expected)


def test_doctor_exit_code_says_whether_a_cluster_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    fine = DoctorReport((Check("cores", OK, "2"),))
    broken = DoctorReport((Check("torch", MISSING, "cannot be imported", "no module \x1b"),))
    assert show_report(fine, as_json=False) == 0
    assert "a cluster can run here" in capsys.readouterr().out
    assert show_report(broken, as_json=False) == 3
    text = capsys.readouterr().out
    assert "missing: torch" in text
    assert "\x1b" not in text
    assert show_report(broken, as_json=True) == 3
    assert document(capsys)["missing"] == ["torch"]


def test_offline_commands_leave_torch_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    had_torch = "torch" in sys.modules
    make_run(home, "2026-a")
    for line in (["runs", "list"], ["runs", "show", "latest"], [*PLAN]):
        assert main(line) == 0
    assert ("torch" in sys.modules) is had_torch
