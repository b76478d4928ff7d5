"""What a benchmark of one engine measures, and which of it fits. Plain data: importing this does not import torch."""

from collections.abc import Iterator
from typing import Final

import msgspec

from engine.config import EngineConfig

WARM_UP_STEPS: Final = 3
"""Decode steps of every repeat whose time is thrown away."""

MEASURED_STEPS: Final = 15
"""Decode steps of every repeat that are samples. Odd, so that the middle one has the mean number of keys."""

_OUTPUT_TOKENS: Final = WARM_UP_STEPS + MEASURED_STEPS + 2
"""The first token comes with the KV, and a spare one keeps the sequences from ending within the last step."""


class Room(msgspec.Struct, frozen=True):
    """What an engine can hold."""

    max_model_len: int  # of the model itself
    num_blocks: int
    block_size: int
    max_num_seqs: int


class PrefillCase(msgspec.Struct, frozen=True, tag="prefill"):
    """One prompt of so many random tokens, computed alone: from ``add`` to its first token."""

    prompt_tokens: int

    @property
    def tokens_per_sequence(self) -> int:
        return self.prompt_tokens + 1

    @property
    def num_sequences(self) -> int:
        return 1

    def __str__(self) -> str:
        return f"prefill of {self.prompt_tokens:,} tokens"


class DecodeCase(msgspec.Struct, frozen=True, tag="decode"):
    """Steps of ``batch`` sequences that have ``context`` tokens of KV each when the first step begins."""

    batch: int
    context: int

    @property
    def tokens_per_sequence(self) -> int:
        return self.context + _OUTPUT_TOKENS

    @property
    def num_sequences(self) -> int:
        return self.batch

    @property
    def max_tokens(self) -> int:
        """What each sequence asks for: more than is ever sampled."""
        return _OUTPUT_TOKENS

    @property
    def num_keys(self) -> int:
        """Keys that each sequence reads in the middle one of the measured steps, which is also the mean."""
        return self.context + WARM_UP_STEPS + (MEASURED_STEPS + 1) // 2

    def __str__(self) -> str:
        return f"decode batch {self.batch}, context {self.context:,}"


Case = PrefillCase | DecodeCase


class BenchmarkSpec(msgspec.Struct, frozen=True):
    """One benchmark. Every number of tokens, sequences and repeats is 1 or more."""

    model: str
    dtype: str
    engine: EngineConfig
    prefill_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    memory_buffer_bytes: int  # read to find the memory's rate; far larger than the caches
    where: bool = False  # also time the parts of the longest prefill and of the largest batch

    def prefill_cases(self) -> list[PrefillCase]:
        return [PrefillCase(tokens) for tokens in self.prefill_tokens]

    def decode_cases(self) -> list[DecodeCase]:
        """Contexts in order, and for each one every batch."""
        return [DecodeCase(batch, context) for context in self.contexts for batch in self.batches]

    def cases(self) -> Iterator[Case]:
        yield from self.prefill_cases()
        yield from self.decode_cases()


def blocks_needed(case: Case, block_size: int) -> int:
    """Blocks that a case's sequences hold together at most."""
    return case.num_sequences * -(-case.tokens_per_sequence // block_size)


def problem_of(case: Case, room: Room) -> str:
    """Why a case cannot be measured on this engine, with the numbers; "" = it can."""
    if case.tokens_per_sequence > room.max_model_len:
        return f"needs {case.tokens_per_sequence:,} tokens; the model's context is {room.max_model_len:,}"
    if case.num_sequences > room.max_num_seqs:
        return f"needs {case.num_sequences:,} sequences; engine.max_num_seqs is {room.max_num_seqs:,}"
    needed = blocks_needed(case, room.block_size)
    if needed > room.num_blocks:
        return f"needs {needed:,} blocks of KV; the pool has {room.num_blocks:,} of {room.block_size} tokens"
    return ""
