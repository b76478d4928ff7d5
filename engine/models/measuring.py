"""Held-out bits per byte, overall and by position, and greedy samples of a trained model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.training import BUCKETS
from engine.models.training_model import TrainingModel


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Bits per byte over all scored tokens, and over those at the positions of each bucket."""

    overall: float
    by_position: dict[str, float]  # "0-512" -> bits per byte
    num_bytes: int  # scored, counted once per window they are in


@torch.no_grad()
def bits_per_byte(
    model: TrainingModel, token_ids: Sequence[int], token_bytes: Tensor, stride: int = 2048
) -> BitsPerByte:
    """Score a stream in windows of ``max_positions`` tokens.

    ``token_bytes`` (vocab,): UTF-8 bytes per token id. Windows overlap by all but ``stride`` tokens, so that the
    buckets see the same text at different positions and can be compared.
    """
    window = model.shape.max_positions
    if len(token_ids) < window + 1:
        raise ValueError(f"held-out stream is {len(token_ids)} tokens; at least {window + 1} are needed")
    nats, sizes = torch.zeros(window, dtype=torch.double), torch.zeros(window, dtype=torch.double)
    for start in range(0, len(token_ids) - window, stride):
        row = torch.tensor([token_ids[start : start + window + 1]])
        nats += model.losses(row)[0].double()
        sizes += token_bytes[row[0, 1:]].double()
    per_bucket = {
        f"{first}-{last}": (nats[first:last].sum() / sizes[first:last].sum()).item() / math.log(2)
        for first, last in BUCKETS
    }
    return BitsPerByte((nats.sum() / sizes.sum()).item() / math.log(2), per_bucket, int(sizes.sum()))


@torch.no_grad()
def greedy(
    model: TrainingModel, prompt: Sequence[int], max_new_tokens: int, end_ids: frozenset[int]
) -> list[int]:
    """The likeliest continuation of ``prompt``, up to and including the first of ``end_ids``."""
    token_ids = list(prompt)
    for _ in range(max_new_tokens):
        token_ids.append(int(model(torch.tensor([token_ids]))[0, -1].argmax()))
        if token_ids[-1] in end_ids:
            break
    return token_ids[len(prompt) :]
