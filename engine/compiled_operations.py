"""What a layer does between its matrix products, in compiled code on a CPU: each in one pass over memory.

Attention reads the paged cache where it lies. Decode rows of a whole batch are one call; prompts go through matrix
tiles where the processor has them. Results of a row do not depend on the other rows; without tiles, nor on whether the
row is a decode step, part of a prompt or computed again.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.bulk_memory import Scratch
from engine.config import ModelConfig
from engine.forward_batch import ChunkRows, ForwardBatch, Indices
from engine.kernels import decode_attention, prefill_attention, prompt_attention
from engine.kernels.layer import layer_kernels
from engine.kernels.products import runs
from engine.kv_cache import Numbers, PagedKVCache, numbers_of
from engine.layer_weights import LayerWeights
from engine.row_buffer import RowBuffer


def supports(config: ModelConfig, device: torch.device) -> bool:
    """True for shapes that fill vectors of sixteen, on a CPU."""
    return device.type == "cpu" and config.fills_vectors


class _Decodes:
    """Chunks of one row, as arrays: block tables one after another, and where each begins."""

    def __init__(self, chunks: Sequence[ChunkRows]) -> None:
        tables = [chunk.table.array() for chunk in chunks]
        lengths = np.array([0, *(len(table) for table in tables)], np.int64)
        self.tables = np.concatenate(tables)
        self.first_blocks: Indices = np.cumsum(lengths)[:-1]
        self.num_keys: Indices = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        self.rows: Indices = np.array([chunk.first_row for chunk in chunks], np.int64)


class CompiledOperations:
    """The same methods as ``TorchOperations``; returned tensors are valid until the method is called again.

    Only for what ``supports`` says. Compiles at the first call of each kernel, once on a machine.
    """

    def __init__(self, config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor, block_size: int) -> None:
        dtype = cos.dtype
        self._config = config
        self._epsilon = np.float32(config.rms_norm_eps)
        self._cos, self._sin = numbers_of(cos), numbers_of(sin)
        self._kernels = layer_kernels(dtype.itemsize)
        self._group = config.num_heads // config.num_kv_heads
        products = _products(dtype, block_size)
        heads = self._group, config.head_dim, dtype.itemsize
        self._decode = decode_attention.attention_for(*heads, products)
        self._prompt = prompt_attention.attention_for(*heads, products == "pairs")
        self._tile_prompt = prefill_attention.attend_by("tiles") if products == "tiles" else None
        self._normed = RowBuffer(config.hidden_size, dtype)
        self._queries = RowBuffer(config.num_heads * config.head_dim, dtype)
        self._attended = RowBuffer(config.num_heads * config.head_dim, dtype)
        self._activated = RowBuffer(config.intermediate_size, dtype)
        self._nothing = numbers_of(torch.empty(0, dtype=dtype))
        self._weights: dict[int, Numbers] = {}
        self._floats, self._words = Scratch(np.float32), Scratch(np.int32)
        self._planned: tuple[Sequence[ChunkRows], list[ChunkRows], _Decodes | None] = ((), [], None)

    def begin(self, batch: ForwardBatch, cache: PagedKVCache) -> None:
        """A step begins; what follows is about its rows and this cache."""
        self._batch, self._cache = batch, cache

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of every row ``(n, hidden)``."""
        return self._norm(numbers_of(hidden), self._nothing, weight)

    def add_norm(self, hidden: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden += addend`` in place, then ``norm``."""
        return self._norm(numbers_of(hidden), numbers_of(addend), weight)

    def _norm(self, hidden: Numbers, addend: Numbers, weight: torch.Tensor) -> torch.Tensor:
        out, out_numbers = self._normed.first(len(hidden) // self._config.hidden_size)
        self._kernels.normalise(hidden, addend, self._weight(weight), self._epsilon, out_numbers)
        return out

    def rotate_and_write(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        """Queries ``(n, heads, head_dim)`` with positions; keys and values go to the cache's layer ``index``.

        ``qkv`` is ``(n, (heads + 2 * kv_heads) * head_dim)`` and is changed.
        """
        config, batch = self._config, self._batch
        queries, out = self._queries.first(qkv.shape[0])
        keys, values = self._cache.arrays(index)
        self._kernels.rotate_and_write(
            numbers_of(qkv), self._cos, self._sin, batch.positions, batch.slots,
            config.num_heads, config.num_kv_heads, config.head_dim,
            self._weight(layer.q_norm), self._weight(layer.k_norm), self._epsilon, out, keys, values,
        )  # fmt: skip
        return queries.view(-1, config.num_heads, config.head_dim)

    def attend(self, index: int, queries: torch.Tensor, chunks: Sequence[ChunkRows]) -> torch.Tensor:
        """``queries (n, heads, head_dim)`` -> ``(n, heads * head_dim)``, each sequence over its own keys."""
        config, cache = self._config, self._cache
        if chunks is not self._planned[0]:
            singles = [chunk for chunk in chunks if self._takes_decode_kernel(chunk)]
            prompts = [chunk for chunk in chunks if not self._takes_decode_kernel(chunk)]
            self._planned = chunks, prompts, _Decodes(singles) if singles else None
        _, prompts, decodes = self._planned
        out, out_numbers = self._attended.first(queries.shape[0])
        numbers = numbers_of(queries)
        keys, values = cache.arrays(index)
        if decodes is not None:
            most_keys = int(decodes.num_keys.max())
            scratch = self._floats.first(
                decode_attention.scratch_floats(self._group, config.num_kv_heads, config.head_dim, most_keys)
            )
            self._decode(
                numbers, keys, values, decodes.tables, decodes.first_blocks, decodes.num_keys, decodes.rows,
                out_numbers, config.num_kv_heads, cache.block_size, scratch,
            )  # fmt: skip
        for chunk in prompts:
            self._attend_prompt(index, chunk, queries, out)
        return out

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: ``(n, 2 * size)`` -> ``(n, size)``."""
        out, out_numbers = self._activated.first(gate_up.shape[0])
        self._kernels.silu_multiply(numbers_of(gate_up), self._config.intermediate_size, out_numbers)
        return out

    def _takes_decode_kernel(self, chunk: ChunkRows) -> bool:
        """One row, but not of a prompt where the prompts' kernel sums in another order."""
        return chunk.num_rows == 1 and not (self._tile_prompt and chunk.is_prefill)

    def _attend_prompt(self, index: int, chunk: ChunkRows, queries: torch.Tensor, out: torch.Tensor) -> None:
        config, cache = self._config, self._cache
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        keys, values = cache.arrays(index)
        numbers = numbers_of(queries[rows]), keys, values, chunk.table.array(), numbers_of(out[rows])
        lengths = cache.block_size, chunk.num_rows, chunk.num_tokens
        if self._tile_prompt is not None:
            needed = prefill_attention.scratch_words(chunk.num_rows * self._group, config.head_dim)
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            self._tile_prompt(*numbers, *heads, *lengths, self._words.first(needed))
            return
        needed = prompt_attention.scratch_floats(config.head_dim, chunk.num_tokens)
        self._prompt(*numbers, config.num_kv_heads, *lengths, self._floats.first(needed))

    def _weight(self, weight: torch.Tensor | None) -> Numbers:
        """A norm's weight as an array, looked up: there are two or four in every layer of every step."""
        if weight is None:
            return self._nothing
        numbers = self._weights.get(weight.data_ptr())
        if numbers is None:
            numbers = self._weights[weight.data_ptr()] = numbers_of(weight)
        return numbers


def _products(dtype: torch.dtype, block_size: int) -> decode_attention.Products:
    """How attention multiplies: by the fastest that this processor has for the dtype."""
    if dtype == torch.bfloat16 and block_size % 16 == 0 and runs("tiles"):
        return "tiles"
    return "pairs" if dtype == torch.bfloat16 and block_size % 2 == 0 and runs("vectors") else "floats"
