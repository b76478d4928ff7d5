"""A real router with its HTTP side in the test's own process, and workers whose engine is the test.

Sockets, handshakes and messages are real; only what a worker would compute is said by hand.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from cluster.control import (
    AbsentWorker,
    AnyMessage,
    Events,
    RouterSpec,
    SetWorkers,
    Shutdown,
    StartLocal,
    TokenProduced,
    Tokens,
    WorkerAddress,
)
from cluster.events import Event
from cluster.http_listener import bind_http, url_of
from cluster.json_stream import MAX_LINE_BYTES, JsonStream
from cluster.profile import ClusterSection, ModelSection, Profile, RouterSection
from cluster.router import Router
from cluster.router_http import RouterHttp
from cluster.worker_link import REQUEST_CHANNEL
from engine.config import ModelConfig
from engine.model_ids import resolve_model
from engine.tokenizer import load_tokenizer
from tests.cluster.supervision import until
from transport.auth import ServerHandshake, authenticate_stream

SECRET = "5e" * 32
TOKEN = "an-operator's-token"
MAX_MODEL_LEN = 100_000
Kind = TypeVar("Kind")


def profile(**router: Any) -> Profile:
    """One decode worker that prefills by itself, so that a worker gets a StartLocal for each request."""
    return Profile(
        model=ModelSection(id="synthetic:nano"),
        cluster=ClusterSection(mode="colocated", prefill=0, decode=1),
        router=RouterSection(port=0, **router),
    )


class HandWorker:
    """Listens as a worker does; keeps what it was told; says what the test wants."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.told: list[AnyMessage] = []
        self.num_connections = 0
        self._stream: JsonStream | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=MAX_LINE_BYTES)

    @property
    def address(self) -> WorkerAddress:
        assert self._server is not None
        return WorkerAddress(
            worker_id=self.worker_id,
            role=self.worker_id.partition("-")[0],
            control_host="127.0.0.1",
            control_port=self._server.sockets[0].getsockname()[1],
            kv_host="127.0.0.1",
            kv_port=1,
            total_blocks=100_000,
            block_size=16,
            max_num_seqs=8,
            max_model_len=MAX_MODEL_LEN,
            kv_bytes_per_token=1,
            fingerprint="f",
        )

    def starts(self) -> list[StartLocal]:
        """Attempts that are no readiness probe's."""
        return [m for m in self.told if isinstance(m, StartLocal) and m.prompt_token_ids != (1, 2)]

    async def started(self, count: int = 1) -> StartLocal:
        await until(lambda: len(self.starts()) >= count, f"attempt {count}")
        return self.starts()[count - 1]

    def say(self, message: AnyMessage) -> None:
        assert self._stream is not None
        self._stream.send(message)

    def say_tokens(self, start: StartLocal, first: int, count: int, finish: str = "") -> None:
        """Token ``n`` of an answer is always ``97 + n % 26``."""
        last = first + count - 1
        self.say(
            Tokens(
                tokens=tuple(
                    TokenProduced(
                        request_id=start.request_id,
                        attempt=start.attempt,
                        position=n,
                        token_id=97 + n % 26,
                        at=0.0,
                        finish_reason=finish if n == last else "",
                    )
                    for n in range(first, first + count)
                )
            )
        )

    def write(self, line: bytes) -> None:
        """Say something that is no message."""
        assert self._writer is not None
        self._writer.write(line)

    async def cut(self) -> None:
        """Close the connection; go on listening."""
        assert self._stream is not None
        await self._stream.close()

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await authenticate_stream(
            reader, writer, ServerHandshake(bytes.fromhex(SECRET), "worker", REQUEST_CHANNEL)
        )
        self._writer = writer
        stream = self._stream = JsonStream(reader, writer)
        self.num_connections += 1
        while (message := await stream.receive()) is not None:
            self.told.append(message)
            if isinstance(message, StartLocal) and message.prompt_token_ids == (1, 2):  # a readiness probe
                self.say_tokens(message, 0, message.sampling.max_tokens, "length")
        await stream.close()


class RouterHarness:
    """The supervisor's end of one router."""

    def __init__(self) -> None:
        self.url = ""
        self.events: list[Event] = []
        self.http: web.AppRunner
        self.running: asyncio.Task[None]
        self._parent: JsonStream

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    async def logged(self, kind: type[Kind], matches: Callable[[Kind], bool] = lambda _: True) -> Kind:
        await until(lambda: any(matches(event) for event in self.of(kind)), kind.__name__)
        return next(event for event in self.of(kind) if matches(event))

    def list_workers(self, *workers: HandWorker, coming: tuple[str, ...] = ()) -> None:
        self._parent.send(
            SetWorkers(
                workers=tuple(worker.address for worker in workers),
                absent=tuple(
                    AbsentWorker(worker_id=name, role=name.partition("-")[0], is_coming=True)
                    for name in coming
                ),
            )
        )

    def buffered_bytes(self) -> int:
        """The most that one client's connection holds unsent in this process."""
        assert self.http.server is not None
        transports = [handler.transport for handler in self.http.server.connections]
        return max((t.get_write_buffer_size() for t in transports if t is not None), default=0)

    async def _listen(self) -> None:
        while (message := await self._parent.receive()) is not None:
            if isinstance(message, Events):
                self.events += message.events

    @classmethod
    @contextlib.asynccontextmanager
    async def run(
        cls, run_dir: Path, run_profile: Profile, *, has_served: bool = True
    ) -> AsyncIterator["RouterHarness"]:
        harness = cls()
        ours, theirs = socket.socketpair()
        harness._parent = await JsonStream.from_socket(ours)
        listener = bind_http("127.0.0.1", 0)
        spec = RouterSpec(
            run="test",
            run_dir=str(run_dir),
            secret=SECRET,
            token=TOKEN,
            profile=run_profile,
            listen_fd=listener.fileno(),
            mode=run_profile.cluster.mode,
            codec="raw",
            has_served=has_served,
        )
        router = Router(spec, await JsonStream.from_socket(theirs))
        source = resolve_model(run_profile.model.id)
        model = _longer(source.config)
        app = RouterHttp(router, run_profile.model.id, model, load_tokenizer(source)).app()
        harness.http = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await harness.http.setup()
        await web.SockSite(harness.http, listener).start()
        harness.url = url_of(listener)
        running = harness.running = asyncio.create_task(router.run())
        listening = asyncio.create_task(harness._listen())
        try:
            yield harness
        finally:
            harness._parent.send(Shutdown())
            await asyncio.wait({running})
            await harness.http.cleanup()
            listening.cancel()
            await asyncio.wait({listening})
            await harness._parent.close()
            running.result()


def _longer(config: ModelConfig) -> ModelConfig:
    """The same model with room for very long answers."""
    return ModelConfig(
        **{name: getattr(config, name) for name in config.__dataclass_fields__ if name != "max_model_len"},
        max_model_len=MAX_MODEL_LEN,
    )
