"""What the wire sees of a cache, staged and direct, against each other."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import PagedKVCache
from engine.kv_port import CHUNK_BYTES, HostStaging, KVPorts, StagingFull

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 24, 2
ROWS_PER_CHUNK = 5


def make_cache(seed: int) -> PagedKVCache:
    cache = PagedKVCache(LAYERS, NUM_BLOCKS, BLOCK_SIZE, 2, 8, torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def small_chunks(cache: PagedKVCache) -> HostStaging:
    """Chunks of a few rows, so that every range crosses some."""
    return HostStaging(cache.row_bytes, chunk_bytes=ROWS_PER_CHUNK * cache.row_bytes)


def stored(cache: PagedKVCache, table: Sequence[int], num_tokens: int) -> bytes:
    return b"".join(
        bytes(view)
        for layer in range(LAYERS)
        for kv in (0, 1)
        for view in cache.block_bytes(layer, kv, table, 0, num_tokens)
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_transfer_between_two_staged_caches_is_exact(data: st.DataObject) -> None:
    source, target = make_cache(1), make_cache(2)
    num_tokens = data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, (num_tokens - 1) // BLOCK_SIZE)) * BLOCK_SIZE
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shuffle = random.Random(data.draw(st.integers(0, 99))).sample
    from_table, to_table = shuffle(range(NUM_BLOCKS), num_blocks), shuffle(range(NUM_BLOCKS), num_blocks)
    own_blocks = to_table[first // BLOCK_SIZE :]
    before = [layer.clone() for layer in target.layers]
    sender = KVPorts(source, staging=small_chunks(source)).open(lambda: from_table, 0, num_tokens)
    receiving = KVPorts(target, staging=small_chunks(target))
    receiver = receiving.open(lambda: own_blocks, first, num_tokens - first)
    cuts = sorted({first, num_tokens, *data.draw(st.lists(st.integers(first, num_tokens), max_size=4))})
    for layer in range(LAYERS):
        for kv in (0, 1):
            for start, end in itertools.pairwise(cuts):
                sent = b"".join(sender.outgoing(layer, kv, start, end - start))
                position = 0
                for view in receiver.incoming(layer, kv, start, end - start):
                    view[:] = sent[position : position + len(view)]
                    position += len(view)
                assert position == len(sent) == (end - start) * source.row_bytes
    assert all(torch.equal(was, layer) for was, layer in zip(before, target.layers, strict=True))
    receiver.land()
    assert stored(target, own_blocks, num_tokens - first) == b"".join(
        bytes(view)
        for layer in range(LAYERS)
        for kv in (0, 1)
        for view in source.block_bytes(layer, kv, from_table, first, num_tokens - first)
    )
    unused = [block for block in range(NUM_BLOCKS) if block not in own_blocks]
    for was, layer in zip(before, target.layers, strict=True):
        assert torch.equal(was[:, unused], layer[:, unused])


def test_what_was_handed_out_does_not_follow_the_cache() -> None:
    """A device's rows are copied when they are asked for; a CPU's are the cache's own."""
    cache = make_cache(1)
    table = [3, 1]
    staged = KVPorts(cache, staging=HostStaging(cache.row_bytes)).open(lambda: table, 0, 8)
    direct = KVPorts(cache).open(lambda: table, 0, 8)
    views, own = staged.outgoing(0, 0, 0, 8), direct.outgoing(0, 0, 0, 8)
    was = b"".join(views)
    assert was == b"".join(own)
    cache.layers[0].zero_()
    assert b"".join(views) == was
    assert b"".join(own) == bytes(len(was))


def test_staging_is_bounded_and_used_again() -> None:
    cache = make_cache(1)
    staging = HostStaging(cache.row_bytes, 2 * CHUNK_BYTES)
    ports = KVPorts(cache, staging=staging)
    rows = staging.rows_per_chunk // (2 * LAYERS)
    first, second = (ports.open(lambda: [0], 0, rows) for _ in range(2))
    assert staging.num_held_bytes == staging.num_allocated_bytes == 2 * CHUNK_BYTES
    with pytest.raises(StagingFull, match=r"the transfer needs 1 MB of host memory; free are 0 of 2 MB"):
        ports.open(lambda: [0], 0, rows)
    first.close()
    first.close()
    assert staging.num_held_bytes == CHUNK_BYTES
    third = ports.open(lambda: [0], 0, rows)
    second.close()
    third.close()
    assert staging.num_held_bytes == 0
    assert staging.num_allocated_bytes == 2 * CHUNK_BYTES


@pytest.mark.parametrize("is_staged", [False, True])
def test_tokens_beyond_the_table_are_refused(is_staged: bool) -> None:
    cache = make_cache(1)
    ports = KVPorts(cache, staging=HostStaging(cache.row_bytes) if is_staged else None)
    port = ports.open(lambda: [0], 0, 8)
    with pytest.raises(ValueError, match="tokens 0 to 5 asked for; 1 blocks hold 4"):
        port.outgoing(0, 0, 0, 5)
