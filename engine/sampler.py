"""Logits to token ids. A pure function: the draw at output position i depends only on the logits, the seed and i.

There is no generator state to carry: any worker, at any time and in any batch, draws the same token.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from engine.request import SamplingParams


def uniform(seed: int, position: int) -> float:
    """The random number of output position ``position``: in [0, 1), 53 bits, a hash of its two arguments."""
    bits = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, position))
    return float(bits >> 11) / 2**53


def sample(logits: torch.Tensor, draws: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token id per row of ``logits (m, vocab)``; ``draws`` are each row's parameters and output position."""
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()  # of equal logits, the lowest id
    for row, (params, position) in enumerate(draws):
        if params.temperature > 0.0:
            row_logits = logits[row].to("cpu", torch.float64).numpy()
            tokens[row] = draw(row_logits, params, uniform(params.seed, position))
    return tokens


def draw(logits: npt.NDArray[np.float64], params: SamplingParams, u: float) -> int:
    """Invert the cumulative distribution of ``softmax(logits / temperature)`` at ``u``, cut by top_k and top_p.

    With either cut, candidates come by falling probability, of equal ones the lower id first, and top_p keeps the
    fewest that reach its mass (after top_k). Without one they come in order of id: no sorting is needed.
    """
    order: npt.NDArray[np.intp] | None = None
    if 0 < params.top_k < logits.size:
        floor = np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k]
        kept = np.flatnonzero(logits >= floor)  # more than top_k where several equal the last one
        order = kept[np.argsort(-logits[kept], kind="stable")][: params.top_k]
    elif params.top_p < 1.0:
        order = np.argsort(-logits, kind="stable")
    candidates = logits if order is None else logits[order]
    with np.errstate(over="ignore"):  # a temperature near 0: the quotient is -inf, its weight 0
        cumulative = np.cumsum(np.exp((candidates - candidates.max()) / params.temperature))
    if params.top_p < 1.0:
        count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:count]
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    index = min(index, cumulative.size - 1)  # u * total may round up to total
    return index if order is None else int(order[index])
