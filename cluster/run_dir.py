"""Where runs live on disk, and which of them is alive.

``<data>/runs/<run>/`` holds ``run.json``, ``events.jsonl``, ``logs/``, ``summary.json``, ``token`` and ``lock``. The
supervisor holds an flock on ``lock`` for its life: the kernel lets go when it dies, so a stale lock cannot exist.
"""

import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
import platformdirs

from cluster.profile import Profile

SCHEMA: Final = 1
RUN_FILE: Final = "run.json"
TOKEN_FILE: Final = "token"
LOCK_FILE: Final = "lock"
LOG_DIR: Final = "logs"
SUMMARY_FILE: Final = "summary.json"
_LOCK_WAIT_S: Final = 0.5


class RunDirError(Exception):
    """A run's directory cannot be used or found; the message is one line for the user."""


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """The same instant on both clocks: ties ``at`` of the events to the wall."""

    monotonic: float
    wall: float


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: everything needed to read the run later, or to attach to it now."""

    run: str
    profile: Profile
    versions: dict[str, str]
    clock: ClockAnchor
    supervisor_pid: int
    url: str
    token_path: str
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run found on disk. ``info`` is None when it died before it wrote ``run.json``."""

    run: str
    path: Path
    info: RunInfo | None

    @property
    def is_alive(self) -> bool:
        return is_alive(self.path)


class RunLock:
    """The supervisor's hold on its run directory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, run_dir: Path) -> "RunLock":
        """Raises RunDirError when another supervisor holds it."""
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:  # somebody's is_alive() may be looking at this very moment
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(fd)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise RunDirError(f"run directory {run_dir} is in use by a running cluster") from None
                time.sleep(0.01)

    def release(self) -> None:
        os.close(self._fd)


def runs_home() -> Path:
    """``PDCONSOLE_HOME`` or the platform's user data directory, plus ``runs``."""
    home = os.environ.get("PDCONSOLE_HOME")
    base = Path(home).expanduser() if home else Path(platformdirs.user_data_dir("pdconsole", appauthor=False))
    return base / "runs"


def new_run_name() -> str:
    """Sorts by time, unlike any other: ``2026-11-29T16-03-11-a1b2``."""
    return time.strftime("%Y-%m-%dT%H-%M-%S") + "-" + secrets.token_hex(2)


def make_run_dir(directory: Path | None = None) -> tuple[str, Path]:
    """Create a run's directory (0700, with ``logs/``); returns (run name, absolute path).

    ``directory`` given: that very directory, which must be new or empty. Raises RunDirError.
    """
    name = new_run_name()
    path = (directory if directory is not None else runs_home() / name).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=directory is not None)
        if any(path.iterdir()):
            raise RunDirError(f"run directory {path} is not empty; allowed is a new or empty directory")
        path.chmod(0o700)
        (path / LOG_DIR).mkdir(mode=0o700)
    except OSError as error:
        raise RunDirError(f"run directory {path} cannot be made: {error.strerror}") from error
    return name, path


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Written whole or not at all."""
    _write_private(run_dir / RUN_FILE, msgspec.json.format(msgspec.json.encode(info), indent=2))


def read_run_info(run_dir: Path) -> RunInfo:
    """Raises RunDirError when there is none or it is of another schema."""
    path = run_dir / RUN_FILE
    try:
        info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RunDirError(f"{path} is not a run description: {error}") from error
    if info.schema != SCHEMA:
        raise RunDirError(f"{path} has schema {info.schema}; this program reads {SCHEMA}")
    return info


def write_token(run_dir: Path, token: str) -> Path:
    """The operator's bearer token, readable by its owner only; returns its path."""
    path = run_dir / TOKEN_FILE
    _write_private(path, token.encode() + b"\n")
    return path


def read_token(run_dir: Path) -> str:
    """Raises RunDirError."""
    try:
        return (run_dir / TOKEN_FILE).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RunDirError(f"{run_dir / TOKEN_FILE} cannot be read: {error.strerror}") from error


def is_alive(run_dir: Path) -> bool:
    """Whether a supervisor holds this run's lock now."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def list_runs(home: Path | None = None) -> list[RunRecord]:
    """Every run on disk, oldest first."""
    base = home if home is not None else runs_home()
    if not base.is_dir():
        return []
    return [_record(path) for path in sorted(base.iterdir()) if (path / LOG_DIR).is_dir()]


def find_run(name: str, home: Path | None = None) -> RunRecord:
    """A run by its directory or that one's name, by its own name or the beginning of it, or ``latest``: the youngest
    whose cluster came up, or comes up now, if any did.

    The name of a directory wins: a copy of a run beside it goes by the same name. Raises RunDirError.
    """
    if (Path(name) / LOG_DIR).is_dir():
        return _record(Path(name).absolute())
    runs = list_runs(home)
    if not runs:
        raise RunDirError(f"no runs in {home if home is not None else runs_home()}")
    if name == "latest":
        return next((run for run in reversed(runs) if run.info is not None or run.is_alive), runs[-1])
    found = (
        [run for run in runs if run.path.name == name]
        or [run for run in runs if run.run == name]
        or [run for run in runs if run.run.startswith(name) or run.path.name.startswith(name)]
    )
    if len(found) == 1:
        return found[0]
    what = "is not the name of a run" if not found else f"fits {len(found)} runs"
    raise RunDirError(f"run {name!r} {what}; the latest are {', '.join(run.path.name for run in runs[-3:])}")


def latest_run(home: Path | None = None, *, alive_only: bool = False) -> RunRecord | None:
    """The youngest run; with ``alive_only`` the youngest whose cluster is up."""
    runs = [run for run in list_runs(home) if not alive_only or run.is_alive]
    return runs[-1] if runs else None


def installed_versions() -> dict[str, str]:
    """Versions that explain a run's numbers; a package that is not installed is left out."""
    found = {}
    for package in ("pdconsole", "torch", "numpy", "msgspec", "aiohttp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _record(path: Path) -> RunRecord:
    try:
        info = read_run_info(path)
    except RunDirError:
        return RunRecord(path.name, path, None)
    return RunRecord(info.run, path, info)


def _write_private(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".draft")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    draft.replace(path)
