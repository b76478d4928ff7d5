"""The command line itself: what each kind of mistake prints and which exit code it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.run_dir import make_run_dir
from console.cli import COMMANDS, main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, exit_code: int = 2) -> str:
    """The one line on stderr that a wrong command line gives, and nothing on stdout."""
    assert main(list(argv)) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdconsole: error: ")
    assert err.count("\n") == 1, err
    return err


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in COMMANDS:
        assert f"\n  {command.name} " in out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert "pdconsole 0." in capsys.readouterr().out


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_a_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: pdconsole {command}")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["upp"], "command 'upp' is unknown; allowed: up, "),
        (["upp"], "did you mean up?"),
        (["--port", "1"], "unrecognized arguments: --port 1"),
        (["up", "--profile", "10gb"], "did you mean 10gbe?"),
        (["up", "--set", "engine.max_num_seq=4"], "did you mean engine.max_num_seqs?"),
        (["up", "--set", "nonsense"], "allowed is key=value"),
        (["up", "--mode", "both"], "cluster.mode is 'both'; allowed: disagg, colocated"),
        (["up", "--codec", "zip"], "kv.codec is 'zip'; allowed: raw, int8, lossless, auto"),
        (["up", "--handoff", "maybe"], "cluster.handoff is 'maybe'; allowed: always, auto, never"),
        (["up", "--fallback", "no"], "cluster.fallback is 'no'; allowed: on, off"),
        (["up", "--link-backend", "ebpf"], "link.backend is 'ebpf'; allowed: auto, netns, pacing, none"),
        (["up", "--target", "h100-7"], "link.target: 'h100-7' is not a target; allowed: a100-7b, "),
        (["up", "--target", "h100-7b@10gb"], "did you mean 10gbe?"),
        (
            ["up", "--target", "h100-7b", "--profile", "loopback"],
            "h100-7b' names no link and link.bandwidth is unlimited",
        ),
        (
            ["up", "--target", "h100-7b@10gbe", "--link-backend", "none"],
            "link.backend is 'none' and link.target is set",
        ),
        (["up", "--port", "70000"], "router.port is 70000; allowed is 0 (any free) to 65535"),
        (["up", "--prefill", "two"], "argument --prefill: invalid int value: 'two'"),
        (["up", "--prefill", "0"], "cluster.prefill is 0; mode disagg needs 1 or more"),
        (["up", "--load", "stedy"], "--load 'stedy' is unknown; allowed: none, steady"),
        (["up", "--duration", "0"], "'0' is not allowed; allowed is a number of seconds above 0"),
        (
            ["up", "--duration", "abc"],
            "argument --duration: 'abc' is not allowed; allowed is a number of seconds",
        ),
        (["load", "steady", "--url", "foo"], "--url is 'foo'; allowed is a URL like http://127.0.0.1:8765"),
        (["load", "steady", "--url", ""], "--url is ''; allowed is a URL like"),
        (["load", "steady", "--url", "localhost:8765"], "--url is 'localhost:8765'; allowed is a URL like"),
        (["load", "steady", "--url", "http://h:x"], "--url is 'http://h:x'; allowed is a URL like"),
        (["load", "steady", "--url", "http://[::1"], "--url is 'http://[::1'; allowed is a URL like"),
        (["up", "--head"], "unrecognized arguments: --head"),
        (["load", "stedy", "--url", "http://127.0.0.1:1"], "load 'stedy' is unknown; allowed: steady, "),
        (
            ["load", "burst", "--rate", "3", "--url", "http://127.0.0.1:1"],
            "--rate 3 does not go with load burst",
        ),
        (
            ["load", "steady", "--rate", "-3", "--url", "http://127.0.0.1:1"],
            "--rate is -3; allowed is above 0",
        ),
        (["load", "steady", "--run", "latest"], "no runs in"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in complaint(capsys, *argv)


def test_a_misspelt_key_in_a_profile_file_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[link]\nbandwith = "1gbit"\n')
    line = complaint(capsys, "up", "--profile", str(file))
    assert f"{file}: unknown key link.bandwith; did you mean link.bandwidth?" in line


def test_no_mistake_leaves_a_run_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaint(capsys, "up", "--profile", "nope")
    complaint(capsys, "up", "--load", "nope")
    assert list(home.iterdir()) == []


def test_a_run_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "mine"
    make_run_dir(directory)
    assert f"run directory {directory} is not empty" in complaint(capsys, "up", "--run-dir", str(directory))


def test_load_without_a_cluster_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no cluster of this data directory is up" in complaint(capsys, "load", "steady", exit_code=3)
    nobody = complaint(capsys, "load", "steady", "--url", "http://127.0.0.1:1", exit_code=3)
    assert "no router answers at http://127.0.0.1:1: Connection refused" in nobody


def test_a_reader_that_leaves_is_no_error() -> None:
    """``pdconsole --help | head -1``: no traceback, no "Exception ignored"."""
    command = f"{sys.executable} -m console --help | true"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert ran.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["drill --list", "plan --link 10gbe --prefill-tps 1000"])
def test_an_output_that_is_full_is_one_line(command: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m console {command} > /dev/full"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.stderr == "pdconsole: error: standard output cannot be written: No space left on device\n"
    assert ran.returncode == 1
