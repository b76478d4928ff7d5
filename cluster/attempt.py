"""One attempt of a request inside a worker. The engine knows it by ``key``, so attempts never mix."""

from cluster.control import AbortRequest, StartDecode, StartLocal, StartPrefill
from engine.request import Request

AttemptMessage = StartPrefill | StartDecode | StartLocal
"""What starts an attempt on a worker."""


def attempt_key(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def split_key(key: str) -> tuple[str, int]:
    """Request id and attempt of a key; attempt 0 for what is no key of an attempt."""
    request_id, sign, attempt = key.rpartition("#")
    return (request_id, int(attempt)) if sign and attempt.isdecimal() else (key, 0)


def key_of(message: AttemptMessage | AbortRequest) -> str:
    return attempt_key(message.request_id, message.attempt)


def engine_request(message: AttemptMessage) -> Request:
    """The request as the engine takes it. Raises ValueError for what it cannot take."""
    outputs = message.output_token_ids if isinstance(message, StartLocal) else ()
    return Request(key_of(message), message.prompt_token_ids, message.sampling, outputs)
