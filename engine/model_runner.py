"""Scheduled chunks to tensors to token ids. Knows no queues: it computes what it is told."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.forward_batch import ChunkRows, ForwardBatch, Indices
from engine.kv_cache import PagedKVCache
from engine.model import LlamaModel
from engine.operations import choose_operations
from engine.sampler import sample
from engine.scheduler import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of a sequence; ``output_position`` is 0 for the first one."""

    sequence: Sequence
    token_id: int
    output_position: int


class ModelRunner:
    """Runs one model over one cache. ``kernels`` as in ``choose_operations``."""

    def __init__(self, model: LlamaModel, cache: PagedKVCache, kernels: str = "auto") -> None:
        self.model = model
        self.cache = cache
        self._operations = choose_operations(model.config, model.cos, model.sin, cache.block_size, kernels)

    def run(self, batch: ScheduledBatch, on_layer: Callable[[int], None] | None = None) -> list[SampledToken]:
        """Compute the batch's KV into the cache and sample where a chunk reaches its sequence's end.

        ``on_layer`` as in ``LlamaModel.forward``.
        """
        logits = self.model.forward(self._forward_batch(batch), self.cache, self._operations, on_layer)
        ended = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        draws = [(sequence.request.sampling, sequence.num_output_tokens) for sequence in ended]
        token_ids = sample(logits, draws) if ended else []
        return [
            SampledToken(sequence, token_id, position)
            for sequence, token_id, (_, position) in zip(ended, token_ids, draws, strict=True)
        ]

    def _forward_batch(self, batch: ScheduledBatch) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[Indices] = []
        slots: list[Indices] = []
        chunks: list[ChunkRows] = []
        logit_rows: list[int] = []
        for chunk in batch.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            table = sequence.block_table
            rows = ChunkRows(
                first_row=len(token_ids),
                num_rows=chunk.num_tokens,
                num_logits=int(chunk.samples),
                num_tokens=end,
                table=table,
                is_prefill=chunk.is_prefill,
            )
            chunks.append(rows)
            token_ids += sequence.token_ids[chunk.start : end]
            positions.append(np.arange(chunk.start, end, dtype=np.int64))
            slots.append(self._slots(chunk))
            if chunk.samples:
                logit_rows.append(len(token_ids) - 1)
        device = self.model.device
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            chunks=tuple(chunks),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )

    def _slots(self, chunk: ScheduledChunk) -> Indices:
        """Where the chunk's tokens go: block id * block_size + offset."""
        size = self.cache.block_size
        positions = np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int64)
        return chunk.sequence.block_table.array()[positions // size] * size + positions % size
