"""Token ids to text, one at a time: for streaming. Knows no tokenizer files."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Text of one stream of tokens.

    What ``push`` and ``flush`` return, joined, equals decoding all the tokens at once. A character whose bytes are
    not all here yet is held back, so no piece ends in half of one.
    """

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, sometimes none."""
        ...

    def flush(self) -> str:
        """What is still held back, with the replacement character for broken bytes. Ends the stream."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: constant time per token."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of recent tokens, and emits what the window grew by.

    ``holds_back`` says of a token that the text before it may still change (a byte of an unfinished character).
    The window is cut after a token that it does not hold for, so the cost per token is bounded by the
    longest run of held tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], holds_back: Callable[[int], bool]) -> None:
        self._decode = decode
        self._holds_back = holds_back
        self._context: list[int] = []  # emitted, but the text of what follows may depend on it
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        return "" if self._holds_back(token_id) else self._emit()

    def flush(self) -> str:
        return self._emit()

    def _emit(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)[len(before) :]
        self._context = (self._context + self._pending)[-1:]
        self._pending = []
        return text
