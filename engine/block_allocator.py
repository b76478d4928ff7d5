"""Who owns which block of KV. Integers only: knows no tensors, no sequences, no tokens."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_FREE = 0  # holds nothing
_CACHED = 1  # free, but its content may still be shared
_HELD = 2


class NoFreeBlocks(Exception):
    """More blocks asked for than are free."""


class BlockAllocator:
    """Reference-counted blocks ``0 .. num_blocks - 1``.

    A block is *held* while its count is above zero. A block given a content hash by ``register`` keeps its content
    when it becomes free: ``find`` and ``share`` bring it back, until ``allocate`` needs the room and evicts the
    least recently freed of such blocks first.

    ``allocate`` prefers runs of neighbouring blocks, because a sequence whose blocks are neighbours is read without
    a copy. ``room`` asks it to leave a gap behind a run, for the sequence to grow into.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks {num_blocks} and block_size {block_size}; allowed is 1 or more of each"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._state = bytearray(
            num_blocks
        )  # one of _FREE, _CACHED, _HELD: a string, so that runs are found by find()
        self._num_free = num_blocks
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached free blocks, least recently freed first
        self._hash_to_block: dict[bytes, int] = {}
        self._block_to_hash: dict[int, bytes] = {}
        self._cursor = 0  # where the search for a new run starts

    def ref_count(self, block: int) -> int:
        """How many owners a block has."""
        return self._ref_counts[block]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated; those with reusable content count as free."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self._num_free

    @property
    def num_cached(self) -> int:
        """Free blocks with content that can still be shared."""
        return len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, sharing: Iterable[int] = ()) -> bool:
        """True if ``num_blocks`` can be allocated after the blocks in ``sharing`` have been shared."""
        revived = sum(1 for block in sharing if self._ref_counts[block] == 0)
        return num_blocks + revived <= self._num_free

    def allocate(self, num_blocks: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Take ``num_blocks`` blocks, each with one owner; their content is undefined.

        ``after``: the last block of the sequence that grows; its right neighbours are taken first.
        ``room``: how many blocks the sequence may yet grow by.
        Raises NoFreeBlocks, and then takes none.
        """
        if num_blocks > self._num_free:
            raise NoFreeBlocks(
                f"{num_blocks} blocks asked for, {self._num_free} of {self.num_blocks} are free"
            )
        taken: list[int] = []
        if after is not None:
            self._take_neighbours(after + 1, num_blocks, taken)
        while self._num_free - len(self._evictable) < num_blocks - len(taken):
            self._evict(next(iter(self._evictable)))
        length = num_blocks - len(taken)
        while len(taken) < num_blocks:
            length = min(length, num_blocks - len(taken))
            start = self._find_run(length, room)
            if start is None:
                length = max(1, length // 2)
                continue
            taken.extend(self._take(block) for block in range(start, start + length))
            self._cursor = start + length + room
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one owner to each block; free blocks with content come back to life.

        Raises ValueError for a block that neither has an owner nor content.
        """
        for block in blocks:
            if self._state[block] == _FREE:
                raise ValueError(f"block {block} is free and has no content to share")
        for block in blocks:
            if self._state[block] == _CACHED:
                del self._evictable[block]
                self._state[block] = _HELD
                self._num_free -= 1
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block of a block table.

        The table's last blocks become evictable first: the start of a prefix is the part most likely reused.
        Raises ValueError for a block without an owner.
        """
        for block in reversed(blocks):
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is freed but has no owner")
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            self._num_free += 1
            if block in self._block_to_hash:
                self._state[block] = _CACHED
                self._evictable[block] = None
            else:
                self._state[block] = _FREE

    def register(self, block: int, content_hash: bytes) -> None:
        """Say what a held, full block contains. The first block of a content keeps the name; later ones stay private.

        Raises ValueError for a block without an owner.
        """
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is registered but has no owner")
        if content_hash in self._hash_to_block or block in self._block_to_hash:
            return
        self._hash_to_block[content_hash] = block
        self._block_to_hash[block] = content_hash

    def find(self, content_hashes: Iterable[bytes]) -> list[int]:
        """Blocks with these contents, as far as an unbroken prefix of them is here. Takes no ownership."""
        found: list[int] = []
        for content_hash in content_hashes:
            block = self._hash_to_block.get(content_hash)
            if block is None:
                break
            found.append(block)
        return found

    def forget_cached(self) -> None:
        """Drop the content of every free block."""
        while self._evictable:
            self._evict(next(iter(self._evictable)))

    def check_integrity(self) -> None:
        """Raises AssertionError, naming what is wrong, unless free + held == total and every table agrees."""
        held = sum(1 for count in self._ref_counts if count > 0)
        free = self._state.count(_FREE) + self._state.count(_CACHED)
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert held + free == self.num_blocks, f"free {free} + held {held} != total {self.num_blocks}"
        assert free == self._num_free, f"counted {free} free blocks, booked {self._num_free}"
        assert set(self._evictable) == {b for b, s in enumerate(self._state) if s == _CACHED}, (
            "evictable differs"
        )
        assert all((self._state[b] == _HELD) == (c > 0) for b, c in enumerate(self._ref_counts)), (
            "state differs"
        )
        assert {b: h for h, b in self._hash_to_block.items()} == self._block_to_hash, "hash tables differ"
        assert all(self._state[b] != _FREE for b in self._block_to_hash), "a block without content has a hash"

    def _take_neighbours(self, block: int, num_blocks: int, taken: list[int]) -> None:
        """Take free blocks from ``block`` on. One with content is taken only if some content must go anyway."""
        while len(taken) < num_blocks and block < self.num_blocks and self._state[block] != _HELD:
            if self._state[block] == _CACHED:
                if self._num_free > len(self._evictable):
                    return
                self._evict(block)
            taken.append(self._take(block))
            block += 1

    def _take(self, block: int) -> int:
        self._state[block] = _HELD
        self._ref_counts[block] = 1
        self._num_free -= 1
        return block

    def _evict(self, block: int) -> None:
        del self._evictable[block]
        del self._hash_to_block[self._block_to_hash.pop(block)]
        self._state[block] = _FREE

    def _find_run(self, length: int, room: int) -> int | None:
        """Start of ``length`` free neighbours: with room behind them if possible, from the cursor on if possible."""
        for wanted in (length + room, length):
            run = bytes([_FREE]) * wanted
            for first in (self._cursor, 0):
                start = self._state.find(run, first)
                if start >= 0:
                    return start
        return None


def contiguous_runs(block_table: Sequence[int]) -> list[tuple[int, int]]:
    """A block table as ``(first block, number of blocks)`` runs of neighbours, in order."""
    if not block_table:
        return []
    first, count = block_table[0], len(block_table)
    if block_table[-1] == first + count - 1 and tuple(block_table) == tuple(range(first, first + count)):
        return [(first, count)]  # the usual case, on the path of every frame
    runs: list[tuple[int, int]] = []
    for block in block_table:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
