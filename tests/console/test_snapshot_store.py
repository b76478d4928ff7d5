"""What is found on disk is the fold and nothing else: whole, ours, of this log and program; or it is not found."""

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from cluster.events import decode_event, encode_event
from console import snapshot_store
from console.replay_cursor import ReplayCursor
from console.replay_log import ReplayLog
from console.snapshot_store import SnapshotStore, cache_dir
from console.view_snapshot import Snapshots, pack, unpack
from console.view_state import ViewState
from tests.console.history import story
from tests.console.plain import plain
from tests.console.test_replay_cursor import folded

CONTENT = b"".join(encode_event(event) + b"\n" for event in story(32.0))
SPACING = 30_000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ReplayLog]:
    path = tmp_path / "events.jsonl"
    path.write_bytes(CONTENT)
    log = ReplayLog(path)
    yield log
    log.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def opened(log: ReplayLog, directory: Path, max_bytes: int = 2**20) -> SnapshotStore:
    store = SnapshotStore.open(log, directory, max_bytes)
    assert store is not None
    return store


def fold_all(log: ReplayLog, store: SnapshotStore | None) -> Snapshots:
    snapshots = Snapshots(SPACING, store=store)
    go(log, snapshots, log.end)
    return snapshots


def go(log: ReplayLog, snapshots: Snapshots, offset: int) -> tuple[ViewState, int]:
    """The view there, and how many bytes were folded on the way."""
    cursor = ReplayCursor(log, snapshots)
    cursor.aim(offset)
    begin = cursor.reached
    while not cursor.work():
        pass
    return cursor.state, offset - begin


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_a_second_replay_folds_only_what_lies_behind_a_snapshot(log: ReplayLog, directory: Path) -> None:
    fold_all(log, opened(log, directory))
    assert [path.stat().st_mode & 0o777 for path in (directory, *files(directory))][:2] == [0o700, 0o600]
    for share in (0.3, 0.55, 0.8, 1.0):
        offset = log.before(round(share * log.end))
        state, num_bytes = go(log, Snapshots(SPACING, store=opened(log, directory)), offset)
        assert num_bytes < 4 * SPACING
        assert plain(state) == plain(folded(CONTENT[:offset]))


def test_a_view_from_disk_folds_on_as_one_that_never_was_there(log: ReplayLog, directory: Path) -> None:
    snapshots = fold_all(log, opened(log, directory))
    half = snapshots.nearest(log.end // 2)
    offset, state = Snapshots(store=opened(log, directory)).load(half)
    assert offset == half
    for line in CONTENT[half:].splitlines():
        state.fold(decode_event(line))
    assert plain(state) == plain(folded(CONTENT))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone", "link", "pickle"])
def test_a_damaged_snapshot_is_passed_over(log: ReplayLog, directory: Path, damage: str) -> None:
    fold_all(log, opened(log, directory))
    for path in files(directory):
        content = path.read_bytes()
        match damage:
            case "cut":
                path.write_bytes(content[:-7])
            case "flipped":
                path.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
            case "empty":
                path.write_bytes(b"")
            case "gone":
                path.unlink()
            case "link":
                path.rename(path.with_suffix(".moved"))
                path.symlink_to(path.with_suffix(".moved"))
            case "pickle":
                packed = zstandard.compress(pickle.dumps(print))
                path.write_bytes(hashlib.blake2b(packed, digest_size=16).digest() + packed)
    state, num_bytes = go(log, Snapshots(SPACING, store=opened(log, directory)), log.end)
    assert (num_bytes, plain(state)) == (log.end, plain(folded(CONTENT)))


def test_a_directory_that_others_may_enter_is_not_used(log: ReplayLog, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    directory.chmod(0o750)
    assert SnapshotStore.open(log, directory) is None
    directory.chmod(0o700)
    linked = directory.with_name("linked")
    linked.symlink_to(directory)
    assert SnapshotStore.open(log, linked) is None
    (directory / "file").touch()
    assert SnapshotStore.open(log, directory / "file") is None


def test_another_users_directory_is_not_used(
    log: ReplayLog, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold_all(log, opened(log, directory))
    mine = opened(log, directory)
    place = max(mine.offsets())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert SnapshotStore.open(log, directory) is None
    assert mine.read(place) is None


def test_another_log_or_another_program_finds_nothing(
    log: ReplayLog, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold_all(log, opened(log, directory))
    assert opened(log, directory).offsets()
    grown = log.path
    with grown.open("ab") as file:
        file.write(CONTENT[: CONTENT.index(b"\n") + 1])
    other = ReplayLog(grown)
    assert opened(other, directory).offsets() == []
    other.close()
    os.truncate(grown, len(CONTENT))
    monkeypatch.setattr(snapshot_store, "_code_digest", lambda: b"another version")
    assert opened(log, directory).offsets() == []


def test_the_cache_is_bounded_and_the_longest_unused_goes_first(log: ReplayLog, directory: Path) -> None:
    store = opened(log, directory, max_bytes=1000)
    for offset in range(1, 5):
        assert store.write(offset, bytes(300))
        os.utime(files(directory)[-1], (offset, offset))
    assert sorted(store.offsets()) == [2, 3, 4]
    assert sum(path.stat().st_size for path in files(directory)) <= 1000


def test_what_cannot_be_written_stays_in_memory(log: ReplayLog, directory: Path) -> None:
    store = opened(log, directory)
    directory.rmdir()
    snapshots = fold_all(log, store)
    assert snapshots.furthest > log.end - 2 * SPACING
    state, num_bytes = go(log, snapshots, log.end)
    assert num_bytes < 2 * SPACING
    assert plain(state) == plain(folded(CONTENT))


def test_a_pickle_of_anything_else_is_refused() -> None:
    state = folded(CONTENT)
    assert plain(unpack(pack(state))) == plain(state)
    for foreign in (os.system, print, cache_dir):
        with pytest.raises(pickle.UnpicklingError):
            unpack(zstandard.compress(pickle.dumps(foreign)))
