"""Scheduled chunks to tensors to token ids. Knows no queues: it computes what it is told."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.block_allocator import contiguous_runs
from engine.kv_cache import PagedKVCache
from engine.model import ChunkRows, ForwardBatch, LlamaModel
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
    """Runs one model over one cache."""

    def __init__(self, model: LlamaModel, cache: PagedKVCache) -> None:
        self.model = model
        self.cache = cache

    def run(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Compute the batch's KV into the cache and sample where a chunk reaches its sequence's end."""
        logits = self.model.forward(self._forward_batch(batch), self.cache)
        ended = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        draws = [(sequence.request.sampling, sequence.num_output_tokens) for sequence in ended]
        token_ids = sample(logits, draws) if ended else []
        return [
            SampledToken(sequence, token_id, position)
            for sequence, token_id, (_, position) in zip(ended, token_ids, draws, strict=True)
        ]

    def _forward_batch(self, batch: ScheduledBatch) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        chunks: list[ChunkRows] = []
        logit_rows: list[int] = []
        for chunk in batch.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            runs = tuple(contiguous_runs(sequence.block_table))
            chunks.append(ChunkRows(len(token_ids), chunk.num_tokens, int(chunk.samples), end, runs))
            token_ids += sequence.token_ids[chunk.start : end]
            positions.append(np.arange(chunk.start, end, dtype=np.int64))
            slots.append(self._slots(chunk))
            if chunk.samples:
                logit_rows.append(len(token_ids) - 1)
        device = self.model.device
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            slots=torch.from_numpy(np.concatenate(slots)).to(device),
            chunks=tuple(chunks),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )

    def _slots(self, chunk: ScheduledChunk) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where the chunk's tokens go: block id * block_size + offset."""
        size = self.cache.block_size
        positions = np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int64)
        first = chunk.start // size
        blocks = np.asarray(chunk.sequence.block_table[first : positions[-1] // size + 1], dtype=np.int64)
        return blocks[positions // size - first] * size + positions % size
