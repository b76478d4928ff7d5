"""Snapshots of finished logs on disk, so that only the first replay of a run folds all of it.

``<home>/cache/replay/`` holds a file a snapshot, named after what it is the fold of: the log (path, size, time, both
its ends), the position in it, and the program's own code. So a log or a program that changed finds nothing, and what
is found needs no check but that it is whole and ours. Since it is unpickled, it counts only in a directory that nobody
else may enter; nothing else is ever said about a cache that cannot be used.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import stat
from pathlib import Path
from typing import Final, Self

import cluster.events
from cluster.run_dir import runs_home
from console.replay_log import ReplayLog

MAX_CACHE_BYTES: Final = 512 * 2**20
"""Of all logs together; the longest unused goes first."""

_SUFFIX: Final = ".snapshot"
_DIGEST_BYTES: Final = 16
_END_BYTES: Final = 64 * 2**10


def cache_dir() -> Path:
    return runs_home().parent / "cache" / "replay"


class SnapshotStore:
    """Those of one log. Files are opened relative to the directory that was checked, whatever its path means later."""

    def __init__(self, directory: int, key: str, max_bytes: int) -> None:
        self._directory = directory
        self._key = key
        self._max_bytes = max_bytes

    @classmethod
    def open(
        cls, log: ReplayLog, directory: Path | None = None, max_bytes: int = MAX_CACHE_BYTES
    ) -> Self | None:
        """None: there is no directory to be trusted, or the log cannot be named."""
        path = cache_dir() if directory is None else directory
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
                return cls(fd, _key(log), max_bytes)
        except OSError:
            pass
        os.close(fd)
        return None

    def close(self) -> None:
        os.close(self._directory)

    def offsets(self) -> list[int]:
        """Positions that have a snapshot. They count as used now."""
        found = []
        for name in self._names():
            key, _, offset = name.removesuffix(_SUFFIX).partition("-")
            if key == self._key and offset.isdecimal():
                found.append(int(offset))
                with contextlib.suppress(OSError):
                    os.utime(name, dir_fd=self._directory)
        return found

    def read(self, offset: int) -> bytes | None:
        """None: there is none any more, it is damaged, or another user's."""
        try:
            fd = os.open(
                self._name(offset), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory
            )
            with os.fdopen(fd, "rb") as file:
                found = os.fstat(fd)
                if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                    return None
                digest, packed = file.read(_DIGEST_BYTES), file.read()
        except OSError:
            return None
        return packed if digest == _digest(packed) else None

    def write(self, offset: int, packed: bytes) -> bool:
        """Whole or not at all, within the bound."""
        draft = f"{self._name(offset)}.{os.getpid()}"
        try:
            self._make_room(len(packed))
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o600, dir_fd=self._directory), "wb") as file:
                file.write(_digest(packed))
                file.write(packed)
            os.rename(draft, self._name(offset), src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            self._unlink(draft)
            return False
        return True

    def drop(self, offset: int) -> None:
        self._unlink(self._name(offset))

    def _make_room(self, num_bytes: int) -> None:
        """Raises OSError when the directory cannot be read."""
        files = []
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):  # another replay made room
                found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
                files.append((found.st_mtime_ns, name, found.st_size))
        total = num_bytes + sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if total <= self._max_bytes:
                break
            self._unlink(name)
            total -= size

    def _names(self) -> list[str]:
        """With drafts that a killed process left; they go when they are the oldest."""
        try:
            return [name for name in os.listdir(self._directory) if _SUFFIX in name]
        except OSError:
            return []

    def _name(self, offset: int) -> str:
        return f"{self._key}-{offset}{_SUFFIX}"

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory)


def _key(log: ReplayLog) -> str:
    """Raises OSError."""
    found = log.stat()
    key = hashlib.blake2b(digest_size=16)
    key.update(f"{log.path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{log.end}\0".encode())
    key.update(log.bytes_at(0, _END_BYTES))
    key.update(log.bytes_at(max(log.end - _END_BYTES, 0), _END_BYTES))
    key.update(_code_digest())
    return key.hexdigest()


@functools.cache
def _code_digest() -> bytes:
    """Of everything that decides what a fold is and how it is packed. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{platform.python_version()} {importlib.metadata.version('msgspec')}".encode())
    for package in (Path(__file__).parent, Path(cluster.events.__file__).parent):
        for path in sorted(package.glob("*.py")):
            digest.update(f"\0{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.digest()


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
