"""The allocator against a model of it, and what it promises about neighbours, reuse and eviction."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_allocator import BlockAllocator, NoFreeBlocks, contiguous_runs


class AllocatorMachine(RuleBasedStateMachine):
    """Random tables that are allocated, grown, shared, registered and freed; the model is a list of tables."""

    @initialize(num_blocks=st.integers(1, 16), block_size=st.sampled_from((1, 4, 16)))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was written into a block when it was last registered
        self.names: set[bytes] = set()

    @rule(count=st.integers(0, 17), room=st.integers(0, 4))
    def allocate(self, count: int, room: int) -> None:
        if not self.allocator.can_allocate(count):
            with pytest.raises(NoFreeBlocks):
                self.allocator.allocate(count, room=room)
            return
        taken = self.allocator.allocate(count, room=room)
        self._claim(taken, count)
        self.tables.append(taken)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        if self.allocator.can_allocate(count):
            taken = self.allocator.allocate(count, after=table[-1])
            self._claim(taken, count)
            table += taken

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.free(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, name: bytes) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        known = bool(self.allocator.find([name]))
        had_name = block in self.content
        self.allocator.register(block, name)
        if not known and not had_name:
            self.content[block] = name
            self.names.add(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        for block in self.allocator.find([name]):
            assert self.content[block] == name, "a block was reused after its content was gone"
            self.allocator.share([block])
            self.tables.append([block])

    @precondition(lambda self: self.names)
    @rule(data=st.data(), count=st.integers(0, 6), room=st.integers(0, 4))
    def admit(self, data: st.DataObject, count: int, room: int) -> None:
        """A table that begins with known content: the known blocks are shared first, the rest allocated behind."""
        known = self.allocator.find([data.draw(st.sampled_from(sorted(self.names)))])
        if not self.allocator.can_allocate(count, sharing=known):
            return
        self.allocator.share(known)
        self.tables.append(known)  # owned from here on: the allocation must not take it
        taken = self.allocator.allocate(count, after=known[-1] if known else None, room=room)
        self._claim(taken, count)
        known += taken

    @rule(num_tokens=st.integers(0, 300))
    def size(self, num_tokens: int) -> None:
        blocks, size = self.allocator.blocks_for(num_tokens), self.allocator.block_size
        assert (blocks - 1) * size < num_tokens <= blocks * size

    @rule()
    def forget(self) -> None:
        self.allocator.forget_cached()
        assert self.allocator.num_cached == 0

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for table in self.tables:
                self.allocator.free(table)
            assert self.allocator.num_free == self.allocator.num_blocks
            self.allocator.check_integrity()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "allocator"):
            return  # before the first rule
        self.allocator.check_integrity()
        owned = [block for table in self.tables for block in table]
        assert self.allocator.num_held == len(set(owned))
        num_blocks = self.allocator.num_blocks
        assert self.allocator.num_free == num_blocks - len(set(owned))
        assert all(self.allocator.ref_count(block) == owned.count(block) for block in range(num_blocks))

    def _claim(self, taken: list[int], count: int) -> None:
        assert len(taken) == len(set(taken)) == count
        owned = {block for table in self.tables for block in table}
        assert not owned & set(taken), "a block with an owner was given away"
        for block in taken:
            self.content.pop(block, None)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_allocator_machine = AllocatorMachine.TestCase


def test_a_run_is_given_where_one_is_long_enough() -> None:
    allocator = BlockAllocator(16, 4)
    tables = [allocator.allocate(4) for _ in range(4)]
    allocator.free(tables[0])
    allocator.free(tables[2])
    assert contiguous_runs(allocator.allocate(4)) in ([(0, 4)], [(8, 4)])
    allocator.free(tables[3])
    assert contiguous_runs(allocator.allocate(6))[0][1] >= 4


def test_two_growing_sequences_stay_whole_when_they_say_so() -> None:
    allocator = BlockAllocator(32, 4)
    first, second = allocator.allocate(2, room=6), allocator.allocate(2, room=6)
    for _ in range(6):
        first += allocator.allocate(1, after=first[-1])
        second += allocator.allocate(1, after=second[-1])
    assert len(contiguous_runs(first)) == len(contiguous_runs(second)) == 1


def test_the_least_recently_freed_content_goes_first_and_a_prefix_last() -> None:
    allocator = BlockAllocator(4, 4)
    old, new = allocator.allocate(2), allocator.allocate(2)
    for block, name in zip(old + new, (b"o0", b"o1", b"n0", b"n1"), strict=True):
        allocator.register(block, name)
    allocator.free(old)
    allocator.free(new)
    allocator.allocate(1)
    assert allocator.find([b"o0", b"o1"]) == [old[0]]
    allocator.allocate(1)
    assert allocator.find([b"o0"]) == []
    assert allocator.find([b"n0", b"n1"]) == new


def test_can_allocate_counts_shared_free_blocks_once() -> None:
    allocator = BlockAllocator(3, 4)
    table = allocator.allocate(1)
    allocator.register(table[0], b"a")
    assert allocator.can_allocate(2, sharing=table)  # still held: sharing it costs nothing
    allocator.free(table)
    assert allocator.can_allocate(2, sharing=table)
    assert not allocator.can_allocate(3, sharing=table)


@pytest.mark.parametrize("wrong", ["free", "share", "register"])
def test_blocks_without_an_owner_are_refused(wrong: str) -> None:
    allocator = BlockAllocator(2, 4)
    calls = {
        "free": lambda: allocator.free([1]),
        "share": lambda: allocator.share([1]),
        "register": lambda: allocator.register(1, b"x"),
    }
    with pytest.raises(ValueError, match="block 1"):
        calls[wrong]()
    allocator.check_integrity()


def test_contiguous_runs_keep_the_order() -> None:
    assert contiguous_runs([]) == []
    assert contiguous_runs([4, 5, 6, 2, 3, 9]) == [(4, 3), (2, 2), (9, 1)]
