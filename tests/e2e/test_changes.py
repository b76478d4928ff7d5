"""Workers drain, restart, change roles, come and go while clients are served: nothing is lost, no text differs."""

import contextlib
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from cluster.events import (
    DecodeAdmitted,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RoleChanged,
    WorkerDrained,
    WorkerExited,
    WorkerReady,
    WorkerRemoved,
)
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("def read(path):", {"max_tokens": 60}),
    ("one two three " * 20, {"max_tokens": 40, "temperature": 1.0, "seed": 5}),
    ("abc", {"max_tokens": 120, "temperature": 1.0, "seed": 6}),
]


class BusyClients:
    """One client for each of REQUESTS that asks the same again and again; ``wrong`` is what differed or failed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._expected = [client.complete(prompt, **fields) for prompt, fields in REQUESTS]
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(len(REQUESTS))]
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        prompt, fields = REQUESTS[number]
        while not self._ending.is_set():
            response = self._client.post(
                "/v1/completions", {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
            )
            if response.status_code != 200:
                self.wrong.append(response.text)
            elif response.json()["choices"][0]["text"] != self._expected[number]:
                self.wrong.append(f"request {number} has another text")


def test_the_set_of_workers_changes_under_load_and_nothing_is_lost(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()

    def does(client: Client, **command: Any) -> int:
        """Carry a command out; returns the number of events before it."""
        since = len(cluster.events())
        answer = client.command(command)
        assert answer.status_code == 200, answer.text
        return since

    def served_since(since: int, how_many: int = 3) -> None:
        for _ in range(how_many):
            since = cluster.wait_for(RequestFinished, lambda e, s=since: e.index >= s).index + 1  # type: ignore[misc]

    with Client(cluster) as client, BusyClients(client) as busy:
        for worker_id in ("decode-0", "prefill-0"):  # the only ones of their kind
            since = does(client, msg="restart_worker", worker_id=worker_id)
            exited = cluster.wait_for(WorkerExited, lambda e, s=since: e.index >= s)  # type: ignore[misc]
            assert (exited.worker_id, exited.cause) == (worker_id, "restart")
            drained = cluster.wait_for(WorkerDrained, lambda e, s=since: e.index >= s)  # type: ignore[misc]
            assert drained.index < exited.index
            back = cluster.wait_for(WorkerReady, lambda e, i=exited.index: e.index > i)  # type: ignore[misc]
            served_since(back.index)
        does(client, msg="add_worker", role="decode")
        cluster.wait_for(WorkerReady, lambda e: e.worker_id == "decode-1")
        cluster.wait_for(DecodeAdmitted, lambda e: e.worker_id == "decode-1")
        since = does(client, msg="set_role", worker_id="decode-0", role="prefill")
        cluster.wait_for(RoleChanged)
        does(client, msg="remove_worker", worker_id="prefill-0")
        removed = cluster.wait_for(WorkerRemoved)
        admitted = cluster.wait_for(DecodeAdmitted, lambda e: e.index > removed.index)
        assert admitted.worker_id == "decode-1", "what was a decode worker prefills now"
        served_since(removed.index)
    assert busy.wrong == []
    events = cluster.events()
    assert not [e for e in events if isinstance(e, (RequestFailed, RequestRejected, RequestMigrated))]
    with Client(cluster) as client:
        blocks = client.admin("/admin/blocks").json()
        assert (blocks["held_blocks"], blocks["stranded_blocks"]) == (0, 0)
        assert [worker["worker_id"] for worker in blocks["workers"]] == ["decode-0", "decode-1"]


def keeps_its_token(cluster: RunningCluster) -> None:
    """It is in one file of the run, and in no process's arguments or environment."""
    token = (cluster.run_dir / "token").read_bytes().strip()
    assert len(token) > 20
    files = [path for path in cluster.run_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if token in path.read_bytes()] == ["token"]
    for path in (cluster.run_dir, cluster.run_dir / "logs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in ("token", "events.jsonl", "run.json"):
        assert stat.S_IMODE((cluster.run_dir / name).stat().st_mode) == 0o600
    for pid in cluster.worker_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that was restarted
            assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert token not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_restart_that_does_not_wait_moves_its_streams_on(running_cluster: Start) -> None:
    """Held blocks have an owner meanwhile, and only who has the token may see it."""
    cluster = running_cluster("--decode", "2", "--set", "engine.prefix_caching=false").wait_ready()
    fields: dict[str, Any] = {"max_tokens": 600, "temperature": 1.0, "seed": 3}
    with Client(cluster) as client:
        expected = client.complete("abc", **fields)
        assert client.get("/admin/blocks").status_code == 401
        for _ in range(3):
            since = len(cluster.events())
            answer = client.background("abc", **fields)
            arrived = cluster.wait_for(RequestArrived, lambda e, s=since: e.index >= s)  # type: ignore[misc]
            admitted = cluster.wait_for(DecodeAdmitted, lambda e, i=arrived.request_id: e.request_id == i)  # type: ignore[misc]
            held = client.admin("/admin/blocks").json()
            (holder,) = [
                holder
                for worker in held["workers"]
                if worker["worker_id"] == admitted.worker_id
                for holder in worker["holders"]
            ]
            assert (holder["request_id"], holder["attempt"]) == (arrived.request_id, 1)
            assert (holder["owner"], holder["peer"], holder["is_wanted"]) == ("decode", "prefill-0", True)
            done = client.command({"msg": "restart_worker", "worker_id": admitted.worker_id, "drain_s": 0})
            assert done.status_code == 200
            migrated = cluster.wait_for(RequestMigrated, lambda e, s=since: e.index >= s)  # type: ignore[misc]
            assert (migrated.request_id, migrated.from_worker) == (arrived.request_id, admitted.worker_id)
            assert answer.text() == expected
            cluster.wait_for(
                WorkerReady,
                lambda e, i=migrated.index, w=admitted.worker_id: e.index > i and e.worker_id == w,  # type: ignore[misc]
            )
        assert client.admin("/admin/blocks").json()["held_blocks"] == 0
    keeps_its_token(cluster)
