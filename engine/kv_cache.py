"""The paged KV cache: one tensor per layer, addressed by blocks. Knows no sequences and no allocator."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.block_allocator import contiguous_runs
from engine.bulk_memory import aligned_empty

Numbers = np.ndarray[Any, np.dtype[Any]]

KEYS, VALUES = 0, 1
"""First index of a layer's storage."""


class PagedKVCache:
    """Per layer a tensor ``(2, num_blocks, block_size, num_kv_heads, head_dim)``: keys, then values.

    The rows of one block are one run of bytes, and so are those of neighbouring blocks: a transfer sends from and
    receives into the cache itself. On a CPU all of it is resident before it is used: pages that appeared when first
    written would take the time from the core that decodes.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        self.layers = [_empty(shape, dtype, self.device) for _ in range(num_layers)]
        # the same storage as (num_slots, num_kv_heads, head_dim) and as (num_kv_heads, num_slots, head_dim)
        self._by_slot = [layer.flatten(1, 2).unbind(0) for layer in self.layers]
        self._by_head = [layer.flatten(1, 2).transpose(1, 2).unbind(0) for layer in self.layers]
        self._bytes: list[tuple[memoryview, memoryview]] = []
        self._arrays: list[tuple[Numbers, Numbers]] = []
        if self.device.type == "cpu":
            self._arrays = [(numbers_of(layer[KEYS]), numbers_of(layer[VALUES])) for layer in self.layers]
            self._bytes = [(_byte_view(layer[KEYS]), _byte_view(layer[VALUES])) for layer in self.layers]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_layers * self.num_blocks * self.block_size * self.row_bytes

    def arrays(self, layer: int) -> tuple[Numbers, Numbers]:
        """Keys and values of a layer as flat arrays over the cache's own memory; on a CPU only."""
        return self._arrays[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store rows ``(n, num_kv_heads, head_dim)`` at ``slots`` ``(n,)`` (int64)."""
        storage = self._by_slot[layer]
        storage[KEYS].index_copy_(0, slots, keys)
        storage[VALUES].index_copy_(0, slots, values)

    def gather(
        self, layer: int, runs: Sequence[tuple[int, int]], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``(num_kv_heads, num_tokens, head_dim)`` of a sequence's first tokens.

        ``runs``: its block table as ``contiguous_runs`` gives it. A view of the cache where the first run holds
        all the tokens, else a copy.
        """
        keys, values = self._by_head[layer]
        first_slot, room = runs[0][0] * self.block_size, runs[0][1] * self.block_size
        if num_tokens <= room:
            return keys.narrow(1, first_slot, num_tokens), values.narrow(1, first_slot, num_tokens)
        key_parts: list[torch.Tensor] = []
        value_parts: list[torch.Tensor] = []
        for first_block, num_blocks in runs:
            length = min(num_tokens, num_blocks * self.block_size)
            if length == 0:
                break
            key_parts.append(keys.narrow(1, first_block * self.block_size, length))
            value_parts.append(values.narrow(1, first_block * self.block_size, length))
            num_tokens -= length
        return torch.cat(key_parts, dim=1), torch.cat(value_parts, dim=1)

    def block_bytes(
        self, layer: int, kv: int, block_table: Sequence[int], start: int, num_tokens: int
    ) -> list[memoryview]:
        """Writable byte views over tokens ``start .. start + num_tokens - 1`` of a sequence, in order.

        ``kv`` is ``KEYS`` or ``VALUES``. No copy: the views are the cache's own memory, one per run of neighbouring
        blocks, together exactly ``num_tokens * row_bytes`` bytes.
        Raises ValueError for tokens beyond the block table, and for a cache that is not in the CPU's memory.
        """
        if not self._bytes:
            raise ValueError(f"the cache is on {self.device}; byte views exist on cpu only")
        row, stored = self.row_bytes, self._bytes[layer][kv]
        return [
            stored[slot * row : (slot + count) * row]
            for slot, count in self.slot_runs(block_table, start, num_tokens)
        ]

    def rows(self, layer: int, kv: int) -> torch.Tensor:
        """A layer's keys or values by slot: ``(num_slots, num_kv_heads, head_dim)``, the cache's own memory."""
        return self._by_slot[layer][kv]

    def slot_runs(self, block_table: Sequence[int], start: int, num_tokens: int) -> list[tuple[int, int]]:
        """Where tokens ``start .. start + num_tokens - 1`` of a sequence lie, in order: first slot and number of slots
        of each run of neighbouring blocks.

        Raises ValueError for tokens beyond the block table.
        """
        if start < 0 or num_tokens < 0 or start + num_tokens > len(block_table) * self.block_size:
            raise ValueError(
                f"tokens {start} to {start + num_tokens} asked for; "
                f"{len(block_table)} blocks hold {len(block_table) * self.block_size}"
            )
        if num_tokens == 0:
            return []
        size = self.block_size
        first, last = start // size, -(-(start + num_tokens) // size)
        runs: list[tuple[int, int]] = []
        position = first * size  # of the first token of the run
        for block, count in contiguous_runs(block_table[first:last]):
            begin = max(start, position)
            end = min(start + num_tokens, position + count * size)
            runs.append((block * size + begin - position, end - begin))
            position += count * size
        return runs


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = aligned_empty(math.prod(shape) * dtype.itemsize, np.uint8, is_present=True)
    return torch.from_numpy(memory).view(dtype).view(shape)


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """A contiguous CPU tensor as a flat array over its memory: float32 as it is, bfloat16 as uint16."""
    flat = tensor.reshape(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _byte_view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
