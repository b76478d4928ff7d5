"""A sequence whose tokens nobody looks at: their number and what they are equal to is all a scheduler asks. Pure.

A simulated request has no text. Its prompt is known by the trace's prefix ids: equal ids are equal tokens after equal
tokens, so a block's content is named by the id that its last token belongs to and the block's place in the prompt.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import cast

from cluster.trace import TraceRequest
from engine.sequence import Sequence


class TokenCount:
    """In the place of a list of token ids: it has a length and grows."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def append(self, _: int) -> None:
        self._count += 1

    def grow(self, num_tokens: int) -> None:
        self._count += num_tokens


@dataclass(slots=True, eq=False)
class CountedSequence(Sequence):
    """``trace_name`` is the same for every attempt of one request; prefix ids as of its line in the trace."""

    trace_name: str = ""
    prefix_ids: Ids[int] = ()
    block_tokens: int = 0  # of each prefix id

    def __post_init__(self) -> None:
        num_tokens = len(self.request.prompt_token_ids)
        self.token_ids = cast(list[int], TokenCount(num_tokens))
        self.prefill_end = num_tokens

    def grow(self, num_tokens: int) -> None:
        """So many more tokens were sampled."""
        cast(TokenCount, self.token_ids).grow(num_tokens)

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """As the engine's: equal where the block and all before it are equal."""
        num_prompt = len(self.request.prompt_token_ids)
        for index in range(len(self._block_hashes), count):
            end = (index + 1) * block_size
            place = (end - 1) // self.block_tokens if self.block_tokens else 0
            is_shared = place < len(self.prefix_ids) and end <= num_prompt
            owner = self.prefix_ids[place] if is_shared else self.trace_name
            self._block_hashes.append(f"{owner}/{index}".encode())
        return self._block_hashes[:count]


def prompt_of(request: TraceRequest) -> tuple[int, ...]:
    """As many token ids as the prompt has. A range: it takes no memory, and nobody asks for their values."""
    return cast(tuple[int, ...], range(request.prompt_tokens))
