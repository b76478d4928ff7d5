"""Storage by blocks: what is written is what is read, and byte views are the cache itself."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.block_allocator import contiguous_runs
from engine.kv_cache import KEYS, VALUES, PagedKVCache

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 10, 4, 2, 8


def make_cache(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype, "cpu")


def written(
    cache: PagedKVCache, layer: int, table: list[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM).to(cache.dtype)
    slots = torch.tensor([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(num_tokens)])
    cache.write(layer, rows[KEYS], rows[VALUES], slots)
    return rows[KEYS], rows[VALUES]


tables = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True)


@settings(deadline=None)
@given(tables, st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_gather_returns_what_was_written(table: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    num_tokens = data.draw(st.integers(1, len(table) * BLOCK_SIZE))
    keys, values = written(cache, 1, table, num_tokens)
    read_keys, read_values = cache.gather(1, contiguous_runs(table), num_tokens)
    assert torch.equal(read_keys.transpose(0, 1), keys)
    assert torch.equal(read_values.transpose(0, 1), values)


def test_gather_copies_nothing_where_blocks_are_neighbours() -> None:
    cache = make_cache()
    keys, _ = cache.gather(0, contiguous_runs([3, 4, 5, 1]), 3 * BLOCK_SIZE)
    assert keys.data_ptr() == cache.layers[0][KEYS, 3].data_ptr()
    copied, _ = cache.gather(0, contiguous_runs([3, 4, 5, 1]), 3 * BLOCK_SIZE + 1)
    assert copied.data_ptr() != keys.data_ptr()


@settings(deadline=None)
@given(tables, st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([KEYS, VALUES]))
def test_block_bytes_are_exactly_the_rows_in_order(
    table: list[int], data: st.DataObject, dtype: torch.dtype, kv: int
) -> None:
    cache = make_cache(dtype)
    room = len(table) * BLOCK_SIZE
    rows = written(cache, 0, table, room)[kv]
    start = data.draw(st.integers(0, room))
    num_tokens = data.draw(st.integers(0, room - start))
    views = cache.block_bytes(0, kv, table, start, num_tokens)
    assert sum(map(len, views)) == num_tokens * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    assert (
        b"".join(views) == rows[start : start + num_tokens].contiguous().view(torch.uint8).numpy().tobytes()
    )
    assert all(
        view.itemsize == 1 and view.ndim == 1 and view.contiguous and not view.readonly for view in views
    )
    assert len(views) <= len(contiguous_runs(table))


def test_neighbouring_blocks_are_one_view() -> None:
    cache = make_cache()
    assert len(cache.block_bytes(0, KEYS, [2, 3, 4, 8, 9], 1, 17)) == 2


def test_writing_to_a_view_writes_to_the_cache() -> None:
    cache = make_cache()
    table = [7, 2]
    (first, second) = cache.block_bytes(1, VALUES, table, 2, 4)
    for view in (first, second):
        view[:] = torch.full((len(view) // 4,), 1.5).numpy().tobytes()
    _, values = cache.gather(1, contiguous_runs(table), 6)
    assert torch.equal(values.transpose(0, 1)[2:], torch.full((4, NUM_KV_HEADS, HEAD_DIM), 1.5))


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 9), (8, 1), (-1, 2), (0, -1)])
def test_views_beyond_the_block_table_are_refused(start: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="2 blocks hold 8"):
        make_cache().block_bytes(0, KEYS, [1, 2], start, num_tokens)


def test_a_cache_elsewhere_has_no_byte_views() -> None:
    cache = PagedKVCache(1, 2, 4, 1, 8, torch.float32, "meta")
    with pytest.raises(ValueError, match="on meta; byte views exist on cpu only"):
        cache.block_bytes(0, KEYS, [0], 0, 1)


def test_a_pool_is_resident_before_it_is_used() -> None:
    cache = PagedKVCache(1, 2048, 16, 2, 32, torch.float32, "cpu")
    first = cache.layers[0].data_ptr()
    resident = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
        elif name == "Rss:":
            resident[begin, end] = int(value.split()[0]) * 1024
    (found,) = (size for (begin, end), size in resident.items() if begin <= first < end)
    assert found >= cache.num_bytes == 16 * 2**20
