"""What clients meet at a real router whose workers are moved by the test: waiting, cuts, slow readers, operators."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.control import AbortRequest, BlockHolder, BlocksReported, ReportBlocks
from cluster.events import (
    Event,
    NoteAdded,
    RequestCancelled,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    TextDelivered,
)
from cluster.run_log import EVENTS_FILE, write_events
from engine.tokenizer import ByteTokenizer
from tests.cluster.router_harness import MAX_MODEL_LEN, TOKEN, HandWorker, RouterHarness, profile
from tests.cluster.supervision import until

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def worker() -> AsyncIterator[HandWorker]:
    made = HandWorker("decode-0")
    await made.listen()
    yield made
    await made.close()


def client(harness: RouterHarness) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=harness.url, trust_env=False, timeout=30.0)


def read_all(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


async def texts(http: httpx2.AsyncClient, **fields: Any) -> list[str]:
    """The pieces of a streamed answer, one a token."""
    async with http.stream("POST", "/v1/completions", json={**BODY, **fields, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]


async def test_a_model_is_found_by_its_name_alone(tmp_path: Path) -> None:
    async with RouterHarness.run(tmp_path, profile(), has_served=False) as harness, client(harness) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert (await http.get(f"/v1/models/{card['id']}")).json() == card
        for other in ("nope", "synthetic:nano/x", "%00"):
            missing = await http.get(f"/v1/models/{other}")
            error = missing.json()["error"]
            assert (missing.status_code, error["code"]) == (404, 404)
            assert "is not served here; allowed: 'synthetic:nano'" in error["message"]


async def test_before_the_first_ready_pair_requests_are_turned_away(tmp_path: Path) -> None:
    async with RouterHarness.run(tmp_path, profile(), has_served=False) as harness, client(harness) as http:
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        rejected = await harness.logged(RequestRejected)
        assert (rejected.status, rejected.reason) == (503, "no worker pair is ready yet")


async def test_a_request_waits_for_the_only_worker_to_come_back(tmp_path: Path, worker: HandWorker) -> None:
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        harness.list_workers(coming=("decode-0",))
        answer = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(
            lambda: harness.http.server is not None and len(harness.http.server.connections) == 1, "it"
        )
        assert (await http.get("/health")).status_code == 503
        harness.list_workers(worker)
        start = await worker.started()
        worker.say_tokens(start, 0, 6, "length")
        assert (await answer).json()["choices"][0]["text"] == "abcdef"


async def test_a_cut_request_link_is_a_migration_without_gap_or_repeat(
    tmp_path: Path, worker: HandWorker
) -> None:
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        harness.list_workers(worker)
        answer = asyncio.create_task(texts(http, max_tokens=6))
        worker.say_tokens(await worker.started(), 0, 4)
        await worker.cut()
        again = await worker.started(2)
        delivered = len(again.output_token_ids)
        assert again.output_token_ids == tuple(range(97, 97 + delivered))
        worker.say_tokens(worker.starts()[0], delivered, 1)  # of the attempt before the cut: dropped
        worker.say_tokens(again, delivered, 6 - delivered, "length")
        assert await answer == list("abcdef")
        migrated = await harness.logged(RequestMigrated)
        assert migrated.delivered_tokens == delivered
        await harness.logged(RequestFinished, lambda e: e.output_tokens == 6)
        assert worker.num_connections == 2


@pytest.mark.parametrize(
    "line",
    [b"this is no message\n", b'{"msg": "shutdown"}\n', b"\x00" * 100 + b"\n"],
    ids=["text", "out of place", "zeros"],
)
async def test_nonsense_on_the_request_link_is_as_good_as_a_cut(
    tmp_path: Path, worker: HandWorker, line: bytes
) -> None:
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        harness.list_workers(worker)
        answer = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.started()
        worker.write(line)
        worker.say_tokens(await worker.started(2), 0, 6, "length")
        assert (await answer).json()["choices"][0]["text"] == "abcdef"


async def test_a_client_that_does_not_read_is_dropped_and_holds_little_until_then(
    tmp_path: Path, worker: HandWorker
) -> None:
    tokens = 20_000  # some megabytes of events
    async with RouterHarness.run(tmp_path, profile(client_timeout_s=1.0)) as harness, client(harness) as http:
        harness.list_workers(worker)
        host, _, port = harness.url.removeprefix("http://").partition(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            body = json.dumps({**BODY, "max_tokens": tokens, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            start = await worker.started()
            worker.say_tokens(start, 0, tokens // 2)
            peak = 0

            def is_dropped() -> bool:
                nonlocal peak
                peak = max(peak, harness.buffered_bytes())
                return bool(harness.of(RequestCancelled))

            await until(is_dropped, "the end of the slow client")
            cancelled = await harness.logged(RequestCancelled)
            assert (cancelled.phase, cancelled.reason) == ("decode", "client_too_slow")
            assert 0 < peak < 192 * 1024
            await until(lambda: any(isinstance(m, AbortRequest) for m in worker.told), "the abort")
            slow.settimeout(30.0)
            with pytest.raises(ConnectionResetError):
                read_all(slow)
        other = asyncio.create_task(http.post("/v1/completions", json=BODY))
        worker.say_tokens(await worker.started(2), 0, 6, "length")
        assert (await other).status_code == 200


async def test_a_body_that_does_not_come_is_answered_408(tmp_path: Path) -> None:
    async with RouterHarness.run(tmp_path, profile(client_timeout_s=0.3)) as harness:
        host, _, port = harness.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30.0)
        assert b" 408 " in answer
        writer.close()
        rejected = await harness.logged(RequestRejected)
        assert "did not come within 0.3 s (router.client_timeout_s)" in rejected.reason


async def test_a_full_queue_is_answered_429_and_those_accepted_are_served(
    tmp_path: Path, worker: HandWorker
) -> None:
    async with RouterHarness.run(tmp_path, profile(max_queue=3)) as harness, client(harness) as http:
        harness.list_workers(coming=("decode-0",))
        answers = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(10)]
        await until(lambda: sum(answer.done() for answer in answers) == 7, "seven refusals")
        refused = [answer.result() for answer in answers if answer.done()]
        assert {(r.status_code, r.headers["Retry-After"]) for r in refused} == {(429, "1")}
        harness.list_workers(worker)
        for number in range(1, 4):
            worker.say_tokens(await worker.started(number), 0, 6, "length")
        statuses = sorted([(await answer).status_code for answer in answers])
        assert statuses == [200] * 3 + [429] * 7


async def test_held_blocks_are_told_to_the_operator_only(tmp_path: Path, worker: HandWorker) -> None:
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        harness.list_workers(worker)
        for wrong in ("", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
            headers = {"Authorization": wrong} if wrong else {}
            assert (await http.get("/admin/blocks", headers=headers)).status_code == 401
            assert (await http.post("/admin/command", headers=headers, json={})).status_code == 401
        reader, writer = await asyncio.open_connection(*harness.url.removeprefix("http://").split(":"))
        writer.write(b"GET /admin/blocks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readuntil(b"\r\n")
        writer.close()
        await until(lambda: worker.num_connections == 1, "the router's connection")
        asking = asyncio.create_task(http.get("/admin/blocks", headers={"Authorization": f"Bearer {TOKEN}"}))
        await until(lambda: any(isinstance(m, ReportBlocks) for m in worker.told), "the question")
        (asked,) = [m for m in worker.told if isinstance(m, ReportBlocks)]
        holder = BlockHolder(
            request_id="r", attempt=1, status="running", blocks=2, age_s=0.5, owner="decode", peer="prefill-0"
        )
        worker.say(
            BlocksReported(
                report_id=asked.report_id,
                worker_id="decode-0",
                total_blocks=10,
                held_blocks=2,
                stranded_blocks=0,
                holders=(holder,),
            )
        )
        document = (await asking).json()
        assert document["workers"][0]["holders"][0]["peer"] == "prefill-0"
        assert document["workers"][0]["holders"][0]["is_wanted"] is False


async def test_a_huge_prompt_is_refused_at_once_and_a_long_one_holds_up_nobody(
    tmp_path: Path, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        harness.list_workers(worker)
        huge = await http.post("/v1/completions", json={**BODY, "prompt": "x" * 7_000_000})
        assert huge.status_code == 400
        assert f"7000000 characters, more than any {MAX_MODEL_LEN} tokens" in huge.json()["error"]["message"]
        tokenizing = threading.Event()
        go_on = threading.Event()
        encode = ByteTokenizer.encode

        def slow_encode(tokenizer: ByteTokenizer, text: str) -> list[int]:
            tokenizing.set()
            assert go_on.wait(30.0)
            return encode(tokenizer, text)

        monkeypatch.setattr(ByteTokenizer, "encode", slow_encode)
        long = asyncio.create_task(http.post("/v1/completions", json={**BODY, "prompt": "x" * 50_000}))
        await until(tokenizing.is_set, "the tokenizer")
        assert (await http.get("/health")).status_code == 200  # while it is at work
        go_on.set()
        worker.say_tokens(await worker.started(), 0, 6, "length")
        assert (await long).json()["usage"]["prompt_tokens"] == 50_000


async def test_bodies_that_are_being_read_are_bounded_together(tmp_path: Path) -> None:
    run_profile = profile(max_body="40MiB", client_timeout_s=30.0)
    async with RouterHarness.run(tmp_path, run_profile) as harness, client(harness) as http:
        host, _, port = harness.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 41943040\r\n\r\n{"
        writer.write(head)
        await until(
            lambda: harness.http.server is not None and len(harness.http.server.connections) == 1, "it"
        )
        refused = await http.post("/v1/completions", content=b"{" * 30_000_000)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert (await http.post("/v1/completions", json={"prompt": ""})).status_code == 400, (
            "a small one is read"
        )
        writer.close()


async def test_texts_in_the_log_are_read_by_the_operator_only(tmp_path: Path) -> None:
    events: list[Event] = [
        NoteAdded(at=1.0, text="a note", index=0),
        TextDelivered(at=2.0, request_id="r", text="an answer", prompt="a prompt", index=1),
    ]
    write_events(tmp_path / EVENTS_FILE, events)
    async with RouterHarness.run(tmp_path, profile()) as harness, client(harness) as http:
        everybody = (await http.get("/events?follow=0")).text
        assert "a note" in everybody
        assert "an answer" not in everybody
        assert "a prompt" not in everybody
        operator = await http.get("/events?follow=0", headers={"Authorization": f"Bearer {TOKEN}"})
        assert "an answer" in operator.text
