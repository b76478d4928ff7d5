"""The router's HTTP face: OpenAI API, health, metrics, events, operator commands. Decides nothing."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from cluster.control import Command, CommandSent
from cluster.events import encode_event
from cluster.openai_api import DONE, ApiError, ApiRequest, Replies, error_body, error_event, parse_request
from cluster.prometheus import PrometheusFold
from cluster.router import Router
from cluster.router_messages import Deliver, Fail, StopMatched, TokensWritten
from cluster.run_log import EVENTS_FILE, LogTail
from cluster.stop_strings import StopStrings
from cluster.units import parse_bytes
from engine.config import ModelConfig
from engine.tokenizer import Tokenizer

EVENTS_POLL_S: Final = 0.1
LABELS: Final = ("client", "steady", "burst")
"""What a client may call itself in ``x-pdconsole-label``; the label splits the metrics."""


class RouterHttp:
    """Handlers over one Router. ``model_id`` is the name clients use."""

    def __init__(self, router: Router, model_id: str, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._router = router
        self._model_id = model_id
        self._model = model
        self._tokenizer = tokenizer
        self._log_path = Path(router.spec.run_dir) / EVENTS_FILE
        self._metrics_tail = LogTail(self._log_path)
        self._metrics = PrometheusFold()
        self._started_at = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=parse_bytes(self._router.spec.profile.router.max_body),
            middlewares=[_errors_as_json],
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._prometheus)
        app.router.add_get("/events", self._events)
        app.router.add_post("/admin/command", self._command)
        return app

    # --- generation -------------------------------------------------------------------------------------------

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, is_chat=False)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, is_chat=True)

    async def _generate(self, http: web.Request, is_chat: bool) -> web.StreamResponse:
        try:
            request, label, arrived_at = await self._read(http, is_chat)
        except ApiError as error:
            self._router.refused(error.status, error.message)
            return _error(error.status, error.message, 1 if error.status == 503 else 0)
        request_id, queue = self._router.submit(
            request.prompt_token_ids,
            request.sampling,
            arrived_at,
            label=label,
            client_id=http.headers.get("x-request-id", "")[:128],
        )
        try:
            answer = _Answer(self._router, request_id, queue, request, self._tokenizer)
            replies = Replies(request_id, self._model_id, request, int(time.time()))
            if request.stream:
                return await self._stream(http, request_id, answer, replies, request)
            return await self._whole(request_id, answer, replies)
        finally:
            self._router.leave(request_id)

    async def _read(self, http: web.Request, is_chat: bool) -> tuple[ApiRequest, str, float]:
        """The checked request, its label, and when it was fully read. Raises ApiError."""
        limit = self._router.spec.profile.router.max_body
        try:
            raw = await http.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(413, f"the body is larger than {limit} (router.max_body): {error.text}") from error
        except ContentEncodingError as error:
            raise ApiError(400, f"the body is not what its Content-Encoding says: {error.message}") from error
        arrived_at = time.monotonic()
        label = http.headers.get("x-pdconsole-label", "client")
        if label not in LABELS:
            raise ApiError(400, f"x-pdconsole-label is {label!r}; allowed: {', '.join(LABELS)}")
        model = self._model
        request = parse_request(
            raw, is_chat, self._tokenizer, self._model_id, model.max_model_len, model.vocab_size
        )
        if not self._router.readiness:
            raise ApiError(503, "no worker pair is ready")
        return request, label, arrived_at

    async def _stream(
        self, http: web.Request, request_id: str, answer: "_Answer", replies: Replies, request: ApiRequest
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async for pieces in answer.pieces():
                if (
                    response is None
                ):  # headers only with the first token: a failure before it keeps its status
                    response = web.StreamResponse(
                        headers={
                            "Content-Type": "text/event-stream; charset=utf-8",
                            "Cache-Control": "no-cache",
                            "X-Request-Id": request_id,
                        }
                    )
                    await response.prepare(http)
                await response.write(b"".join(replies.chunk(text, reason) for text, reason in pieces))
                answer.written(len(pieces))
            if response is None:
                return _error(500, "the request ended without a token")
            if request.include_usage:
                await response.write(replies.usage_chunk(answer.num_tokens))
            await response.write(DONE)
        except ApiError as error:
            if response is None:
                return _error(error.status, error.message, answer.retry_after_s)
            await response.write(error_event(error.status, error.message))
        except ConnectionResetError:  # the client left between two writes
            return response if response is not None else web.Response(status=499)
        await response.write_eof()
        return response

    async def _whole(self, request_id: str, answer: "_Answer", replies: Replies) -> web.Response:
        text, reason = "", ""
        try:
            async for pieces in answer.pieces():
                text += "".join(piece for piece, _ in pieces)
                reason = pieces[-1][1]
                answer.written(len(pieces))
        except ApiError as error:
            return _error(error.status, error.message, answer.retry_after_s)
        body = replies.whole(text, reason, answer.num_tokens)
        return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": request_id})

    # --- the rest ---------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._model_id, "object": "model", "created": self._started_at, "owned_by": "pdconsole"}
        return _json({"object": "list", "data": [{**card, "max_model_len": self._model.max_model_len}]})

    async def _health(self, _: web.Request) -> web.Response:
        workers = {
            worker.worker_id: "connected" if worker.connected else "connecting"
            for worker in self._router.state.workers.values()
        }
        readiness = self._router.readiness
        status = readiness or "not ready: no worker pair has produced a token"
        return _json({"status": status, "workers": workers}, status=200 if readiness else 503)

    async def _prometheus(self, _: web.Request) -> web.Response:
        while events := self._metrics_tail.read_new():
            for event in events:
                self._metrics.fold(event)
            await asyncio.sleep(0)
        return web.Response(body=self._metrics.render(), headers={"Content-Type": self._metrics.content_type})

    async def _events(self, http: web.Request) -> web.StreamResponse:
        """The run log from ``?from=INDEX`` on, one JSON object a line; ``?follow=0`` ends at the log's end."""
        try:
            first = int(http.query.get("from", "0"))
            follow = {"0": False, "1": True}[http.query.get("follow", "1")]
        except (ValueError, KeyError):
            return _error(400, "allowed: /events?from=INDEX&follow=0|1")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        tail = LogTail(self._log_path)
        while not self._router.stopping.is_set():
            events = tail.read_new(2**18)
            lines = [encode_event(event) + b"\n" for event in events if event.index >= first]
            if lines:
                await response.write(b"".join(lines))
            if not events:
                if not follow:
                    break
                await asyncio.sleep(EVENTS_POLL_S)
        await response.write_eof()
        return response

    async def _command(self, http: web.Request) -> web.Response:
        given = http.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._router.spec.token}".encode()):
            return _error(
                401, "operator commands need the run's bearer token (file 'token' in the run directory)"
            )
        try:
            command = msgspec.json.decode(await http.read(), type=Command)
        except msgspec.DecodeError as error:
            return _error(400, f"not an operator command: {error}")
        done = await self._router.command(CommandSent(command_id=0, command=command))
        return _json({"ok": done.ok, "message": done.message}, status=200 if done.ok else 409)


class _Answer:
    """Turns one request's tokens into text pieces, one a token, and watches for its stop strings."""

    def __init__(
        self,
        router: Router,
        request_id: str,
        queue: "asyncio.Queue[Deliver | Fail]",
        request: ApiRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self._router = router
        self._request_id = request_id
        self._queue = queue
        self._stops = StopStrings(request.stop)
        self._detokenizer = tokenizer.detokenizer()
        self._eos_token_ids = tokenizer.eos_token_ids
        self._stop_matched = False
        self.num_tokens = 0
        self.retry_after_s = 0

    async def pieces(self) -> AsyncIterator[list[tuple[str, str]]]:
        """Lists of (text, finish reason), one entry a token; all that has come by now. Raises ApiError."""
        finished = False
        while not finished:
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            found: list[tuple[str, str]] = []
            for item in waiting:
                if isinstance(item, Fail):
                    if found:
                        yield found
                    self.retry_after_s = item.retry_after_s
                    raise ApiError(item.status, item.message)
                piece = self._piece(item)
                found.append(piece)
                self.num_tokens += 1
                if piece[1]:
                    finished = True
                    break
            yield found

    def _piece(self, token: Deliver) -> tuple[str, str]:
        text = "" if token.token_id in self._eos_token_ids else self._detokenizer.push(token.token_id)
        if token.finish_reason:
            text += self._detokenizer.flush()
        text, matched = self._stops.push(text)
        if matched:
            self._stop_matched = True
            return text, "stop"
        if token.finish_reason:
            text += self._stops.flush()
        return text, token.finish_reason

    def written(self, count: int) -> None:
        """``count`` more pieces reached the client."""
        self._router.apply(TokensWritten(self._request_id, count))
        if self._stop_matched:
            self._router.apply(StopMatched(self._request_id))


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unknown paths and methods answer in the API's own shape too."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = _error(error.status, f"{request.method} {request.path}: {error.reason}")
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _json(tree: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(tree), status=status, content_type="application/json")


def _error(status: int, message: str, retry_after_s: int = 0) -> web.Response:
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    return web.Response(
        body=error_body(status, message), status=status, content_type="application/json", headers=headers
    )
