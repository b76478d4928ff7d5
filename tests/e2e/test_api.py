"""What a client of the router sees, with a real cluster behind it."""

import json
from collections.abc import Callable

import httpx2
import openai
import pytest

from cluster.events import (
    CodecChanged,
    ModeChanged,
    RequestDispatched,
    RequestFinished,
    RequestRejected,
    TransferCompleted,
)
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]


def test_openai_client_streams_completion_and_chat(running_cluster: Start) -> None:
    cluster = running_cluster(model="tiny").wait_ready()
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chunks = list(
            client.completions.create(
                model="tiny", prompt="def add(a, b):\n", max_tokens=12, temperature=0, stream=True
            )
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        whole = client.completions.create(
            model="tiny", prompt="def add(a, b):\n", max_tokens=12, temperature=0
        )
        assert whole.choices[0].text == streamed
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(chunks)
        messages = [{"role": "user", "content": "Return the sum of two numbers."}]
        chat = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chat[0].choices[0].delta.role == "assistant"
        assert chat[-1].choices == []
        assert chat[-1].usage is not None
        assert chat[-1].usage.completion_tokens == len(chat) - 1
        again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
        assert again.choices[0].message.content == "".join(
            c.choices[0].delta.content or "" for c in chat[:-1]
        )
        with pytest.raises(openai.BadRequestError, match="allowed is 0 to 100"):
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="'tiny'"):
            client.completions.create(model="gpt-5", prompt="x")


def test_modes_and_codec_switch_while_serving_and_change_no_text(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    greedy = {"max_tokens": 40}
    seeded = {"max_tokens": 40, "temperature": 1.0, "seed": 7}
    with Client(cluster) as client:
        disagg = (client.complete("one two three", **greedy), client.complete("one two three", **seeded))
        assert client.complete("one two three", **greedy) == disagg[0]
        running = client.background("four five six", max_tokens=2000)
        cluster.wait_for(RequestDispatched, lambda event: event.attempt == 1 and event.prefill_worker != "")
        assert client.command({"msg": "set_mode", "mode": "colocated", "cause": "test"}).status_code == 200
        cluster.wait_for(ModeChanged, lambda event: event.mode == "colocated")
        assert (
            client.complete("one two three", **greedy),
            client.complete("one two three", **seeded),
        ) == disagg
        local = [e for e in cluster.events() if isinstance(e, RequestDispatched)][-1]
        assert (local.mode, local.prefill_worker) == ("colocated", "")
        assert len(running.text()) > 0  # began in disagg, ended after the switch
        assert client.command({"msg": "set_mode", "mode": "disagg", "cause": "test"}).json()["ok"]
        assert client.command({"msg": "set_codec", "codec": "int8", "cause": "test"}).json()["ok"]
        cluster.wait_for(CodecChanged, lambda event: event.codec == "int8")
        client.complete("one two three")
        sent = cluster.wait_for(TransferCompleted, lambda event: event.codec == "int8")
        assert sent.wire_bytes < 0.53 * sent.raw_bytes
        refused = client.command({"msg": "set_codec", "codec": "zip"})
        assert refused.status_code == 409
        assert "raw" in refused.json()["message"]


def test_bad_requests_are_refused_with_numbers_and_disturb_nobody(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    with Client(cluster) as client:
        stream = client.background("hello", max_tokens=1500)
        too_long = client.post("/v1/completions", {"prompt": [1] * 9000})
        assert too_long.status_code == 400
        assert "9000 tokens" in too_long.json()["error"]["message"]
        assert "8192 tokens" in too_long.json()["error"]["message"]
        assert httpx2.post(cluster.url + "/v1/completions", content=b"{", trust_env=False).status_code == 400
        assert client.post("/v1/completions", {"prompt": "x", "temperature": "hot"}).status_code == 400
        assert client.post("/v1/completions", {"prompt": "x" * 9_000_000}).status_code == 413
        assert client.get("/v1/nothing").json()["error"]["code"] == 404
        assert client.get("/v1/completions").json()["error"]["code"] == 405
        deep = httpx2.post(cluster.url + "/v1/completions", content=b"[" * 100_000, trust_env=False)
        assert deep.json()["error"]["code"] == 400
        zipped = {"Content-Encoding": "gzip"}
        lie = httpx2.post(cluster.url + "/v1/completions", content=b"x", headers=zipped, trust_env=False)
        assert lie.json()["error"]["code"] == 400
        cluster.wait_for(RequestRejected, lambda event: event.status == 413)
        refused = [e.status for e in cluster.events() if isinstance(e, RequestRejected)]
        assert refused.count(400) >= 3
        assert client.get("/events?from=x").status_code == 400
        assert client.post("/admin/command", {"msg": "stop_cluster"}).status_code == 401
        assert client.command({"msg": "no_such_command"}).status_code == 400
        assert client.command({"msg": "kill_worker", "worker_id": "prefill-9"}).status_code == 409
        assert stream.text()


def test_health_metrics_and_events_tell_the_same_story(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    with Client(cluster) as client:
        assert client.get("/health").json()["status"] == "ready"
        pieces = list(client.stream("hello", max_tokens=5))
        assert len(pieces) == 5
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        cluster.wait_for(RequestFinished, lambda event: event.output_tokens == 5)
        metrics = client.get("/metrics").text
        assert 'pdconsole:requests_total{outcome="finished"} 1.0' in metrics
        assert "pdconsole:time_to_first_token_seconds_count 1.0" in metrics
        log = [json.loads(line) for line in client.get("/events?follow=0&from=3").text.splitlines()]
        assert [event["index"] for event in log] == list(range(3, 3 + len(log)))
        assert any(event["type"] == "request_finished" and event["output_tokens"] == 5 for event in log)


def test_stop_strings_end_the_text_before_them(running_cluster: Start) -> None:
    cluster = running_cluster().wait_ready()
    with Client(cluster) as client:
        whole = client.complete("abc", max_tokens=20, temperature=1.0, seed=5)
        stop = whole[6:8]
        response = client.post(
            "/v1/completions",
            {
                "prompt": "abc",
                "max_tokens": 20,
                "temperature": 1.0,
                "seed": 5,
                "ignore_eos": True,
                "stop": stop,
            },
        ).json()
        assert response["choices"][0]["text"] == whole[: whole.index(stop)]
        assert response["choices"][0]["finish_reason"] == "stop"
        cluster.wait_for(RequestFinished, lambda event: event.finish_reason == "stop")
