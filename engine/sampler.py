"""Logits to token ids. A pure function: the choice at output position i depends only on the logits, the seed and i.

There is no generator state to carry: any worker, at any time and in any batch, draws the same token.

Tokens are drawn by the Gumbel-max rule: the one whose ``logit / temperature`` plus a noise of its own is largest is
distributed as ``softmax(logits / temperature)`` (Gumbel, "Statistical Theory of Extreme Values", 1954; Maddison et al.,
https://arxiv.org/abs/1411.0030). The noise is a hash of (seed, position, token id), so logits that were rounded
differently choose differently only where the two best sums are as close as that rounding.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from engine.request import SamplingParams

Ids = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def gumbel_noise(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel numbers, one for each token id: between -3.7 and 36.8, of 52 random bits.

    The bits are those of SplitMix64 (Steele et al., https://doi.org/10.1145/2660193.2660195) at step ``token_id``,
    started from a hash of seed and position.
    """
    start = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, position))
    bits = token_ids.astype(np.uint64)
    bits *= _GOLDEN
    bits += np.uint64((start + int(_GOLDEN)) % 2**64)
    for shift, factor in _MIX:
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(12)).astype(np.float64)
    uniform += 0.5  # never 0 and never 1
    uniform *= 2.0**-52
    noise: Floats = np.log(-np.log(uniform))
    return np.negative(noise, out=noise)


def sample(logits: torch.Tensor, draws: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token id per row of ``logits (m, vocab)``; ``draws`` are each row's parameters and output position."""
    numbers = logits.to("cpu", torch.float32).numpy()
    tokens: list[int] = numbers.argmax(
        -1
    ).tolist()  # of equal logits, the lowest id; the first that is no number
    for row, (params, position) in enumerate(draws):
        if params.temperature > 0.0 and np.isfinite(numbers[row, tokens[row]]):
            tokens[row] = draw(numbers[row].astype(np.float64), params, position)
    return tokens


def draw(logits: Floats, params: SamplingParams, position: int) -> int:
    """A token of ``softmax(logits / temperature)``, cut by top_k and then by top_p, for one output position."""
    kept = candidates(logits, params)
    with np.errstate(over="ignore"):  # a temperature near 0: the quotient is -inf
        scores = (logits[kept] - logits.max()) / params.temperature
    scores += gumbel_noise(params.seed, position, kept)
    return int(kept[np.argmax(scores)])


def candidates(logits: Floats, params: SamplingParams) -> Ids:
    """Ids of the tokens that the cuts keep; without a cut all of them.

    top_k keeps so many of the largest logits, of equal ones those with lower ids. Of these top_p keeps the fewest,
    largest first, that hold so much of their probability together.
    """
    kept = np.arange(logits.size)
    if 0 < params.top_k < logits.size:
        floor = np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k]
        kept = _largest(logits, params.top_k, floor)
    if params.top_p < 1.0:
        values = logits[kept]
        with np.errstate(over="ignore"):
            weights = np.exp((values - values.max()) / params.temperature)
        total = weights.sum()
        # Tokens so light that all of them together weigh less than what may be left out need not be sorted.
        heavy = weights >= (1.0 - params.top_p) * total / weights.size
        falling = np.argsort(-values[heavy])
        sums = np.cumsum(weights[heavy][falling])
        last = min(int(np.searchsorted(sums, params.top_p * total)), falling.size - 1)  # both are rounded
        kept = kept[_largest(values, last + 1, values[heavy][falling[last]])]
    return kept


def _largest(values: Floats, count: int, floor: float) -> Ids:
    """Indices of the ``count`` largest, of which the least is ``floor``; of equal ones those that come first."""
    above = np.flatnonzero(values > floor)
    return np.concatenate((above, np.flatnonzero(values == floor)[: count - above.size]))
