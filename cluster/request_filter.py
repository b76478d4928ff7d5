"""Which request events count, and in which order. Knows no number.

Worker and router send their events separately, so a worker's first fact about a request can stand in the log
before the router's RequestArrived. Readiness probes look like requests but are none of the operator's.
"""

from collections import OrderedDict
from typing import Final

from cluster.events import (
    DecodeAdmitted,
    FellBack,
    FirstToken,
    HandoffChosen,
    HandoffMeasured,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    TextDelivered,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    TransferProgressed,
    TransferStarted,
)

RequestEvent = (
    HandoffChosen | HandoffMeasured
    | TextDelivered | TokensDelivered | RequestArrived | RequestDispatched
    | PrefillStarted | PrefillProgressed | PrefillFinished
    | TransferStarted | TransferProgressed | TransferCompleted | TransferFailed | DecodeAdmitted | FirstToken | FellBack
    | RequestRetried | RequestMigrated | RequestFinished | RequestFailed | RequestRejected | RequestCancelled
)  # fmt: skip
"""Every event about one request."""

PROBE_LABEL: Final = "probe"

_KNOWN_LIMIT: Final = 100_000
_EARLY_LIMIT: Final = 4096


class RequestFilter:
    """Passes events on: those of a request only after its RequestArrived, those of a probe never.

    Bounded: forgets requests beyond the last 100,000, and early events of more than 4096 unknown requests.
    """

    def __init__(self) -> None:
        self.num_probes = 0
        self._is_probe: OrderedDict[str, bool] = OrderedDict()
        self._early: OrderedDict[str, list[RequestEvent]] = OrderedDict()

    def pass_on(self, event: RequestEvent) -> list[RequestEvent]:
        """What is to be counted now, in order: the event itself, with those that waited for it, or nothing."""
        if isinstance(event, RequestArrived):
            return self._arrive(event)
        is_probe = self._is_probe.get(event.request_id)
        if is_probe is not None:
            return [] if is_probe else [event]
        if isinstance(event, RequestRejected):
            return [event]  # refused before it arrived
        self._early.setdefault(event.request_id, []).append(event)
        if len(self._early) > _EARLY_LIMIT:
            self._early.popitem(last=False)
        return []

    def _arrive(self, event: RequestArrived) -> list[RequestEvent]:
        is_probe = event.label == PROBE_LABEL
        self._is_probe[event.request_id] = is_probe
        if len(self._is_probe) > _KNOWN_LIMIT:
            self._is_probe.popitem(last=False)
        early = self._early.pop(event.request_id, [])
        if is_probe:
            self.num_probes += 1
            return []
        return [event, *early]
