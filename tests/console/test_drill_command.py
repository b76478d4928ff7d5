"""The drill command where it needs no cluster: the list, mistakes, and how a verdict reads."""

import json
from pathlib import Path

import pytest

from cluster.drill_file import builtin_drills, drill_from_tree
from cluster.drill_judge import judge
from console.cli import main
from console.drill_text import verdict_text
from tests.cluster.drill_histories import kept


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path


def test_every_drill_is_listed_with_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in builtin_drills())
    assert main(["drill", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(builtin_drills())
    assert all(row["title"] and row["promise"] for row in rows)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "which drill? allowed: burst, "),
        (["kil-decode"], "drill 'kil-decode' is unknown; allowed: burst, "),
        (["kil-decode"], "did you mean kill-decode?"),
        (["none.toml"], "drill none.toml: cannot be read: No such file or directory"),
        (["soak", "--faults", "0"], "--faults: 0 faults; allowed is 1 to 100000"),
        (["soak", "--faults", "x"], "argument --faults: invalid int value: 'x'"),
        (["burst", "--seed", "3"], "--faults and --seed go with drill soak, not with burst"),
        (["flap", "--prefill", "0"], "cluster.prefill is 0; mode disagg needs 1 or more"),
        (
            ["rolling-restart", "--decode", "1"],
            "faults[3].target is 'decode-1'; allowed: prefill-0, prefill-1, ",
        ),
        (["burst", "--model", "tinny"], "--model: "),
        (["burst", "--set", "engine.max_num_seq=4"], "did you mean engine.max_num_seqs?"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(
    argv: list[str], expected: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert not (home / "runs").exists()


def test_a_run_directory_that_is_in_use_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "something").touch()
    assert main(["drill", "burst", "--run-dir", str(home)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_failed_expectation_is_followed_by_what_to_look_at() -> None:
    drill = drill_from_tree(
        {"title": "t", "promise": "p", "requests": {"chat": {"count": 2}}, "expect": {"finished": "all"}},
        "d",
        "d",
    )
    told = kept(drill)
    told.of()[1].fail("http_500")
    lines = verdict_text(drill, judge(told.story()), "a-run", "/runs/a-run").splitlines()
    assert lines[:3] == [
        "drill d: FAIL",
        "1/2 finished, 1 failed (http_500 1), 0 tokens differ, 0 blocks stranded, 0 orphans",
        "run a-run in /runs/a-run",
    ]
    failed = next(number for number, line in enumerate(lines) if line.startswith("FAIL"))
    assert lines[failed] == "FAIL  finished            1/2 finished (expected all)"
    assert lines[failed + 1] == (
        "        look at request r-disturbed-chat-1 (disturbed/chat/1): client: http_500; "
        "log: failed (broken), attempt 1, prefill-0 -> decode-0"
    )
    assert lines[failed + 2].startswith("ok    faults ")
