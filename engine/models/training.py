"""Training by processor time: packed batches, stages of growing length, Muon and AdamW.

Knows tokens, not text files nor directories. The schedule is a function of the share of the budget used, so a slow
machine ends with a finished, if less trained, model; a busy one, or one that stops the process, only takes longer.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.training_model import TrainingModel

BUCKETS = ((0, 512), (512, 2048), (2048, 4096), (4096, 8192))
"""Positions [from, to) that are measured apart."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A share of the time budget spent on one shape of batch."""

    share: float
    batch: int
    tokens: int
    skips: bool = False  # leave a random gap in the positions, so that short rows span the whole context


# Attention over 8,192 positions costs several times a short step per token, so most learning happens short, and
# the middle stage meets long distances cheaply: its rows skip positions.
STAGES = (Stage(0.62, 6, 512), Stage(0.20, 2, 2048, skips=True), Stage(0.18, 1, 8192))


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Peak rates; all decay linearly to 2 % of the peak."""

    matrix_lr: float = 0.02
    embedding_lr: float = 0.004
    norm_lr: float = 0.004
    momentum: float = 0.95
    warmup: float = 0.02  # share of the budget


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What a training run did."""

    steps: tuple[int, ...]  # per stage
    tokens: int
    wall_s: float
    last_loss: float  # nats per token, mean of the last 20 steps


class Packer:
    """Endless packed rows: each lane reads documents one after another, every document ended by its end token."""

    def __init__(
        self, kinds: Sequence[Sequence[list[int]]], weights: Sequence[float], lanes: int, seed: int
    ) -> None:
        """``kinds``: encoded documents by kind; ``weights``: the share of tokens each kind shall have."""
        self.rng = random.Random(seed)
        self.kinds = [list(documents) for documents in kinds]
        # A kind of long documents is drawn less often for the same share of tokens.
        self.draw_weights = [
            weight * len(documents) / sum(map(len, documents))
            for weight, documents in zip(weights, kinds, strict=True)
        ]
        self.waiting: list[list[list[int]]] = [[] for _ in kinds]
        self.lanes: list[list[int]] = [[] for _ in range(lanes)]

    def batch(self, rows: int, tokens: int) -> Tensor:
        """The next (rows, tokens + 1) token ids; ``rows`` at most the number of lanes."""
        return torch.tensor([self._row(lane, tokens + 1) for lane in range(rows)])

    def _row(self, lane: int, length: int) -> list[int]:
        buffer = self.lanes[lane]
        while len(buffer) < length:
            buffer.extend(self._document())
        # The last token is the next row's first: every token is a target once.
        self.lanes[lane] = buffer[length - 1 :]
        return buffer[:length]

    def _document(self) -> list[int]:
        kind = self.rng.choices(range(len(self.kinds)), self.draw_weights)[0]
        if not self.waiting[kind]:
            self.waiting[kind] = list(self.kinds[kind])
            self.rng.shuffle(self.waiting[kind])
        return self.waiting[kind].pop()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz iterations, for the matrices inside the layers.

    In a type of choice, where torch's own always casts to bfloat16, which is slow on processors without it.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], lr: float, momentum: float, dtype: torch.dtype
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.dtype = dtype  # of the iterations; the momentum stays as the parameters are

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients at hand; ``closure`` is not supported and not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average: Tensor = state["momentum"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(average, group["momentum"])
                direction = orthogonalise(nesterov.to(self.dtype)).to(parameter.dtype)
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(direction, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The nearest matrix whose singular values are all about 1; same shape."""
    a, b, c = 3.4445, -4.7750, 2.0315  # quintic that pulls (0, 1] towards 1 in few steps
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def rate_share(progress: float, warmup: float) -> float:
    """Share of the peak learning rate at ``progress`` (0 to 1) of the budget."""
    return max(0.02, min(progress / warmup, (1.0 - progress) / (1.0 - warmup)))


def stage_at(progress: float, stages: Sequence[Stage] = STAGES) -> int:
    """Index of the stage at ``progress`` (0 to 1) of the budget."""
    end = 0.0
    for index, stage in enumerate(stages):
        end += stage.share
        if progress < end:
            return index
    return len(stages) - 1


def skipped_positions(tokens: int, max_positions: int) -> Tensor:
    """(tokens,) rising positions below ``max_positions`` with one gap of random place and size."""
    positions = torch.arange(tokens)
    cut = int(torch.randint(1, tokens, ()))
    positions[cut:] += int(torch.randint(0, max_positions - tokens + 1, ()))
    return positions


def train(
    model: TrainingModel,
    packer: Packer,
    budget_s: float,
    *,
    hyper: Hyperparameters | None = None,
    stages: Sequence[Stage] = STAGES,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.process_time,
    report: Callable[[str], None] = print,
) -> TrainingReport:
    """Train ``model`` in place for ``budget_s`` seconds of ``clock``; ``report`` gets a line every 25 steps.

    The default clock counts the processor time of all threads together. ``dtype`` is that of the matrix products;
    the weights stay float32.
    """
    hyper = hyper or Hyperparameters()
    optimisers = _optimisers(model, hyper, dtype)
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    mixed = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    losses = torch.compile(model.losses, dynamic=False) if compiled else model.losses

    def loss_of(stage: Stage) -> Tensor:
        rows = packer.batch(stage.batch, stage.tokens)
        positions = skipped_positions(stage.tokens, model.shape.max_positions) if stage.skips else None
        with mixed:
            return losses(rows, positions).mean()

    if compiled:  # every stage before the clock starts, or compiling would eat the warm-up
        for stage in stages:
            loss_of(stage).backward()
        model.zero_grad(set_to_none=True)
    steps, tokens, recent = [0] * len(stages), 0, deque[float](maxlen=20)
    started, started_wall_s = clock(), time.monotonic()
    while (progress := (clock() - started) / budget_s) < 1.0:
        index = stage_at(progress, stages)
        stage = stages[index]
        loss = loss_of(stage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, lrs in zip(optimisers, peaks, strict=True):
            for group, lr in zip(optimiser.param_groups, lrs, strict=True):
                group["lr"] = lr * rate_share(progress, hyper.warmup)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        recent.append(loss.item())
        steps[index] += 1
        tokens += stage.batch * stage.tokens
        if sum(steps) % 25 == 0:
            per_s, nats = tokens / (time.monotonic() - started_wall_s), sum(recent) / len(recent)
            report(f"{progress:4.0%} {stage.batch} x {stage.tokens} {nats:.3f} nats {per_s:.0f} tokens/s")
    return TrainingReport(tuple(steps), tokens, time.monotonic() - started_wall_s, sum(recent) / len(recent))


def _optimisers(
    model: TrainingModel, hyper: Hyperparameters, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    embedding = model.model.embed_tokens.weight
    rest = [parameter for parameter in model.parameters() if parameter is not embedding]
    norms = [parameter for parameter in rest if parameter.ndim < 2]
    return [
        Muon(
            [parameter for parameter in rest if parameter.ndim == 2], hyper.matrix_lr, hyper.momentum, dtype
        ),
        torch.optim.AdamW(
            [{"params": [embedding], "lr": hyper.embedding_lr}, {"params": norms, "lr": hyper.norm_lr}],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
