"""A program that runs guarded: on its cores, and only while its parent lives."""

import os
import subprocess
import sys
from pathlib import Path

from cluster.guarded_main import guarded_command, guarded_program

PROGRAM = """
import os, sys
print(sorted(os.sched_getaffinity(0)), __name__, sys.argv)
"""


def run_guarded(directory: Path, parent_pid: int, cpus: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    (directory / "shown_program.py").write_text(PROGRAM)
    return subprocess.run(
        guarded_command("shown_program", parent_pid, cpus),
        env=os.environ | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_program_runs_as_itself_on_the_given_core(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    done = run_guarded(tmp_path, os.getpid(), (core,))
    assert (done.returncode, done.stdout) == (0, f"[{core}] __main__ ['{tmp_path}/shown_program.py']\n")


def test_without_cores_it_runs_on_any(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, os.getpid(), ())
    assert done.stdout.startswith(str(sorted(os.sched_getaffinity(0))))


def test_nothing_runs_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, os.getpid() + 1, ())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_guard_is_up_before_anything_slow_is_imported() -> None:
    code = (
        "import sys, cluster.guarded_main; print(sorted({'torch', 'msgspec', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_any_program_runs_with_its_own_options_on_the_given_core() -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os, sys; print(sorted(os.sched_getaffinity(0)), sys.argv[1:])"
    command = guarded_program([sys.executable, "-c", code, "--cpus", "x"], os.getpid(), (core,))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"[{core}] ['--cpus', 'x']\n")
