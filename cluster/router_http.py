"""The router's HTTP face: OpenAI API, health, metrics, events, operator commands. Decides nothing."""

import asyncio
import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from cluster.answer import Answer
from cluster.blocks_document import blocks_document
from cluster.control import Command, CommandSent
from cluster.events import TextDelivered, encode_event
from cluster.openai_api import DONE, ApiError, ApiRequest, Replies, error_body, error_event
from cluster.prometheus import PrometheusFold
from cluster.request_reader import RequestReader
from cluster.router import Router
from cluster.run_log import EVENTS_FILE, LogTail
from cluster.units import parse_bytes
from engine.config import ModelConfig
from engine.tokenizer import Tokenizer

EVENTS_POLL_S: Final = 0.1
_AT_ONCE: Final = struct.pack("ii", 1, 0)  # linger on, for 0 s: closing resets the connection


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
        self._reader = RequestReader(router, model_id, model, tokenizer)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=parse_bytes(self._router.spec.profile.router.max_body),
            middlewares=[_errors_as_json],
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._one_model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._prometheus)
        app.router.add_get("/events", self._events)
        app.router.add_post("/admin/command", self._command)
        app.router.add_get("/admin/blocks", self._blocks)
        return app

    # --- generation -------------------------------------------------------------------------------------------

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, is_chat=False)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, is_chat=True)

    async def _generate(self, http: web.Request, is_chat: bool) -> web.StreamResponse:
        try:
            request, label, arrived_at = await self._reader.read(http, is_chat)
        except ApiError as error:
            self._router.refused(error.status, error.message)
            return _refusal(error)
        request_id, queue = self._router.submit(
            request.prompt_token_ids,
            request.sampling,
            arrived_at,
            label=label,
            client_id=http.headers.get("x-request-id", "")[:128],
        )
        reason = "client_gone"  # if it is not served by then
        try:
            answer = Answer(self._router, request_id, queue, request, self._tokenizer)
            replies = Replies(request_id, self._model_id, request, int(time.time()))
            if request.stream:
                return await self._stream(http, request_id, answer, replies, request)
            return await self._whole(request_id, answer, replies)
        except _ClientTooSlow:
            reason = "client_too_slow"
            _drop(http)
            return web.Response(status=499)
        finally:
            self._router.leave(request_id, reason)

    async def _stream(
        self, http: web.Request, request_id: str, answer: Answer, replies: Replies, request: ApiRequest
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
                await self._write(response, b"".join(replies.chunk(text, reason) for text, reason in pieces))
                answer.written(len(pieces))
            if response is None:
                return _error(500, "the request ended without a token")
            if request.include_usage:
                await self._write(response, replies.usage_chunk(answer.num_tokens))
            await self._write(response, DONE)
        except ApiError as error:
            if response is None:
                return _refusal(error)
            with contextlib.suppress(ConnectionResetError):
                await self._write(response, error_event(error))
        except ConnectionResetError:  # the client left between two writes
            return response if response is not None else web.Response(status=499)
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, chunk: bytes) -> None:
        """Wait while the client has too much to read already (aiohttp keeps 64 KiB). Raises _ClientTooSlow."""
        try:
            async with asyncio.timeout(self._router.spec.profile.router.client_timeout_s):
                await response.write(chunk)
        except TimeoutError:
            raise _ClientTooSlow from None

    async def _whole(self, request_id: str, answer: Answer, replies: Replies) -> web.Response:
        text, reason = "", ""
        try:
            async for pieces in answer.pieces():
                text += "".join(piece for piece, _ in pieces)
                reason = pieces[-1][1]
                answer.written(len(pieces))
        except ApiError as error:
            return _refusal(error)
        body = replies.whole(text, reason, answer.num_tokens)
        return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": request_id})

    # --- the rest ---------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _one_model(self, http: web.Request) -> web.Response:
        asked = http.match_info["id"]
        if asked != self._model_id:
            return _error(404, f"model {asked[:128]!r} is not served here; allowed: {self._model_id!r}")
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._model_id, "object": "model", "created": self._started_at, "owned_by": "pdconsole"}
        return {**card, "max_model_len": self._model.max_model_len}

    async def _health(self, _: web.Request) -> web.Response:
        workers = {worker.worker_id: worker.state for worker in self._router.state.workers.values()}
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
        """The run log from ``?from=INDEX`` on, one JSON object a line; ``?follow=0`` ends at the log's end.

        Prompts and answers, where they are logged at all, are for the operator only.
        """
        try:
            first = int(http.query.get("from", "0"))
            follow = {"0": False, "1": True}[http.query.get("follow", "1")]
        except (ValueError, KeyError):
            return _error(400, "allowed: /events?from=INDEX&follow=0|1")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        tail = LogTail(self._log_path)
        is_operator = self._is_operator(http)
        while not self._router.stopping.is_set():
            events = tail.read_new(2**18)
            lines = [
                encode_event(event) + b"\n"
                for event in events
                if event.index >= first and (is_operator or not isinstance(event, TextDelivered))
            ]
            if lines:
                await response.write(b"".join(lines))
            if not events:
                if not follow:
                    break
                await asyncio.sleep(EVENTS_POLL_S)
        await response.write_eof()
        return response

    async def _command(self, http: web.Request) -> web.Response:
        if not self._is_operator(http):
            return _not_operator()
        try:
            command = msgspec.json.decode(await http.read(), type=Command)
        except msgspec.DecodeError as error:
            return _error(400, f"not an operator command: {error}")
        done = await self._router.command(CommandSent(command_id=0, command=command))
        return _json({"ok": done.ok, "message": done.message}, status=200 if done.ok else 409)

    async def _blocks(self, http: web.Request) -> web.Response:
        """Every held block's owner: per worker the attempts that hold blocks, and whether they are still wanted."""
        if not self._is_operator(http):
            return _not_operator()
        reports = await self._router.held_blocks()
        return _json(blocks_document(reports, self._router.state.requests))

    def _is_operator(self, http: web.Request) -> bool:
        given = http.headers.get("Authorization", "")
        return hmac.compare_digest(
            given.encode(errors="surrogateescape"), f"Bearer {self._router.spec.token}".encode()
        )


class _ClientTooSlow(Exception):
    """It did not take what was written to it within ``router.client_timeout_s``."""


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


def _drop(http: web.Request) -> None:
    """End a client's connection with what is still unsent, in the kernel too."""
    if http.transport is not None:
        http.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        http.transport.abort()


def _not_operator() -> web.Response:
    return _error(401, "operator commands need the run's bearer token (file 'token' in the run directory)")


def _error(status: int, message: str) -> web.Response:
    return _refusal(ApiError(status, message))


def _refusal(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    return web.Response(
        body=error_body(error), status=error.status, content_type="application/json", headers=headers
    )
