"""One request's tokens as they become text for its client. Knows no HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from cluster.events import PROMPT_CHARACTERS
from cluster.openai_api import ApiError, ApiRequest
from cluster.router import Router
from cluster.router_messages import Deliver, Fail, StopMatched, TokensWritten
from cluster.stop_strings import StopStrings
from engine.tokenizer import Tokenizer

MAX_PIECES: Final = 64
"""Tokens in one write: what a client that fell behind makes the router hold beside aiohttp's 64 KiB."""
TEXT_INTERVAL_S: Final = 0.2


class Answer:
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
        self._unlogged: list[str] | None = None  # text on its way to the client that the log does not have
        self._prompt = ""
        if router.spec.profile.router.log_text:
            self._unlogged = []
            self._prompt = tokenizer.decode(request.prompt_token_ids)[-PROMPT_CHARACTERS:]
        self._logged_at = 0.0
        self.num_tokens = 0

    async def pieces(self) -> AsyncIterator[list[tuple[str, str]]]:
        """Lists of (text, finish reason), one entry a token, of what has come by now. Raises ApiError."""
        finished = False
        while not finished:
            waiting = [await self._queue.get()]
            while not self._queue.empty() and len(waiting) < MAX_PIECES:
                waiting.append(self._queue.get_nowait())
            found: list[tuple[str, str]] = []
            for item in waiting:
                if isinstance(item, Fail):
                    if found:
                        yield found
                    raise ApiError(item.status, item.message, retry_after_s=item.retry_after_s)
                piece = self._piece(item)
                found.append(piece)
                self._keep(piece)
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

    def _keep(self, piece: tuple[str, str]) -> None:
        """For the log, where the profile wants text in it: some pieces at a time, and what is left at the end."""
        if self._unlogged is None:
            return
        self._unlogged.append(piece[0])
        now = time.monotonic()
        if piece[1] or now - self._logged_at >= TEXT_INTERVAL_S:
            self._router.delivered_text(self._request_id, "".join(self._unlogged), self._prompt)
            self._unlogged, self._prompt, self._logged_at = [], "", now

    def written(self, count: int) -> None:
        """``count`` more pieces reached the client."""
        self._router.apply(TokensWritten(self._request_id, count))
        if self._stop_matched:
            self._router.apply(StopMatched(self._request_id))
