"""What the wire sees of a cache: the cache's own memory on a CPU, pinned host memory where the cache is a device's.

A port belongs to one transfer and serves one direction of it. The wire reads and writes host memory only; where the
cache lies in a GPU, rows are copied out before their views are handed over, and what arrived is copied in before it is
used. All in the engine's thread but ``incoming``, which any thread may call. Staging is bounded: a transfer takes what
it needs when it begins, or does not begin.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from engine.kv_cache import KEYS, VALUES, PagedKVCache

CHUNK_BYTES = 1024 * 1024
STAGING_BYTES = 1024 * 1024 * 1024

Blocks = Callable[[], Sequence[int]]
"""The block table of the tokens from the port's first one on; it may grow."""


class StagingFull(Exception):
    """The transfers under way hold all of the host memory set aside for staging."""


class KVPort(Protocol):
    def outgoing(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        """These tokens' rows as they are now, in order. The views stay good until ``close``."""

    def incoming(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        """Where these tokens' rows are to be put."""

    def land(self) -> None:
        """Every row of the transfer was put into the views of ``incoming``: it is in the cache when this returns."""

    def close(self) -> None:
        """The wire touches no view any more. May be called twice."""


class DirectPort:
    """The cache's own memory: nothing is copied."""

    def __init__(self, cache: PagedKVCache, blocks: Blocks, first_token: int) -> None:
        self._cache = cache
        self._blocks = blocks
        self._first_token = first_token

    def outgoing(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        """Raises ValueError for tokens beyond the block table."""
        return self._cache.block_bytes(layer, kv, self._blocks(), start - self._first_token, num_tokens)

    incoming = outgoing

    def land(self) -> None:
        pass

    def close(self) -> None:
        pass


class HostStaging:
    """Chunks of host memory, pinned where there is a GPU, allocated when first needed and used again."""

    def __init__(
        self, row_bytes: int, capacity_bytes: int = STAGING_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.rows_per_chunk = max(1, chunk_bytes // row_bytes)
        self._chunk_bytes = self.rows_per_chunk * row_bytes
        self._capacity = capacity_bytes // self._chunk_bytes
        self._num_allocated = 0
        self._free: list[torch.Tensor] = []

    @property
    def num_allocated_bytes(self) -> int:
        return self._num_allocated * self._chunk_bytes

    @property
    def num_held_bytes(self) -> int:
        return (self._num_allocated - len(self._free)) * self._chunk_bytes

    def take(self, num_rows: int) -> list[torch.Tensor]:
        """Chunks (uint8) for so many rows. Raises StagingFull, and then has taken none."""
        count = -(-num_rows // self.rows_per_chunk)
        room = self._capacity - self._num_allocated + len(self._free)
        if count > room:
            raise StagingFull(
                f"the transfer needs {count * self._chunk_bytes / 1e6:.0f} MB of host memory; "
                f"free are {room * self._chunk_bytes / 1e6:.0f} of {self._capacity * self._chunk_bytes / 1e6:.0f} MB"
            )
        while len(self._free) < count:
            pinned = torch.cuda.is_available()
            self._free.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned))
            self._num_allocated += 1
        rest = len(self._free) - count
        taken = self._free[rest:]
        del self._free[rest:]
        return taken

    def give_back(self, chunks: list[torch.Tensor]) -> None:
        self._free += chunks


class StagedPort:
    """Host memory beside a cache that the wire cannot reach: one row of it for each row of the transfer."""

    def __init__(
        self, cache: PagedKVCache, staging: HostStaging, blocks: Blocks, first_token: int, num_tokens: int
    ) -> None:
        """``num_tokens``: from the first one on. Raises StagingFull."""
        self._cache = cache
        self._staging = staging
        self._blocks = blocks
        self._first_token = first_token
        self._num_tokens = num_tokens
        self._chunks = staging.take(2 * cache.num_layers * num_tokens)
        self._bytes = [memoryview(chunk.numpy().data) for chunk in self._chunks]
        row_shape = (staging.rows_per_chunk, cache.num_kv_heads, cache.head_dim)
        self._rows = [chunk.view(cache.dtype).view(row_shape) for chunk in self._chunks]

    def outgoing(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        """Raises ValueError for tokens beyond the block table."""
        for staged, stored in self._pairs(layer, kv, start, num_tokens):
            staged.copy_(stored, non_blocking=True)
        self._wait()
        return self._views(layer, kv, start, num_tokens)

    def incoming(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        return self._views(layer, kv, start, num_tokens)

    def land(self) -> None:
        """Raises ValueError for tokens beyond the block table."""
        for layer in range(self._cache.num_layers):
            for kv in (KEYS, VALUES):
                for staged, stored in self._pairs(layer, kv, self._first_token, self._num_tokens):
                    stored.copy_(staged, non_blocking=True)
        self._wait()

    def close(self) -> None:
        self._staging.give_back(self._chunks)
        self._chunks = []

    def _wait(self) -> None:
        if self._cache.device.type == "cuda":
            torch.cuda.current_stream(self._cache.device).synchronize()

    def _views(self, layer: int, kv: int, start: int, num_tokens: int) -> list[memoryview]:
        size = self._cache.row_bytes
        return [
            self._bytes[chunk][first * size : (first + count) * size]
            for chunk, first, count in self._places(layer, kv, start, num_tokens)
        ]

    def _places(self, layer: int, kv: int, start: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Chunk, first row in it, number of rows."""
        per_chunk = self._staging.rows_per_chunk
        row = (2 * layer + kv) * self._num_tokens + start - self._first_token
        while num_tokens:
            chunk, first = divmod(row, per_chunk)
            count = min(num_tokens, per_chunk - first)
            yield chunk, first, count
            row += count
            num_tokens -= count

    def _pairs(
        self, layer: int, kv: int, start: int, num_tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Staged rows beside the rows in the cache that they stand for, in pieces that are whole in both."""
        stored = self._cache.rows(layer, kv)
        slots = iter(self._cache.slot_runs(self._blocks(), start - self._first_token, num_tokens))
        room = 0
        for chunk, first, count in self._places(layer, kv, start, num_tokens):
            while count:
                if not room:
                    slot, room = next(slots)
                step = min(count, room)
                yield self._rows[chunk][first : first + step], stored[slot : slot + step]
                first, count, slot, room = first + step, count - step, slot + step, room - step


class KVPorts:
    """Makes the ports of one cache."""

    def __init__(self, cache: PagedKVCache, *, staging: HostStaging | None = None) -> None:
        """``staging``: stage although the wire could reach the cache."""
        self._cache = cache
        if staging is None and cache.device.type != "cpu":
            staging = HostStaging(cache.row_bytes)
        self._staging = staging

    def open(self, blocks: Blocks, first_token: int, num_tokens: int) -> KVPort:
        """``first_token``: the one in row 0 of the block table; ``num_tokens``: from there on. Raises StagingFull."""
        if self._staging is None:
            return DirectPort(self._cache, blocks, first_token)
        return StagedPort(self._cache, self._staging, blocks, first_token, num_tokens)
