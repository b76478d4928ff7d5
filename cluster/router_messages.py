"""What the router's decisions are made from, and what they ask for. Plain data; failures are stimuli too."""

from dataclasses import dataclass

from cluster.control import (
    AbortRequest,
    AbsentWorker,
    DecodeAdopted,
    HandoffFailed,
    PrefillDone,
    RequestError,
    StartDecode,
    StartLocal,
    StartPrefill,
    Tokens,
    WorkerAddress,
    WorkerLoad,
)
from cluster.events import Event
from engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A client's request, read at ``arrived_at`` and tokenized. Pinned workers are for readiness probes."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    label: str = "client"
    client_id: str = ""
    pinned_prefill: str | None = None
    pinned_decode: str | None = None


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """``reason`` as of RequestCancelled."""

    request_id: str
    reason: str = "client_gone"


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string ended the text; tokens after it are not wanted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TokensWritten:
    """``count`` more tokens of a request reached the client (or, unstreamed, the router's buffer for it)."""

    request_id: str
    count: int


@dataclass(frozen=True, slots=True)
class WorkersListed:
    """The supervisor's whole list of workers, as in SetWorkers."""

    workers: tuple[WorkerAddress, ...]
    absent: tuple[AbsentWorker, ...] = ()
    draining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    worker_id: str
    message: Tokens | PrefillDone | DecodeAdopted | HandoffFailed | RequestError


@dataclass(frozen=True, slots=True)
class ModeSet:
    mode: str
    cause: str


@dataclass(frozen=True, slots=True)
class CodecSet:
    codec: str
    cause: str


@dataclass(frozen=True, slots=True)
class HandoffSet:
    handoff: str
    cause: str


@dataclass(frozen=True, slots=True)
class LinkSet:
    """What was asked of the links; 0 = unlimited."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerReported:
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; the shell sends one about every 50 ms while anything waits."""


Stimulus = (
    RequestSubmitted
    | ClientLeft
    | StopMatched
    | TokensWritten
    | WorkersListed
    | WorkerConnected
    | WorkerLost
    | WorkerSaid
    | ModeSet
    | CodecSet
    | HandoffSet
    | LinkSet
    | WorkerReported
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: str
    message: StartPrefill | StartDecode | StartLocal | AbortRequest


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give a token to the client; ``finish_reason`` is set on the last."""

    request_id: str
    token_id: int
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that the request is over without its end. ``retry_after_s`` 0 = none."""

    request_id: str
    status: int
    message: str
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class Emit:
    event: Event


Instruction = Send | Deliver | Fail | Emit
