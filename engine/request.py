"""What a user asks of an engine. Plain data: no torch, no sockets, no clock."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API plus the two it does not have."""

    STOP = "stop"  # the model's end token, or a stop string seen by the router
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client left, or an operator cancelled
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are drawn.

    The draw at output position ``i`` (0 for the first token) depends only on the logits, ``seed`` and ``i``,
    so any worker can continue any request. ``temperature == 0`` is greedy and ignores the rest.

    Raises ValueError naming the field, its value and what is allowed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = no limit
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; allowed is 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; allowed is above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; allowed is 0 (no limit) or more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed is 1 or more")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; allowed is 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as an engine sees it.

    ``output_token_ids`` is not empty when the request continues one that another worker began: those tokens
    were already sampled (and sent), count against ``max_tokens``, and are never emitted again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    output_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id}: the prompt has no tokens; allowed is 1 or more")
