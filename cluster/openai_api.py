"""The OpenAI request and response shapes the router speaks. Pure: bytes and token ids in, bytes out; no HTTP.

Fields that would change the answer but are not supported are refused, never ignored.
"""

import secrets
from typing import Any, Final

import msgspec

from engine.request import SamplingParams
from engine.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS: Final = 16
DEFAULT_CHAT_TOKENS: Final = 256

_UNSUPPORTED: Final[dict[str, Any]] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "logprobs": None,
    "top_logprobs": None,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "tools": [],
    "functions": [],
    "response_format": {"type": "text"},
    "min_tokens": 0,
}
"""Field -> the only value that is accepted (None and absence always are)."""


class ApiError(Exception):
    """A request that is refused: ``status`` and one line for the client.

    ``param`` is the field at fault, where it is one field; ``retry_after_s`` 0 = nothing is said of coming again.
    """

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class _Stream(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _Stream | None = None
    ignore_eos: bool | None = None


class _CompletionBody(_Body):
    prompt: str | list[int | str | list[int]] = ""


CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Those of the OpenAI API; what a model makes of them is its chat template's business."""


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = ""


class _ChatBody(_Body):
    messages: list[_ChatMessage] = []
    max_completion_tokens: int | None = None


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready for the router."""

    is_chat: bool
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_request(
    raw: bytes, is_chat: bool, tokenizer: Tokenizer, model_id: str, max_model_len: int, vocab_size: int
) -> ApiRequest:
    """Check a request body against the model. Raises ApiError (400; 404 for another model's name)."""
    body = _decode(raw, is_chat)
    if body.model and body.model != model_id:
        raise ApiError(404, f"model {body.model!r} is not served here; allowed: {model_id!r}", "model")
    field = "messages" if is_chat else "prompt"
    prompt = _prompt_ids(body, tokenizer, max_model_len)
    if not prompt:
        raise ApiError(400, "the prompt has no tokens; allowed is 1 or more", field)
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ApiError(
            400, f"token id {outside} is outside the vocabulary; allowed is 0 to {vocab_size - 1}", field
        )
    room = max_model_len - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens and leaves no room for output; "
            f"the model's context is {max_model_len} tokens",
            field,
        )
    asked, asked_field = body.max_tokens, "max_tokens"
    if isinstance(body, _ChatBody) and asked is None:
        asked, asked_field = body.max_completion_tokens, "max_completion_tokens"
    if asked is not None and asked > room:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens and {asked_field} is {asked}, {len(prompt) + asked} together; "
            f"the model's context is {max_model_len} tokens",
            asked_field,
        )
    default = DEFAULT_CHAT_TOKENS if is_chat else DEFAULT_COMPLETION_TOKENS
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if any(not text for text in stop):
        raise ApiError(400, "stop holds an empty string; allowed are strings of 1 or more characters", "stop")
    try:
        sampling = SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),  # some clients say -1 for "no limit"
            max_tokens=min(default, room) if asked is None else asked,
            seed=secrets.randbits(62) if body.seed is None else body.seed % 2**63,
            ignore_eos=bool(body.ignore_eos),
        )
    except ValueError as error:
        raise ApiError(400, str(error), str(error).partition(" is ")[0]) from error
    return ApiRequest(
        is_chat=is_chat,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        stop=stop,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _decode(raw: bytes, is_chat: bool) -> _CompletionBody | _ChatBody:
    try:
        tree = msgspec.json.decode(raw)
        if not isinstance(tree, dict):
            raise ApiError(400, "the body is not a JSON object")
        for field, accepted in _UNSUPPORTED.items():
            if tree.get(field) not in (None, accepted):
                problem = f"{field} is {tree[field]!r}; this server supports only {accepted!r}"
                raise ApiError(400, problem, field)
        return msgspec.convert(tree, _ChatBody) if is_chat else msgspec.convert(tree, _CompletionBody)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        field = at.rstrip("`")
        raise ApiError(400, f"{field or 'body'}: {what}", field or None) from error
    except (msgspec.DecodeError, RecursionError) as error:  # or nested deeper than any request is
        raise ApiError(400, f"the body is not JSON: {error}") from error


def _prompt_ids(body: _CompletionBody | _ChatBody, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    if isinstance(body, _ChatBody):
        if not body.messages:
            raise ApiError(400, "messages is empty; allowed is 1 or more messages", "messages")
        for index, message in enumerate(body.messages):
            if message.role not in CHAT_ROLES:
                raise ApiError(
                    400,
                    f"messages[{index}].role: {message.role!r} is not a role; allowed: {', '.join(CHAT_ROLES)}",
                    f"messages[{index}].role",
                )
        messages = [{"role": message.role, "content": _text_of(message)} for message in body.messages]
        _check_length(
            "".join(message["content"] for message in messages), tokenizer, max_model_len, "messages"
        )
        try:
            return tokenizer.encode_chat(messages)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
    if isinstance(body.prompt, str):
        _check_length(body.prompt, tokenizer, max_model_len, "prompt")
        return tokenizer.encode(body.prompt)
    token_ids = [item for item in body.prompt if isinstance(item, int)]
    if len(token_ids) == len(body.prompt):
        return token_ids
    if len(body.prompt) > 1:
        raise ApiError(400, f"prompt holds {len(body.prompt)} prompts; allowed is 1 a request", "prompt")
    only = body.prompt[0]
    if isinstance(only, str):
        _check_length(only, tokenizer, max_model_len, "prompt")
        return tokenizer.encode(only)
    return only if isinstance(only, list) else token_ids


def _check_length(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before it is tokenized: that may take minutes.

    Twice the longest token, because a tokenizer may shorten text before it looks for tokens (composed characters).
    """
    most_bytes = 2 * tokenizer.longest_token_bytes * max_model_len
    if len(text.encode(errors="surrogatepass")) > most_bytes:
        raise ApiError(
            400,
            f"the prompt has {len(text)} characters, more than any {max_model_len} tokens; "
            f"the model's context is {max_model_len} tokens",
            field,
        )


def _text_of(message: _ChatMessage) -> str:
    if isinstance(message.content, str) or message.content is None:
        return message.content or ""
    other = next((part.type for part in message.content if part.type != "text"), None)
    if other is not None:
        problem = f"a message part has type {other!r}; this server supports only 'text'"
        raise ApiError(400, problem, "messages")
    return "".join(part.text for part in message.content)


class Replies:
    """Builds every JSON of one answer. ``created`` is seconds since the epoch, as the API wants it."""

    def __init__(self, request_id: str, model_id: str, request: ApiRequest, created: int) -> None:
        self._request = request
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created, "model": model_id}
        self._is_first = True

    def chunk(self, text: str, finish_reason: str = "") -> bytes:
        """One token's server-sent event; ``text`` may be empty while a character is incomplete."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason or None}
        if self._request.is_chat:
            delta = {"content": text}
            if self._is_first:  # never sent alone: an early empty chunk would fake the first token
                delta = {"role": "assistant", "content": text}
            choice["delta"] = delta
        else:
            choice["text"] = text
        self._is_first = False
        usage = {"usage": None} if self._request.include_usage else {}
        return _event({**self._head, "object": self._object(chunk=True), "choices": [choice], **usage})

    def usage_chunk(self, output_tokens: int) -> bytes:
        usage = self._usage(output_tokens)
        return _event({**self._head, "object": self._object(chunk=True), "choices": [], "usage": usage})

    def whole(self, text: str, finish_reason: str, output_tokens: int) -> bytes:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._request.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        body = {**self._head, "object": self._object(chunk=False), "choices": [choice]}
        return msgspec.json.encode({**body, "usage": self._usage(output_tokens)})

    def _object(self, chunk: bool) -> str:
        if self._request.is_chat:
            return "chat.completion.chunk" if chunk else "chat.completion"
        return "text_completion"

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self._request.prompt_token_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }


DONE: Final = b"data: [DONE]\n\n"


def error_body(error: ApiError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    said = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    return msgspec.json.encode({"error": said})


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that breaks after its headers were sent."""
    return b"data: " + error_body(error) + b"\n\n"


def _event(tree: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(tree) + b"\n\n"
