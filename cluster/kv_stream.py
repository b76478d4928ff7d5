"""How far one prompt's KV has been handed to the wire, and when the next rows are. Touches no socket and no engine.

Rows of several layers go together: each handing over wakes the sender, which costs the engine's core some time. In the
last chunk fewer do, and what there is goes with the last layer, so that little is left when the prompt is computed.
A layer's keys and values go together, in pieces that are worth a frame; what is left goes at the end. Only views are
handed over: a link that is slower than the prefill costs no memory and no engine step. Once so many frames wait for it
that the sender takes no more, rows stay until a later piece or the end.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Final

from transport.errors import OutboxFull
from transport.frame import DataSlice
from transport.messages import KVContract, KVHeader, PrefillResult
from transport.sender import KVSender

MIN_PIECE_BYTES: Final = 64 * 1024
"""Of one layer's keys or values. Sending costs something per frame, so a smaller piece waits for more rows."""

MAX_GATHERED_BYTES: Final = 8 * 1024 * 1024
"""Of all layers, handed over together while more of the prompt is to come."""

GATHERED_S: Final = 0.05
"""No more is gathered than the link takes in so long: a slow one that waited for more would not catch up."""

LAST_GATHERED_BYTES: Final = 512 * 1024
"""The same in the last chunk."""

Rows = Callable[[int, int, int, int], list[memoryview]]
"""(layer, kv, start_token, num_tokens) -> views of exactly these tokens in the cache."""


def least_piece_tokens(rows: KVContract) -> int:
    """The shortest prompt of which a piece leaves before it is computed whole."""
    return -(-MIN_PIECE_BYTES // rows.token_bytes)


class KVStream:
    """One transfer's data, from the first piece to COMMIT.

    ``is_bulk``: everything at the end. ``link_bytes_per_s``: what is known of the link, None = nothing.
    """

    def __init__(
        self,
        sender: KVSender,
        transfer_id: int,
        header: KVHeader,
        rows: Rows,
        *,
        is_bulk: bool,
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.has_sent = False  # the wire may read blocks of the prompt
        self.first_sent_at = 0.0  # time.monotonic(), of something the receiver does not hold; 0.0 = not yet
        self._sender = sender
        self._transfer_id = transfer_id
        self._header = header
        self._rows = rows
        self._is_bulk = is_bulk
        self._gathered_bytes = float(MAX_GATHERED_BYTES)
        if link_bytes_per_s is not None:
            in_time = link_bytes_per_s * GATHERED_S
            self._gathered_bytes = min(max(in_time, LAST_GATHERED_BYTES), MAX_GATHERED_BYTES)
        self._least_tokens = least_piece_tokens(header)
        self._sent_tokens = [0] * header.num_layers  # handed to the wire, or held by the receiver
        self._written_tokens = [0] * header.num_layers

    def skip(self, start_token: int) -> None:
        """The receiver holds the tokens before this one. What of them was handed over already, the wire leaves out."""
        if max(self._sent_tokens) <= start_token:
            self.first_sent_at = 0.0
        self._sent_tokens = [max(sent, start_token) for sent in self._sent_tokens]

    def layer_written(self, layer: int, end_token: int) -> None:
        """KV of the tokens before ``end_token`` is in the cache in this layer, and will not change."""
        self._written_tokens[layer] = end_token
        if self._is_bulk:
            return
        waiting = [
            written - sent for written, sent in zip(self._written_tokens, self._sent_tokens, strict=True)
        ]
        pieces = [each for each, num_tokens in enumerate(waiting) if num_tokens >= self._least_tokens]
        num_bytes = 2 * sum(waiting[each] for each in pieces) * self._header.token_bytes
        is_last_chunk = end_token == self._header.num_tokens
        is_end = is_last_chunk and layer == self._header.num_layers - 1
        enough = 1 if is_end else LAST_GATHERED_BYTES if is_last_chunk else self._gathered_bytes
        if num_bytes < enough:
            return
        with contextlib.suppress(OutboxFull):  # the link is far behind: later
            self._send(pieces)

    def finish(self, prefill: PrefillResult) -> None:
        """All KV is in the cache: sends what is left, and COMMIT.

        Raises OutboxFull; the transfer must be aborted then.
        """
        num_tokens = self._header.num_tokens
        self._written_tokens = [num_tokens] * self._header.num_layers
        left = [layer for layer, sent in enumerate(self._sent_tokens) if sent < num_tokens]
        if left:
            self._send(left)
        self._sender.commit(self._transfer_id, prefill)

    def _send(self, layers: list[int]) -> None:
        """All that is written of these layers."""
        parts = []
        for layer in layers:
            start, count = self._sent_tokens[layer], self._written_tokens[layer] - self._sent_tokens[layer]
            parts += [
                (DataSlice(layer, kv, start, count), self._rows(layer, kv, start, count)) for kv in (0, 1)
            ]
        self._sender.send_parts(self._transfer_id, parts)
        self.has_sent = True
        self.first_sent_at = self.first_sent_at or time.monotonic()
        for layer in layers:
            self._sent_tokens[layer] = self._written_tokens[layer]
