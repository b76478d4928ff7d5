"""The completion scripts, run by the shells that they are for."""

import shutil
import subprocess
from pathlib import Path

import pytest

from console.cli import COMMANDS, main
from console.completion_spec import RUNS, command_specs

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def script(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Path:
    """The script of the shell that the test is for; two runs lie in the runs' directory."""
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    for run in ("2026-03-01T10-00-00-aaaa", "2026-03-02T10-00-00-bbbb"):
        (tmp_path / "home" / "runs" / run).mkdir(parents=True)
    assert main(["completion", shell]) == 0
    file = tmp_path / f"pdconsole.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


def bash(script: Path, *words: str) -> set[str]:
    asked = " ".join(f"'{word}'" for word in ("pdconsole", *words))
    program = (
        f"compopt() {{ :; }}; source {script}; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; _pdconsole; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert ran.stderr == ""
    return set(ran.stdout.split())


def fish(script: Path, *words: str) -> set[str]:
    line = " ".join(("pdconsole", *words))
    ran = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"],
        capture_output=True, text=True, check=True, timeout=30,
        env={"HOME": str(script.parent), "PATH": "/usr/bin:/bin", "PDCONSOLE_HOME": str(script.parent / "home")},
    )  # fmt: skip
    return {row.split("\t")[0] for row in ran.stdout.splitlines()}


CASES = [
    ((""), {command.name for command in COMMANDS}),
    (("repl",), {"replay"}),
    (("up", "--mode", ""), {"disagg", "colocated"}),
    (("up", "--profile", "1"), {"100gbe", "100mbe", "10gbe", "1gbe"}),
    (("up", "--link-b",), {"--link-backend"}),
    (("runs", ""), {"list", "show"}),
    (("runs", "show", "2026-03-01"), {"2026-03-01T10-00-00-aaaa"}),
    (("replay", "--with", "2026-03-02"), {"2026-03-02T10-00-00-bbbb"}),
    (("runs", "show", "--js"), {"--json"}),
    (("completion", ""), set(SHELLS)),
]  # fmt: skip


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes(script: Path, words: tuple[str, ...], expected: set[str]) -> None:
    found = bash(script, *(words or ("",)))
    assert expected <= found
    assert found - expected <= {"--help", "--version"}


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_fish_completes(script: Path, words: tuple[str, ...], expected: set[str]) -> None:
    assert fish(script, *(words or ("",))) == expected


@pytest.mark.parametrize("script", SHELLS, indirect=True)
def test_the_script_is_one_of_its_shell(script: Path) -> None:
    shell = script.suffix[1:]
    ran = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_every_command_and_option_is_known() -> None:
    specs = {spec.path: spec for spec in command_specs()}
    assert {path[0] for path in specs} == {command.name for command in COMMANDS}
    assert ("runs", "show") in specs
    assert specs["replay",].place.more == RUNS
    options = {name: option for option in specs["up",].options for name in option.names}
    assert {"--profile", "--headless", "--help", "-h", "--detach"} <= set(options)
    assert options["--headless"].value is None
    assert all(option.help for option in options.values())


@pytest.mark.parametrize("argv", [["completion"], ["completion", "tcsh"]])
def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "SHELL" in told
