"""A KVSender as a benchmark uses it: transfers begun as a prefill worker begins them, and waited for."""

import queue
import time
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.kv_stream import KVStream, Rows
from transport.errors import TransportError
from transport.events import TransferAccepted, TransferAcked, TransferEvent, TransferRejected
from transport.link import LinkShape
from transport.messages import KVContract, KVHeader, PrefillResult
from transport.sender import KVSender

_EVENT_TIMEOUT_S: Final = 60.0


class BenchSender:
    """``on_acked`` may be set to be called, in the sender's thread, for each transfer that ends well."""

    def __init__(self, address: tuple[str, int], secret: bytes, contract: KVContract) -> None:
        self.is_computing = False  # an engine needs the core that the sender's thread runs on
        self.on_acked: Callable[[TransferAcked], None] | None = None
        self._contract = contract
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        self._num_transfers = 0
        self._last_id = 0
        self._sender = KVSender(address, secret, self._heard, is_computing=lambda: self.is_computing)

    def begin(self, num_tokens: int, rows: Rows, *, path: str = "v2", is_bulk: bool = True) -> KVStream:
        """Open a transfer of so many tokens; ``finish`` of what it returns sends what is left."""
        self._num_transfers += 1
        header = KVHeader(
            **msgspec.structs.asdict(self._contract),
            request_id=f"transfer-{self._num_transfers}",
            attempt=0,
            num_tokens=num_tokens,
            path="v1" if path == "v1" else "v2",
        )
        self._last_id = self._sender.open(header)
        return KVStream(self._sender, self._last_id, header, rows, is_bulk=is_bulk)

    @property
    def written_bytes(self) -> int:
        """How much of the transfer begun last has left; 0 once it has ended."""
        return self._sender.written_raw_bytes(self._last_id)

    def next_acked(self) -> TransferAcked:
        """The next transfer's good end. Raises TransportError for another one, and when there is none in a minute."""
        while True:
            try:
                event = self._events.get(timeout=_EVENT_TIMEOUT_S)
            except queue.Empty:
                raise TransportError(f"no transfer ended within {_EVENT_TIMEOUT_S:g} s") from None
            if isinstance(event, TransferAcked):
                return event
            if isinstance(event, TransferRejected):
                raise TransportError(f"the receiver would not take it: {event.detail}")
            if not isinstance(event, TransferAccepted):
                raise event.error

    def set_link(self, shape: LinkShape) -> None:
        self._sender.set_link(shape)

    def close(self) -> None:
        self._sender.close()

    def _heard(self, event: TransferEvent) -> None:
        if isinstance(event, TransferAcked) and self.on_acked is not None:
            self.on_acked(event)
        self._events.put(event)


def prefill_result() -> PrefillResult:
    """Of a prompt that is computed now."""
    now = time.monotonic()
    return PrefillResult(
        first_token_id=0, seed=0, output_position=0, prefill_started_at=now, prefill_done_at=now
    )
