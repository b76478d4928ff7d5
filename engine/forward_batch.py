"""The rows of one step, as the model takes them. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.block_table import BlockTable

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a batch that belong to one sequence."""

    first_row: int
    num_rows: int
    num_logits: int  # of how many rows, counted from the last, the logits are wanted
    num_tokens: int  # keys in the cache when this chunk is written: its own are the last ``num_rows``
    table: BlockTable
    is_prefill: bool  # of a prompt, or computed again: not the one token after the last


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows. ``n`` is their number."""

    token_ids: torch.Tensor  # (n,) int64, on the model's device
    positions: Indices  # (n,)
    slots: Indices  # (n,) where each row's KV goes
    chunks: tuple[ChunkRows, ...]
    logit_rows: torch.Tensor  # (m,) int64: the rows that the chunks' ``num_logits`` name, in order


def logit_chunks(chunks: Sequence[ChunkRows]) -> tuple[ChunkRows, ...]:
    """The chunks as they are when all rows but those of ``logit_rows`` are taken out."""
    kept: list[ChunkRows] = []
    first_row = 0
    for chunk in chunks:
        if chunk.num_logits:
            kept.append(replace(chunk, first_row=first_row, num_rows=chunk.num_logits))
            first_row += chunk.num_logits
    return tuple(kept)
