"""What an engine says of itself. Plain data: importing this does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.request import FinishReason
from engine.sequence import SequenceStatus


class NewToken(NamedTuple):
    """One sampled token; ``output_position`` is 0 for a request's first one."""

    request_id: str
    token_id: int
    output_position: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """KV of tokens ``start .. start + num_tokens - 1`` came into place. The ranges of a request join up from 0.

    The first range of a request includes the ``num_cached`` tokens that the prefix cache gave.
    """

    request_id: str
    start: int
    num_tokens: int
    num_cached: int
    done: bool


OnLayer = Callable[[tuple[PrefillProgress, ...], int], None]
"""(prefilled, layer): in the middle of a step, that layer's KV of all these ranges is in place and final."""


class FinishedRequest(NamedTuple):
    """A request that ended in this step; its blocks are free."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did. A preempted request starts again at token 0 later; its sampled tokens stay."""

    new_tokens: tuple[NewToken, ...]
    prefilled: tuple[PrefillProgress, ...]
    finished: tuple[FinishedRequest, ...]
    preempted: tuple[str, ...]  # request ids
    num_batched_tokens: int
    num_prefill_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment. Blocks whose content is only kept for reuse are free."""

    waiting: int
    running: int
    reserved: int
    handing_off: int
    free_blocks: int
    held_blocks: int
    total_blocks: int
    waiting_prompt_tokens: int  # not computed yet, over waiting and running sequences
    cached_prefix_tokens: int  # taken from the prefix cache since the engine began
    preemptions: int  # since the engine began


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """Who holds blocks, in which status, and since when (time.monotonic())."""

    request_id: str
    status: SequenceStatus
    num_blocks: int
    since: float
