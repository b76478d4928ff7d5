"""A drill as data: what is sent, what is broken and when, and what has to be true afterwards.

Everything is sent twice: undisturbed, then the same again with the faults. Knows no process, no clock and no file;
``drill_file`` reads one.
"""

from typing import Any, Final

import msgspec

from cluster.drill_expectation import Expectation
from cluster.fault_kinds import FaultKind, find_fault

DRILL_PROFILE: Final[dict[str, Any]] = {
    "model.dtype": "float32",
    "engine.prefix_caching": False,
    "router.port": 0,
}
"""What every drill sets unless it says otherwise: tokens that are compared must be exact, and nothing remembered."""

ROLES: Final = ("prefill", "decode")
ANY_OF_ROLE: Final = "every-"
ROUTER: Final = "router"
LINK_TARGET: Final = "link"

TRIGGERS: Final = (
    "request_arrived", "request_dispatched", "prefill_started", "prefill_progressed", "prefill_finished",
    "transfer_started", "transfer_completed", "decode_admitted", "first_token", "tokens_delivered",
    "fell_back", "request_retried", "request_migrated", "request_finished", "worker_ready", "worker_exited",
    "worker_drained", "heartbeat_missed",
)  # fmt: skip
"""Events on which a fault can happen, by their name in the run log."""

DEFAULT_TIMEOUT_S: Final = 120.0
"""Ten times what any drill that ships needs on two idle cores."""

HEALED: Final = "healed"
"""Not an event but a state, and a trigger too: every fault of the rules before has happened and is over."""

PROCESS_TRIGGERS: Final = ("worker_ready", "worker_exited", "worker_drained", "heartbeat_missed")


class DrillPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RequestGroup(DrillPart, frozen=True, kw_only=True):
    """``count`` requests from ``at_s`` on, one every ``every_s``; or ``streams`` at a time until all else is over.

    ``prompts`` different prompts take turns, 0 = as many as requests. ``is_disturbance``: it is a part of what is done
    to the cluster, so the undisturbed round leaves it out; its prompts are answered one by one before.
    """

    count: int = 1
    streams: int = 0
    prompts: int = 0
    prompt_tokens: int = 200
    max_tokens: int = 32
    temperature: float = 0.0
    at_s: float = 0.0
    every_s: float = 0.0
    is_disturbance: bool = False

    @property
    def num_prompts(self) -> int:
        return self.prompts or (self.streams or self.count)


class FaultRule(DrillPart, frozen=True, kw_only=True):
    """What to break and when: ``at_s`` after the beginning, or ``after_s`` after an event.

    ``on`` names the event, or is ``healed``. With a request's event ``of`` names a group, and the fault happens when
    ``requests`` of it had such an event (``position``: tokens were delivered beyond it). With a process's event
    ``worker`` names the process. ``times``: again on each further one, up to so many.

    ``target``: a worker's id, ``router``, ``link``; ``prefill`` or ``decode``: the one that the request is on;
    ``every-prefill``, ``every-decode``: all of them; for ``leave`` the request itself, so none.
    """

    fault: str
    target: str = ""
    on: str = ""
    of: str = ""
    worker: str = ""
    requests: int = 1
    position: int = 0
    times: int = 1
    at_s: float = 0.0
    after_s: float = 0.0
    seconds: float = 0.0
    bandwidth: str = ""
    delay_ms: float = 0.0

    @property
    def kind(self) -> FaultKind:
        return find_fault(self.fault)


class Drill(DrillPart, frozen=True, kw_only=True):
    """``settings``: dotted key -> value, over the profile. ``timeout_s`` is for each of the two rounds."""

    name: str
    title: str
    promise: str
    requests: dict[str, RequestGroup]
    faults: tuple[FaultRule, ...] = ()
    expect: tuple[Expectation, ...] = ()
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
