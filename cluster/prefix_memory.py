"""Which beginnings of prompts a worker's prefix cache is believed to hold. Pure; the worker is not asked.

As in the engine: whole blocks, each known by all tokens up to its end, the least recently used forgotten first. The
engine also evicts what running sequences need the room for, so this is a belief, and where it is wrong the forecast's
error shows it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

Chain = tuple[int, ...]
"""One number per whole block of a prompt, each standing for all tokens up to that block's end."""


def chain_of(token_ids: Sequence[int], block_size: int) -> Chain:
    """Without a block that would hold the last token: a cache always leaves that one to compute."""
    return tuple(_hashes(token_ids, block_size))


class PrefixMemory:
    """Of one worker with ``capacity`` blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def note(self, chain: Chain) -> None:
        """KV of these blocks is on the worker."""
        for block in reversed(chain):  # of one prompt the end is forgotten first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def num_held(self, chain: Chain) -> int:
        """Leading blocks that are there."""
        return next((index for index, block in enumerate(chain) if block not in self._blocks), len(chain))


def _hashes(token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    before = 0
    for start in range(0, len(token_ids) - block_size, block_size):
        before = hash((before, *token_ids[start : start + block_size]))
        yield before
