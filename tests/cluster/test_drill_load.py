"""A drill's requests against a small HTTP server: which are sent in which round, and what is kept of each."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cluster.drill_file import drill_from_tree
from cluster.drill_load import DrillLoad
from cluster.workload import synthetic_corpus
from tests.cluster.supervision import until

GROUPS = {
    "chat": {"count": 2, "prompt_tokens": 5, "max_tokens": 3},
    "stream": {"streams": 2, "prompts": 3, "prompt_tokens": 4, "max_tokens": 2},
    "crowd": {"count": 4, "prompts": 2, "prompt_tokens": 6, "max_tokens": 2, "is_disturbance": True},
}


class Server:
    """Answers as a router does; while ``gate`` is closed no stream ends. ``refuse`` names requests that get 429."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.gone: list[str] = []
        self.refuse: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.health = 503

    async def complete(self, http: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await http.read())
        name = http.headers["x-request-id"]
        self.asked.append(name)
        self.prompts[name] = body["prompt"]
        if name in self.refuse:
            return web.Response(status=429, headers={"Retry-After": "2"})
        response = web.StreamResponse(headers={"x-request-id": f"r-{name}"})
        await response.prepare(http)
        try:
            for position in range(body["max_tokens"]):
                is_last = position == body["max_tokens"] - 1
                if is_last:
                    await self.gate.wait()
                choice = {"index": 0, "text": f"{position} ", "finish_reason": "length" if is_last else None}
                await response.write(b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone.append(name)
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def healthy(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Callable[[dict[str, Any]], DrillLoad]]]:
    served = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", served.complete)
    app.router.add_get("/health", served.healthy)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    loads: list[DrillLoad] = []

    def make(groups: dict[str, Any]) -> DrillLoad:
        tree = {"title": "t", "promise": "p", "requests": groups}
        drill = drill_from_tree(tree, "d", "d")
        loads.append(DrillLoad(drill, f"http://{host}:{port}", "m", synthetic_corpus()))
        return loads[-1]

    yield served, make
    for load in loads:
        await load.close()
    with contextlib.suppress(asyncio.CancelledError):
        await runner.cleanup()


Serving = tuple[Server, Callable[[dict[str, Any]], DrillLoad]]


async def test_undisturbed_every_prompt_once_and_disturbers_one_by_one_at_the_end(server: Serving) -> None:
    served, make = server
    load = make(GROUPS)
    await load.undisturbed()
    names = [name.removeprefix("undisturbed/") for name in served.asked]
    assert sorted(names[:5]) == ["chat/0", "chat/1", "stream/0", "stream/1", "stream/2"]
    assert names[5:] == ["crowd/0", "crowd/1"]
    assert all(request.has_finished for request in load.sent)
    answers = {request.result.text for request in load.sent if request.result is not None}
    assert answers == {"0 1 2 ", "0 1 "}


async def test_disturbed_the_same_prompts_and_streams_until_they_are_ended(server: Serving) -> None:
    served, make = server
    load = make(GROUPS)
    await load.undisturbed()
    load.begin()
    await until(
        lambda: "disturbed/stream/5" in served.asked and load.is_sent_and_answered, "all but the streams"
    )
    await load.end_streams()
    assert load.in_flight == 0
    assert sum(name.startswith("disturbed/crowd/") for name in served.asked) == 4
    for number in range(6):
        assert (
            served.prompts[f"disturbed/stream/{number}"] == served.prompts[f"undisturbed/stream/{number % 3}"]
        )
    assert served.prompts["disturbed/crowd/3"] == served.prompts["undisturbed/crowd/1"]
    disturbed = [request for request in load.sent if request.round == "disturbed"]
    assert all(request.has_finished and request.ended_at is not None for request in disturbed)


async def test_a_client_that_leaves_closes_its_connection(server: Serving) -> None:
    served, make = server
    served.gate.clear()
    load = make({"chat": GROUPS["chat"]})
    load.begin()
    await until(lambda: "disturbed/chat/0" in served.asked, "the request")
    assert await load.leave("disturbed/chat/0")
    await until(lambda: served.gone == ["disturbed/chat/0"], "its connection's end")
    served.gate.set()
    await until(lambda: load.is_sent_and_answered, "the other one's answer")
    gone, answered = load.sent
    assert (gone.left_at is not None, gone.result) == (True, None)
    assert answered.has_finished
    assert not await load.leave("disturbed/chat/1"), "it had its answer"


async def test_what_is_turned_away_keeps_when_to_come_again(server: Serving) -> None:
    served, make = server
    served.refuse = {"disturbed/chat/0"}
    load = make({"chat": GROUPS["chat"]})
    load.begin()
    await until(lambda: load.is_sent_and_answered, "both answers")
    turned, answered = load.sent
    assert turned.was_turned_away
    assert not turned.has_failed
    assert turned.result is not None
    assert turned.result.retry_after_s == 2.0
    assert answered.result is not None
    assert answered.result.request_id == "r-disturbed/chat/1"


async def test_after_it_one_request_of_each_group_but_the_disturbers(server: Serving) -> None:
    served, make = server
    load = make(GROUPS)
    await load.after()
    assert served.asked == ["after/chat/0", "after/stream/0"]


async def test_ready_is_what_the_router_says(server: Serving) -> None:
    served, make = server
    load = make(GROUPS)
    assert not await load.is_ready()
    served.health = 200
    assert await load.is_ready()
