"""Reads a completion request from HTTP, within the router's limits, and checks it. Decides nothing else."""

import asyncio
import time
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from cluster.openai_api import ApiError, ApiRequest, parse_request
from cluster.router import Router
from cluster.units import parse_bytes
from engine.config import ModelConfig
from engine.tokenizer import Tokenizer

LABELS: Final = ("client", "steady", "burst")
"""What a client may call itself in ``x-pdconsole-label``; the label splits the metrics."""
QUICK_BODY_BYTES: Final = 16 * 1024
"""A larger body is tokenized in a thread: the loop must go on answering everybody, pings included."""
MAX_READING_BYTES: Final = 64 * 2**20
"""Bodies that are being read or tokenized, of all clients together; beyond that 429."""


class RequestReader:
    """For one model; ``model_id`` is the name clients use."""

    def __init__(self, router: Router, model_id: str, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._router = router
        self._model_id = model_id
        self._model = model
        self._tokenizer = tokenizer
        self._reading_bytes = 0  # of requests that are being read or tokenized

    async def read(self, http: web.Request, is_chat: bool) -> tuple[ApiRequest, str, float]:
        """The checked request, its label, and when it was fully read. Raises ApiError."""
        most = parse_bytes(self._router.spec.profile.router.max_body)
        size = most if http.content_length is None else min(http.content_length, most)
        if self._reading_bytes + size > max(MAX_READING_BYTES, most):
            raise ApiError(
                429, f"bodies of {self._reading_bytes} bytes are being read; try again", retry_after_s=1
            )
        self._reading_bytes += size
        try:
            return await self._read_within(http, is_chat)
        finally:
            self._reading_bytes -= size

    async def _read_within(self, http: web.Request, is_chat: bool) -> tuple[ApiRequest, str, float]:
        limit = self._router.spec.profile.router.max_body
        client_timeout_s = self._router.spec.profile.router.client_timeout_s
        try:
            async with asyncio.timeout(client_timeout_s):
                raw = await http.read()
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {client_timeout_s:g} s (router.client_timeout_s)"
            ) from None
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(413, f"the body is larger than {limit} (router.max_body): {error.text}") from error
        except ContentEncodingError as error:
            raise ApiError(400, f"the body is not what its Content-Encoding says: {error.message}") from error
        arrived_at = time.monotonic()
        label = http.headers.get("x-pdconsole-label", "client")
        if label not in LABELS:
            raise ApiError(400, f"x-pdconsole-label is {label!r}; allowed: {', '.join(LABELS)}")
        model = self._model
        parse = partial(
            parse_request,
            raw,
            is_chat,
            self._tokenizer,
            self._model_id,
            model.max_model_len,
            model.vocab_size,
        )
        is_quick = len(raw) <= QUICK_BODY_BYTES
        request = parse() if is_quick else await asyncio.to_thread(parse)
        if not self._router.readiness and not self._router.may_wait:
            raise ApiError(503, "no worker pair is ready yet", retry_after_s=1)
        return request, label, arrived_at
