import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.profile import Profile
from cluster.run_dir import (
    ClockAnchor,
    RunDirError,
    RunInfo,
    RunLock,
    find_run,
    installed_versions,
    is_alive,
    latest_run,
    list_runs,
    make_run_dir,
    new_run_name,
    read_run_info,
    read_token,
    runs_home,
    write_run_info,
    write_token,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "runs"


def info(run: str) -> RunInfo:
    return RunInfo(
        run=run,
        profile=Profile(name="p"),
        versions={"msgspec": "1"},
        clock=ClockAnchor(monotonic=1.5, wall=1e9),
        supervisor_pid=1,
        url="http://127.0.0.1:1",
        token_path="/t",
    )


def test_runs_live_under_the_home(home: Path) -> None:
    name, path = make_run_dir()
    assert runs_home() == home
    assert path == home / name
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "logs").stat().st_mode & 0o777 == 0o700


def test_home_without_the_variable_is_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDCONSOLE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/some/where")
    assert runs_home() == Path("/some/where/pdconsole/runs")


def test_names_say_when_and_differ() -> None:
    names = {new_run_name() for _ in range(20)}
    assert len(names) > 15
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-[0-9a-f]{4}", name) for name in names)


def test_given_directory_is_used_itself(tmp_path: Path) -> None:
    _, path = make_run_dir(tmp_path / "mine")
    assert path == tmp_path / "mine"
    with pytest.raises(RunDirError, match=r"mine is not empty; allowed is a new or empty directory"):
        make_run_dir(tmp_path / "mine")


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"file/x cannot be made: Not a directory"):
        make_run_dir(tmp_path / "file" / "x")


def test_run_info_survives_the_disk() -> None:
    name, path = make_run_dir()
    write_run_info(path, info(name))
    assert read_run_info(path) == info(name)
    assert (path / "run.json").stat().st_mode & 0o777 == 0o600
    assert not list(path.glob("*.draft"))


@pytest.mark.parametrize("content", ["{", '{"run": 1}', "[]"])
def test_broken_run_info_is_a_clear_error(content: str) -> None:
    _, path = make_run_dir()
    (path / "run.json").write_text(content)
    with pytest.raises(RunDirError, match=r"run.json is not a run description"):
        read_run_info(path)
    assert list_runs()[0].info is None


def test_run_info_of_another_schema_is_refused() -> None:
    name, path = make_run_dir()
    write_run_info(path, info(name))
    file = path / "run.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 9'))
    assert '"schema": 9' in file.read_text()
    with pytest.raises(RunDirError, match="has schema 9; this program reads 1"):
        read_run_info(path)


def test_token_is_private_from_its_first_moment() -> None:
    _, path = make_run_dir()
    old = os.umask(0)
    try:
        token_path = write_token(path, "s3cret")
    finally:
        os.umask(old)
    assert token_path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == "s3cret"


def test_run_is_alive_while_its_lock_is_held() -> None:
    _, path = make_run_dir()
    assert not is_alive(path)
    lock = RunLock.acquire(path)
    assert is_alive(path)
    with pytest.raises(RunDirError, match="is in use by a running cluster"):
        RunLock.acquire(path)
    lock.release()
    assert not is_alive(path)


def test_a_copy_of_a_run_beside_it_hides_neither(home: Path) -> None:
    name, path = make_run_dir()
    write_run_info(path, info(name))
    copy = home / f"{name}-copy"
    shutil.copytree(path, copy)
    assert find_run(name).path == path
    assert find_run(copy.name).path == find_run(f"{name}-c").path == copy
    with pytest.raises(RunDirError, match=f"fits 2 runs; the latest are {name}, {copy.name}"):
        find_run(name[:-1])


def test_lock_of_a_killed_process_is_free() -> None:
    _, path = make_run_dir()
    program = (
        "import sys; from pathlib import Path; from cluster.run_dir import RunLock\n"
        f"lock = RunLock.acquire(Path({str(path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert is_alive(path)
        holder.kill()
        holder.wait()
    assert not is_alive(path)


def test_runs_are_found_by_name_beginning_path_and_age(home: Path) -> None:
    for name in ("2026-01-01T00-00-00-aaaa", "2026-01-02T00-00-00-bbbb", "2026-01-02T00-00-00-cccc"):
        (home / name / "logs").mkdir(parents=True)
        write_run_info(home / name, info(name))
    (home / "not a run").mkdir()
    assert [run.run[-4:] for run in list_runs()] == ["aaaa", "bbbb", "cccc"]
    assert find_run("latest").run.endswith("cccc")
    (home / "2026-01-03T00-00-00-dddd" / "logs").mkdir(parents=True)  # whose port was taken
    assert find_run("latest").run.endswith("cccc")
    assert find_run("2026-01-03").run.endswith("dddd")
    (home / "2026-01-03T00-00-00-dddd" / "logs").rmdir()
    (home / "2026-01-03T00-00-00-dddd").rmdir()
    assert find_run("2026-01-01").run.endswith("aaaa")
    assert find_run(str(home / "2026-01-02T00-00-00-bbbb")).run.endswith("bbbb")
    with pytest.raises(RunDirError, match="run '2026-01-02' fits 2 runs"):
        find_run("2026-01-02")
    with pytest.raises(RunDirError, match=r"run 'x' is not the name of a run; the latest are .*cccc"):
        find_run("x")
    assert latest_run(alive_only=True) is None
    lock = RunLock.acquire(home / "2026-01-02T00-00-00-bbbb")
    alive = latest_run(alive_only=True)
    assert alive is not None
    assert alive.run.endswith("bbbb")
    lock.release()


def test_no_runs_is_said() -> None:
    assert list_runs() == []
    assert latest_run() is None
    with pytest.raises(RunDirError, match="no runs in"):
        find_run("latest")


def test_versions_name_what_explains_a_run() -> None:
    assert "msgspec" in installed_versions()
