"""What an engine step takes, from a few measurements of one engine. Pure; knows no scheduler and no clock.

A prefill of n tokens takes ``base + a n + b n^2`` (products grow with n, attention with its square); the line is fitted
to what ``bench engine`` measured, and what it leaves over is interpolated, so that every measured length comes out as
measured. A decode step of B sequences with K keys together takes ``p(B) + q(B) K``: weights are read once whatever B
is, keys and values once for each sequence. p and q are lines between the measured batches.
"""

import copy
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MIN_PREFILLS: Final = 2
"""Prompt lengths that must have been measured: with one of them nothing is known of another."""


class NotMeasured(ValueError):
    """A benchmark's document does not say enough; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step of ``batch`` sequences, each with ``context`` keys."""

    batch: int
    context: float
    seconds: float


class StepCosts:
    """Seconds of engine steps. ``max_num_seqs``: the largest batch that is ever asked for.

    Raises NotMeasured for fewer than two prompt lengths, or no decode step at all.
    """

    def __init__(
        self, prefills: Iterable[PrefillPoint], decodes: Iterable[DecodePoint], max_num_seqs: int
    ) -> None:
        points = sorted(prefills, key=lambda point: point.tokens)
        if len({point.tokens for point in points}) < MIN_PREFILLS:
            raise NotMeasured(f"{len(points)} prompt lengths are measured; allowed is {MIN_PREFILLS} or more")
        self._step_s, self._key_s = _decode_lines(list(decodes), max_num_seqs)
        self.base_s = min(self._step_s[0], points[0].seconds)
        self._factor = 1.0
        self._tokens = [0, *(point.tokens for point in points)]
        self._linear, self._square = _fit(points, self.base_s)
        smooth = [self._smooth(point.tokens) for point in points]
        self._over = [0.0, *(point.seconds - s for point, s in zip(points, smooth, strict=True))]

    def with_slower_prefill(self, factor: float) -> "StepCosts":
        """The same, but every prefill takes ``factor`` times as long."""
        slower = copy.copy(self)
        slower._factor = factor
        return slower

    def prefill_s(self, num_tokens: int) -> float:
        """The first ``num_tokens`` of a prompt, computed alone."""
        return self._factor * max(self.base_s, self._smooth(num_tokens) + self._left_over(num_tokens))

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Tokens ``start .. start + num_tokens - 1`` of a prompt, computed alone."""
        before = self.prefill_s(start) if start else 0.0
        return max(0.0, self.prefill_s(start + num_tokens) - before)

    def decode_s(self, batch: int, keys: int, num_steps: int = 1) -> float:
        """``num_steps`` steps of ``batch`` sequences that read ``keys`` keys together in the first of them; every
        sequence has one more in each step."""
        grown = batch * num_steps * (num_steps - 1) / 2
        return num_steps * self._step_s[batch] + self._key_s[batch] * (num_steps * keys + grown)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, keys: int) -> float:
        """One step: prompt chunks (start, tokens) beside ``batch`` decoding sequences. The weights are read once."""
        firsts = sum(1 for start, _ in chunks if start == 0)
        prompts_s = sum(self.chunk_s(start, num_tokens) for start, num_tokens in chunks)
        prompts_s -= max(0, firsts - 1) * self.base_s * self._factor
        return prompts_s + (self.decode_s(batch, keys) - self._step_s[0] if batch else 0.0)

    def _smooth(self, num_tokens: int) -> float:
        return self.base_s + num_tokens * (self._linear + self._square * num_tokens)

    def _left_over(self, num_tokens: int) -> float:
        """What was measured beyond the line: between two lengths on a straight one, after the last in proportion."""
        if num_tokens >= self._tokens[-1]:
            return self._over[-1] * num_tokens / self._tokens[-1]
        above = bisect_left(self._tokens, num_tokens)
        if self._tokens[above] == num_tokens:
            return self._over[above]
        x, y = self._tokens[above - 1], self._over[above - 1]
        return y + (self._over[above] - y) * (num_tokens - x) / (self._tokens[above] - x)


def costs_from_document(document: Mapping[str, Any], max_num_seqs: int) -> StepCosts:
    """From what ``bench engine --json`` prints: medians of its samples. Raises NotMeasured."""
    try:
        prefills = [
            PrefillPoint(case["prompt_tokens"], case["ttft_ms"]["median"] / 1e3)
            for case in document["prefill"]
            if case["ttft_ms"]["median"]
        ]
        decodes = [
            DecodePoint(case["batch"], case["context"], case["step_ms"]["median"] / 1e3)
            for case in document["decode"]
            if case["step_ms"]["median"]
        ]
    except (KeyError, TypeError) as error:
        raise NotMeasured(f"it is no document of bench engine: {error} is missing or wrong") from error
    return StepCosts(prefills, decodes, max_num_seqs)


def _fit(points: Sequence[PrefillPoint], base_s: float) -> tuple[float, float]:
    """a and b of ``base + a n + b n^2``, neither below 0, by least squares of relative errors."""
    tokens = np.array([point.tokens for point in points], float)
    seconds = np.array([point.seconds for point in points])
    terms = np.stack([tokens, tokens**2], axis=1) / seconds[:, None]
    wanted = (seconds - base_s) / seconds
    linear, square = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    if linear < 0 or square < 0:
        only = 0 if square < 0 else 1
        value = max(0.0, float(terms[:, only] @ wanted / (terms[:, only] @ terms[:, only])))
        linear, square = (value, 0.0) if only == 0 else (0.0, value)
    return float(linear), float(square)


def _decode_lines(points: Sequence[DecodePoint], max_num_seqs: int) -> tuple[list[float], list[float]]:
    """p and q for every batch from 0 to ``max_num_seqs``; 0: what a step takes whatever is in it."""
    batches = sorted({point.batch for point in points})
    if not batches:
        raise NotMeasured("no decode step is measured; allowed is 1 or more")
    lines = {batch: _line([point for point in points if point.batch == batch]) for batch in batches}
    asked = np.arange(max_num_seqs + 1, dtype=float)
    known = np.array(batches, float)
    steps = np.array([lines[batch][0] for batch in batches])
    keys = np.array([lines[batch][1] for batch in batches])
    step_s = np.interp(asked, known, steps)
    if len(batches) > 1:
        grows = max(0.0, float((steps[-1] - steps[-2]) / (known[-1] - known[-2])))
        step_s = np.where(asked > known[-1], steps[-1] + grows * (asked - known[-1]), step_s)
        starts = max(0.0, float((steps[1] - steps[0]) / (known[1] - known[0])))
        step_s = np.where(asked < known[0], np.maximum(0.0, steps[0] - starts * (known[0] - asked)), step_s)
    return step_s.tolist(), np.interp(asked, known, keys).tolist()


def _line(points: Sequence[DecodePoint]) -> tuple[float, float]:
    """(p, q) of one batch, neither below 0; one context says nothing of q."""
    keys = np.array([point.batch * point.context for point in points], float)
    seconds = np.array([point.seconds for point in points])
    if len(set(keys.tolist())) < 2:
        return float(seconds.mean()), 0.0
    slope = float(np.polyfit(keys, seconds, 1)[0])
    slope = max(0.0, slope)
    return max(0.0, float(seconds.mean() - slope * keys.mean())), slope
