"""The load generator against a small HTTP server that answers as the router does, or breaks as it may."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from cluster.control import InjectBurst
from cluster.events import BurstInjected, Event, LoadStarted, LoadStopped
from cluster.load import MAX_BURST_IN_FLIGHT, LoadError, LoadGenerator
from cluster.load_client import LoadClient, RequestResult, ServerUnreachable, served_model
from cluster.profile import BurstSection, LoadSection, Profile
from cluster.workload import PlannedRequest
from engine.model_ids import ModelError

MODEL = "synthetic:nano"
FAST = LoadSection(rate_per_s=500.0, prompt_tokens=12, max_tokens=4)
REQUEST = PlannedRequest(at_s=0.0, prompt_token_ids=(1, 2, 3), max_tokens=3, temperature=0.5, seed=9)


class Server:
    """Streams ``max_tokens`` chunks to each request; ``gate`` closed holds every stream before its last chunk."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.labels: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.url = ""

    async def complete(self, http: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await http.read())
        self.bodies.append(body)
        self.labels.append(http.headers["x-pdconsole-label"])
        self.arrived.set()
        response = web.StreamResponse()
        await response.prepare(http)
        for position in range(body["max_tokens"]):
            is_last = position == body["max_tokens"] - 1
            if is_last:
                await self.gate.wait()
            choice = {"index": 0, "text": "a", "finish_reason": "length" if is_last else None}
            await response.write(b": comment\ndata: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n")
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", served.complete)
    app.router.add_get("/v1/models", served.models)
    async with serving(app) as served.url:
        yield served


class Generator:
    """A LoadGenerator with what it said."""

    def __init__(self, url: str, profile: Profile) -> None:
        self.events: list[Event] = []
        self.results: list[RequestResult] = []
        self.load = LoadGenerator(url, profile, self.events.append, MODEL, on_result=self.results.append)


@pytest.fixture
async def generator(server: Server) -> AsyncIterator[Generator]:
    profile = Profile(load={"fast": FAST, "few": msgspec.structs.replace(FAST, max_in_flight=3)})
    made = Generator(server.url, profile)
    yield made
    await made.load.close()


async def sent(generator: LoadGenerator, count: int) -> None:
    while generator.counts.sent < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_load_sends_what_its_section_says_and_finishes_it(
    server: Server, generator: Generator
) -> None:
    await generator.load.start("fast", "key s")
    await sent(generator.load, 20)
    await generator.load.stop("key s")
    assert await generator.load.drain(10.0)
    counts = generator.load.counts
    assert counts.sent == counts.finished == len(server.bodies) == len(generator.results)
    assert counts.failed == counts.cancelled == counts.skipped == 0
    for body in server.bodies:
        assert len(body["prompt"]) == 12  # type: ignore[arg-type]
        assert body | {"prompt": 0, "seed": 0} == {
            "model": MODEL,
            "prompt": 0,
            "max_tokens": 4,
            "temperature": 0.0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
        }
    assert set(server.labels) == {"steady"}
    for result in generator.results:
        assert len(result.itl_s) == 3
        assert 0.0 < result.ttft_s <= result.e2el_s
        assert result.ttft_s + sum(result.itl_s) == pytest.approx(result.e2el_s)


async def test_start_and_stop_leave_their_events_with_their_cause(generator: Generator) -> None:
    await generator.load.start("fast", "operator, key s")
    assert generator.load.running == "fast"
    await generator.load.stop("drill")
    await generator.load.stop("again")  # nothing runs: nothing is said
    started, stopped = generator.events
    assert isinstance(started, LoadStarted)
    assert (started.name, started.cause) == ("fast", "operator, key s")
    assert "500 requests/s" in started.detail
    assert isinstance(stopped, LoadStopped)
    assert (stopped.name, stopped.cause) == ("fast", "drill")
    assert 0.0 < started.at <= stopped.at <= time.monotonic()


async def test_a_second_load_takes_the_place_of_the_first(generator: Generator) -> None:
    await generator.load.start("fast", "a")
    await generator.load.start("few", "b")
    assert [type(event) for event in generator.events] == [LoadStarted, LoadStopped, LoadStarted]
    assert generator.load.running == "few"


async def test_an_unknown_load_names_those_there_are(generator: Generator) -> None:
    with pytest.raises(LoadError, match="load 'fats' is unknown; allowed: fast, few"):
        await generator.load.start("fats", "")
    assert generator.events == []


async def test_an_unknown_model_is_told_at_start_and_the_generator_still_closes(server: Server) -> None:
    generator = LoadGenerator(server.url, Profile(), [].append, "no-such-model")
    with pytest.raises(ModelError, match="no-such-model"):
        await generator.start("steady", "")
    await generator.close()


async def test_arrivals_beyond_the_limit_in_flight_are_skipped_and_counted(
    server: Server, generator: Generator
) -> None:
    server.gate.clear()
    await generator.load.start("few", "")
    while generator.load.counts.skipped < 5:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert generator.load.in_flight == generator.load.counts.sent == 3
    server.gate.set()
    await generator.load.stop("")
    assert await generator.load.drain(10.0)


async def test_stop_lets_what_is_in_flight_finish(server: Server, generator: Generator) -> None:
    server.gate.clear()
    await generator.load.start("few", "")
    await sent(generator.load, 3)
    await generator.load.stop("")
    assert not await generator.load.drain(0.05)
    server.gate.set()
    assert await generator.load.drain(10.0)
    assert generator.load.counts.finished == 3


async def test_stop_with_cancel_drops_what_is_in_flight(server: Server, generator: Generator) -> None:
    server.gate.clear()
    await generator.load.start("few", "")
    await sent(generator.load, 3)
    await server.arrived.wait()
    await generator.load.stop("", cancel=True)
    assert generator.load.in_flight == 0
    assert (generator.load.counts.cancelled, generator.load.counts.finished) == (3, 0)


async def test_a_burst_sends_its_prompts_at_once_beside_the_load(
    server: Server, generator: Generator
) -> None:
    await generator.load.burst(InjectBurst(prompts=3, prompt_tokens=77, max_tokens=2, cause="key b"))
    await generator.load.burst(InjectBurst(prompts=3, prompt_tokens=77, max_tokens=2, cause="key b"))
    assert await generator.load.drain(10.0)
    assert server.labels == ["burst"] * 6
    prompts = {tuple(body["prompt"]) for body in server.bodies}  # type: ignore[arg-type]
    assert len(prompts) == 6
    assert {len(prompt) for prompt in prompts} == {77}
    event = generator.events[0]
    assert isinstance(event, BurstInjected)
    assert (event.prompts, event.prompt_tokens, event.cause) == (3, 77, "key b")


async def test_a_load_with_bursts_sends_them_in_its_rhythm_until_it_stops(server: Server) -> None:
    mixed = msgspec.structs.replace(FAST, burst_every_s=0.05)
    profile = Profile(load={"mixed": mixed}, burst=BurstSection(prompts=2, prompt_tokens=50, max_tokens=1))
    generator = Generator(server.url, profile)
    began_at = time.monotonic()
    await generator.load.start("mixed", "")
    while server.labels.count("burst") < 6:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert time.monotonic() - began_at >= 0.025 + 2 * 0.05  # the third burst is not early
    await generator.load.stop("")
    assert await generator.load.drain(10.0)
    bursts = [event for event in generator.events if isinstance(event, BurstInjected)]
    assert server.labels.count("burst") == 2 * len(bursts)
    assert {event.cause for event in bursts} == {"load mixed"}
    assert "steady" in server.labels
    await generator.load.close()


async def test_streams_send_their_next_request_when_one_is_answered(server: Server) -> None:
    profile = Profile(load={"streams": msgspec.structs.replace(FAST, streams=3, rate_per_s=0.001)})
    generator = Generator(server.url, profile)
    server.gate.clear()
    await generator.load.start("streams", "")
    await sent(generator.load, 3)
    for _ in range(50):
        await asyncio.sleep(0)
    assert generator.load.in_flight == generator.load.counts.sent == 3, "none is answered yet"
    server.gate.set()
    await sent(generator.load, 12)
    await generator.load.stop("")
    assert await generator.load.drain(10.0)
    assert generator.load.counts.finished == generator.load.counts.sent
    assert generator.load.counts.failed == generator.load.counts.cancelled == 0
    started = next(event for event in generator.events if isinstance(event, LoadStarted))
    assert started.detail.startswith("3 streams, ")
    await generator.load.close()


async def test_a_burst_waits_for_the_one_before(server: Server) -> None:
    mixed = msgspec.structs.replace(FAST, streams=1, burst_every_s=0.01)
    profile = Profile(load={"mixed": mixed}, burst=BurstSection(prompts=2, prompt_tokens=50, max_tokens=1))
    generator = Generator(server.url, profile)
    server.gate.clear()
    await generator.load.start("mixed", "")
    await sent(generator.load, 3)
    await asyncio.sleep(0.05)  # five bursts would be due
    assert generator.load.counts.sent == 3
    server.gate.set()
    await sent(generator.load, 6)
    await generator.load.close()


async def test_bursts_are_bounded(server: Server, generator: Generator) -> None:
    server.gate.clear()
    await generator.load.burst(InjectBurst(prompts=2, prompt_tokens=4))
    with pytest.raises(LoadError, match="2 burst requests are open; allowed are 256"):
        await generator.load.burst(InjectBurst(prompts=MAX_BURST_IN_FLIGHT - 1, prompt_tokens=4))
    assert generator.load.in_flight == 2


async def test_lateness_of_the_client_is_measured(generator: Generator) -> None:
    assert generator.load.lag_p99_s == 0.0
    await generator.load.start("fast", "")
    await sent(generator.load, 1)
    time.sleep(0.1)  # noqa: ASYNC251  (the client is held up: that is what is measured)
    await sent(generator.load, 3)
    await generator.load.stop("")
    assert 0.05 < generator.load.lag_p99_s < 5.0


async def test_served_model_is_what_the_router_lists(server: Server) -> None:
    assert (await served_model(server.url + "/")).id == MODEL


async def failing(handler: object) -> str:
    """The kind of failure that a server with this handler causes."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)  # type: ignore[arg-type]
    async with serving(app) as url:
        client = LoadClient(url, MODEL)
        try:
            result = await client.send(REQUEST, "steady")
        finally:
            await client.close()
    assert (result.ttft_s, result.itl_s) == (0.0, ())
    return result.failure


def streaming(*lines: bytes, cut: bool = False) -> object:
    async def handler(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for line in lines:
            await response.write(line)
        if cut:
            assert http.transport is not None
            http.transport.abort()
        return response

    return handler


TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


async def test_every_failure_has_its_kind() -> None:
    async def full(_: web.Request) -> web.Response:
        return web.Response(status=429)

    assert await failing(full) == "http_429"
    assert await failing(streaming(TOKEN, b'data: {"error": {"message": "gone"}}\n\n')) == "error_event"
    assert await failing(streaming(TOKEN, b"data: {]\n\n")) == "bad_chunk"
    assert await failing(streaming(TOKEN, TOKEN)) == "broken_stream"  # a clean end, but not of the completion
    assert await failing(streaming(TOKEN, b"data: [DONE]\n\n")) == "broken_stream"
    assert await failing(streaming(TOKEN, cut=True)) == "broken_stream"
    assert await failing(streaming(b"data: " + b"x" * 2**20)) == "bad_chunk"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "the prompt is too long", "code": 400}}', "the prompt is too long"),
        (b'{"error": "no"}', ""),
        (b"<html>", ""),
        (b"\xff\xfe", ""),
        (b'{"error": {"message": "' + b"x" * 2**20 + b'"}}', ""),
    ],
)
async def test_an_error_keeps_its_status_and_what_the_server_says(body: bytes, said: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, body=body)

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    async with serving(app) as url:
        client = LoadClient(url, MODEL)
        result = await client.send(REQUEST, "steady")
        await client.close()
    assert (result.failure, result.complaint) == ("http_400", said)


async def test_nobody_there_is_a_failure_not_a_crash(server: Server) -> None:
    async with serving(web.Application()) as url:
        pass
    client = LoadClient(url, MODEL)
    assert (await client.send(REQUEST, "steady")).failure == "connect"
    await client.close()
    with pytest.raises(ServerUnreachable, match=url):
        await served_model(url)
