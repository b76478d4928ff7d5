"""One streamed completion as a client sees it: sent, timed chunk by chunk, and every failure given a kind.

Knows the router's public HTTP interface only, nothing of the cluster behind it.
"""

import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from cluster.workload import PlannedRequest

LABEL_HEADER: Final = "x-pdconsole-label"
"""Tells the run log who sent a request: ``steady`` or ``burst``."""

ID_HEADER: Final = "x-request-id"
"""The client's own name for a request going out, the router's coming back."""

_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=300.0)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request by this client's clock. ``failure`` "" means that a whole stream came, else it is the kind:
    connect, timeout, http_<status>, error_event, bad_chunk, broken_stream.

    ``num_chunks`` is the number of tokens: the router sends one a chunk. ``retry_after_s`` None: the answer named no
    time."""

    label: str
    ttft_s: float = 0.0  # sent -> first chunk with a choice
    itl_s: tuple[float, ...] = ()  # gaps between chunks with a choice
    e2el_s: float = 0.0  # sent -> last chunk with a choice
    failure: str = ""
    request_id: str = ""  # the router's, "" where the answer named none
    text: str = ""
    finish_reason: str = ""
    num_chunks: int = 0
    retry_after_s: float | None = None
    complaint: str = ""  # the message of an answer that is an error, "" where it had none


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""


class _Chunk(msgspec.Struct):
    """The part of a chunk that is measured."""

    choices: list[_Choice] = []
    error: Any = None


class ServedModel(msgspec.Struct):
    """A row of ``/v1/models``. ``max_model_len`` 0: the server does not tell."""

    id: str
    max_model_len: int = 0


class _Refusal(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Refusal


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


_MAX_ERROR_BYTES: Final = 16_384

_chunk_decoder: Final = msgspec.json.Decoder(_Chunk)


class ServerUnreachable(Exception):
    """No router answers at a URL; the message says how it failed."""


class LoadClient:
    """Sends completions to the router at ``url``. Belongs to one event loop; ``close`` it there."""

    def __init__(self, url: str, model_id: str) -> None:
        self._completions_url = url.rstrip("/") + "/v1/completions"
        self._model_id = model_id
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: PlannedRequest, label: str, client_id: str = "") -> RequestResult:
        """Send one request and read its stream to the end. Never raises for what the server or the network does.

        ``client_id`` is the client's own name for it, which the run log keeps.
        """
        try:
            return await self._stream(request, label, client_id)
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientConnectorError:
            failure = "connect"
        except aiohttp.ClientError:
            failure = "broken_stream"
        except (msgspec.DecodeError, HttpProcessingError):  # the latter for a line without end
            failure = "bad_chunk"
        return RequestResult(label, failure=failure)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _stream(self, request: PlannedRequest, label: str, client_id: str) -> RequestResult:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=0))
        sent_at = time.monotonic()
        chunk_at: list[float] = []
        pieces: list[str] = []
        finish_reason = ""
        headers = {"content-type": "application/json", LABEL_HEADER: label}
        if client_id:
            headers[ID_HEADER] = client_id
        async with self._session.post(
            self._completions_url, data=_request_body(request, self._model_id), headers=headers
        ) as response:
            request_id = response.headers.get(ID_HEADER, "")
            if response.status != 200:
                retry_after_s = _seconds(response.headers.get("Retry-After", ""))
                return RequestResult(
                    label,
                    failure=f"http_{response.status}",
                    request_id=request_id,
                    retry_after_s=retry_after_s,
                    complaint=await _complaint(response),
                )
            async for chunk in _chunks(response):
                if chunk.error is not None:
                    return RequestResult(label, failure="error_event", request_id=request_id)
                if chunk.choices:
                    chunk_at.append(time.monotonic())
                    pieces.append(chunk.choices[0].text)
                    finish_reason = finish_reason or chunk.choices[0].finish_reason or ""
        if not finish_reason:  # the stream ended, the completion did not
            return RequestResult(label, failure="broken_stream", request_id=request_id)
        return RequestResult(
            label,
            ttft_s=chunk_at[0] - sent_at,
            itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(chunk_at)),
            e2el_s=chunk_at[-1] - sent_at,
            request_id=request_id,
            text="".join(pieces),
            finish_reason=finish_reason,
            num_chunks=len(pieces),
        )


async def served_model(url: str) -> ServedModel:
    """The model that the router at ``url`` serves. Raises ServerUnreachable."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
            session.get(url.rstrip("/") + "/v1/models") as response,
        ):
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=_ModelList).data[0]
    except aiohttp.ClientConnectorError as error:
        why = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
        raise ServerUnreachable(f"no router answers at {url}: {why}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerUnreachable(f"no router answers at {url}: {str(error) or 'timeout'}") from error
    except (msgspec.DecodeError, IndexError, ValueError) as error:
        raise ServerUnreachable(f"{url}/v1/models is not a list of models: {error}") from error


def _request_body(request: PlannedRequest, model_id: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": model_id,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "stream": True,
        }
    )


def _seconds(text: str) -> float | None:
    """What a Retry-After in seconds says; None for a date or nothing."""
    return float(text) if text.isascii() and text.isdigit() else None


async def _complaint(response: aiohttp.ClientResponse) -> str:
    """What an error in the API's shape says; "" for another body, a cut one, or one beyond the bound."""
    body = b""
    try:
        while len(body) < _MAX_ERROR_BYTES:
            piece = await response.content.read(_MAX_ERROR_BYTES - len(body))
            if not piece:
                return msgspec.json.decode(body, type=_ErrorBody).error.message
            body += piece
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        pass  # the status was told, and it is what counts
    return ""


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[_Chunk]:
    """The chunks of a server-sent event stream up to ``[DONE]``; comments and other fields are passed over."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield _chunk_decoder.decode(data)
