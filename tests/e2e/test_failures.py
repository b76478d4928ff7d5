"""Real processes, real signals: what the client sees is time, and afterwards nothing is held."""

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable

import httpx2
import pytest

from cluster.events import (
    DecodeAdmitted,
    FellBack,
    HeartbeatMissed,
    PeerRefused,
    PrefillProgressed,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFinished,
    RequestMigrated,
    RequestRetried,
    TokensDelivered,
    TransferStarted,
    WorkerExited,
    WorkerReady,
    WorkerStats,
)
from tests.e2e.client import Client, completion
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]
LONG = [(7 * n) % 256 for n in range(8000)]
SLOW_PREFILL = ("--set", "engine.prefill_chunk_tokens=8", "--set", "engine.prefix_caching=false")


def pid_of(cluster: RunningCluster, worker_id: str) -> int:
    """The pid of the newest life of a worker."""
    return [e.pid for e in cluster.events() if isinstance(e, WorkerReady) and e.worker_id == worker_id][-1]


def nothing_held(
    cluster: RunningCluster, after: float, workers: tuple[str, ...] = ("prefill-0", "decode-0")
) -> bool:
    """Each worker says after that time that it holds no block; waited for."""
    for worker_id in workers:
        cluster.wait_for(
            WorkerStats,
            lambda e, w=worker_id: (
                e.worker_id == w and e.at > after and e.held_blocks == 0 and e.reserved == 0
            ),  # type: ignore[misc]
        )
    return True


def new_progress(cluster: RunningCluster, since: int, worker_id: str = "prefill-0") -> PrefillProgressed:
    return cluster.wait_for(PrefillProgressed, lambda e: e.index >= since and e.worker_id == worker_id)


def test_prefill_killed_in_mid_prefill_again_and_again(running_cluster: Start) -> None:
    cluster = running_cluster(*SLOW_PREFILL).wait_ready()
    with Client(cluster) as client:
        expected = client.complete(LONG)
        for _ in range(3):
            since = len(cluster.events())
            answer = client.background(LONG)
            new_progress(cluster, since)
            os.kill(pid_of(cluster, "prefill-0"), signal.SIGKILL)
            assert answer.text() == expected
            fell = cluster.wait_for(FellBack, lambda e, since=since: e.index >= since)  # type: ignore[misc]
            assert fell.reason == "prefill_died"
            exited = cluster.wait_for(WorkerExited, lambda e, since=since: e.index >= since)  # type: ignore[misc]
            assert (exited.worker_id, exited.signal) == ("prefill-0", signal.SIGKILL)
            cluster.wait_for(
                WorkerReady, lambda e, since=since: e.index >= since and e.worker_id == "prefill-0"
            )  # type: ignore[misc]
        last = cluster.wait_for(RequestFinished, lambda e: e.index >= since)
        assert nothing_held(cluster, last.at)


def test_prefill_killed_with_another_one_there_is_a_retry(running_cluster: Start) -> None:
    cluster = running_cluster(*SLOW_PREFILL, "--prefill", "2").wait_ready()
    with Client(cluster) as client:
        expected = client.complete(LONG)
        since = len(cluster.events())
        answer = client.background(LONG)
        picked = cluster.wait_for(RequestDispatched, lambda e: e.index >= since).prefill_worker
        new_progress(cluster, since, picked)
        os.kill(pid_of(cluster, picked), signal.SIGKILL)
        assert answer.text() == expected
        retried = cluster.wait_for(RequestRetried)
        assert (retried.reason, retried.attempt) == ("prefill_died", 2)
        assert not [e for e in cluster.events() if isinstance(e, FellBack)]


def test_decode_killed_in_mid_stream_goes_on_where_it_was(running_cluster: Start) -> None:
    cluster = running_cluster("--set", "engine.prefix_caching=false").wait_ready()
    fields = {"max_tokens": 1000, "temperature": 1.0, "seed": 3}
    with Client(cluster) as client:
        expected = client.complete("abc", **fields)
        since = len(cluster.events())
        answer = client.background("abc", **fields)
        arrived = cluster.wait_for(RequestArrived, lambda e: e.index >= since)
        cluster.wait_for(
            TokensDelivered, lambda e: e.request_id == arrived.request_id and e.first_position > 20
        )
        os.kill(pid_of(cluster, "decode-0"), signal.SIGKILL)
        assert answer.text() == expected
        migrated = cluster.wait_for(RequestMigrated)
        assert migrated.delivered_tokens > 20
        cluster.wait_for(RequestFinished, lambda e: e.request_id == migrated.request_id)
        delivered = [
            e
            for e in cluster.events()
            if isinstance(e, TokensDelivered) and e.request_id == migrated.request_id
        ]
        positions = [e.first_position + n for e in delivered for n in range(len(e.token_at))]
        assert positions == list(range(1000))


def test_hung_prefill_is_noticed_killed_and_replaced(running_cluster: Start) -> None:
    cluster = running_cluster(*SLOW_PREFILL).wait_ready()
    with Client(cluster) as client:
        expected = client.complete(LONG)
        since = len(cluster.events())
        answer = client.background(LONG)
        new_progress(cluster, since)
        os.kill(pid_of(cluster, "prefill-0"), signal.SIGSTOP)
        assert answer.text() == expected
        missed = cluster.wait_for(HeartbeatMissed)
        assert missed.worker_id == "prefill-0"
        exited = cluster.wait_for(WorkerExited)
        assert exited.cause == "hang"


def test_router_killed_comes_back_on_its_port_and_nothing_is_held(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    with Client(cluster) as client:
        before = client.complete("abc")
        since = len(cluster.events())
        broken = client.background("abc", max_tokens=4000)
        cluster.wait_for(DecodeAdmitted, lambda e: e.index >= since)
        os.kill(pid_of(cluster, "router"), signal.SIGKILL)
        with pytest.raises((httpx2.HTTPError, AssertionError)):
            broken.text()
        ready = cluster.wait_for(WorkerReady, lambda e: e.index >= since and e.worker_id == "router")
        assert nothing_held(cluster, ready.at)
        # the kernel queues connections on the inherited socket; then a pair has to be proven again
        while client.get("/health").status_code != 200:
            pass
        assert client.complete("abc") == before


def test_a_hurt_link_costs_a_fallback_with_its_reason_and_no_token(running_cluster: Start) -> None:
    cluster = running_cluster(
        "--set", "kv.stall_timeout_s=1", "--set", "engine.prefix_caching=false"
    ).wait_ready()
    reasons = {
        "corrupt": {"transfer_checksum"},
        "cut": {"transfer_peer_closed", "transfer_truncated"},
        "stall": {"transfer_timeout"},
    }
    with Client(cluster) as client:
        expected = client.complete(LONG[:600])
        for kind, allowed in reasons.items():
            since = len(cluster.events())
            seconds = 4 if kind == "stall" else 0
            fault = {"msg": "inject_link_fault", "worker_id": "prefill-0", "kind": kind, "seconds": seconds}
            assert client.command(fault).json()["ok"]
            assert client.complete(LONG[:600]) == expected
            fell = cluster.wait_for(FellBack, lambda e, s=since: e.index >= s)  # type: ignore[misc]
            assert fell.reason in allowed
            finished = cluster.wait_for(RequestFinished, lambda e, i=fell.request_id: e.request_id == i)  # type: ignore[misc]
            assert nothing_held(cluster, finished.at)
    assert not [e for e in cluster.events() if isinstance(e, WorkerExited)]


def test_a_hung_decode_worker_and_a_hung_router_are_replaced(running_cluster: Start) -> None:
    cluster = running_cluster("--set", "supervisor.heartbeat_timeout_s=1").wait_ready()
    fields = {"max_tokens": 600, "temperature": 1.0, "seed": 3}
    with Client(cluster) as client:
        expected = client.complete("abc", **fields)
        since = len(cluster.events())
        answer = client.background("abc", **fields)
        cluster.wait_for(TokensDelivered, lambda e: e.index >= since)
        os.kill(pid_of(cluster, "decode-0"), signal.SIGSTOP)
        assert answer.text() == expected
        assert cluster.wait_for(RequestMigrated).from_worker == "decode-0"
        since = len(cluster.events())
        broken = client.background("abc", max_tokens=4000)
        cluster.wait_for(RequestArrived, lambda e: e.index >= since and e.label == "client")
        os.kill(pid_of(cluster, "router"), signal.SIGSTOP)
        with pytest.raises((httpx2.HTTPError, AssertionError)):
            broken.text()
        ready = cluster.wait_for(WorkerReady, lambda e: e.index >= since and e.worker_id == "router")
        assert nothing_held(cluster, ready.at)
        assert client.complete("abc", **fields) == expected  # it may wait, it is not turned away
    hung = [e.worker_id for e in cluster.events() if isinstance(e, WorkerExited) and e.cause == "hang"]
    assert hung == ["decode-0", "router"]


class LeavingClient:
    """Sends one streamed completion and reads nothing; ``leave`` closes the connection."""

    def __init__(self, cluster: RunningCluster, body: dict[str, object]) -> None:
        host, _, port = cluster.url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)))
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def leave(self) -> None:
        self._socket.close()


def test_a_client_that_leaves_stops_the_work_in_every_phase(running_cluster: Start) -> None:
    """One request at a time on the decode worker, and a link on which its KV takes a second or so."""
    cluster = running_cluster(
        *SLOW_PREFILL,
        *("--set", "engine.max_num_seqs=1", "--set", "kv.delivery=bulk"),
        *("--link-backend", "pacing", "--set", "link.bandwidth=8mbit", "--set", "link.probe=false"),
    ).wait_ready()
    long = completion(LONG[:2000], max_tokens=5000)
    with Client(cluster) as client:

        def held_blocks() -> int:
            held: int = client.admin("/admin/blocks").json()["held_blocks"]
            return held

        for phase, sign in (
            ("prefill", PrefillStarted),
            ("transfer", TransferStarted),
            ("decode", DecodeAdmitted),
        ):
            since = len(cluster.events())
            leaving = LeavingClient(cluster, long)
            begun = cluster.wait_for(sign, lambda e, s=since: e.index >= s)
            if phase == "decode":
                since = len(cluster.events())
                waiting = LeavingClient(cluster, long)
                arrived = cluster.wait_for(RequestArrived, lambda e, s=since: e.index >= s)  # type: ignore[misc]
                waiting.leave()
                left = cluster.wait_for(RequestCancelled, lambda e, i=arrived.request_id: e.request_id == i)  # type: ignore[misc]
                assert left.phase == "queued"
                assert held_blocks() > 0, "the one that runs goes on"
            leaving.leave()
            left = cluster.wait_for(RequestCancelled, lambda e, i=begun.request_id: e.request_id == i)  # type: ignore[misc]
            assert (left.phase, left.reason) == (phase, "client_gone")
            while held_blocks():
                pass
        assert client.complete("abc")
    stranded = [e for e in cluster.events() if isinstance(e, WorkerStats) and e.stranded_blocks]
    assert stranded == []


def test_garbage_and_a_wrong_secret_on_the_ports_disturb_nobody(running_cluster: Start) -> None:
    cluster = running_cluster("--link-backend", "none").wait_ready()
    ready = [e for e in cluster.events() if isinstance(e, WorkerReady) and e.kv_address]
    assert len(ready) == 2
    with Client(cluster) as client:
        stream = client.background("abc", max_tokens=2000)
        for event in ready:
            host, port = event.kv_address.rsplit(":", 1)
            for junk in (b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(4096), b"\x00" * 64, b""):
                with socket.create_connection((host, int(port)), timeout=10) as peer:
                    peer.sendall(junk)
                    with contextlib.suppress(ConnectionResetError):  # closed with junk unread
                        try:
                            peer.shutdown(socket.SHUT_WR)
                        except OSError as error:  # closed so already
                            if error.errno != errno.ENOTCONN:
                                raise
                        while peer.recv(4096):  # until the worker closes
                            pass
        assert stream.text()
        assert client.complete("abc")
        assert {e.worker_id for e in cluster.events() if isinstance(e, PeerRefused)} == {
            "prefill-0",
            "decode-0",
        }
    assert not [e for e in cluster.events() if isinstance(e, WorkerExited)]
