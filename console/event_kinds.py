"""What an event is about, by its kind alone.

A fold that met every event with ``isinstance`` or ``match`` would ask one class after the other, some forty of them for
an event that none is about; a set is asked once. Kinds have no subclasses.
"""

from typing import Final, TypeGuard, get_args

from cluster.events import Event
from cluster.request_filter import RequestEvent
from console.worker_view import WorkerEvent

REQUEST_KINDS: Final[frozenset[type]] = frozenset(get_args(RequestEvent))
WORKER_KINDS: Final[frozenset[type]] = frozenset(get_args(WorkerEvent))
"""Those of processes and links; transfers are both."""


def is_of_request(event: Event) -> TypeGuard[RequestEvent]:
    return type(event) in REQUEST_KINDS


def is_of_worker(event: Event) -> TypeGuard[WorkerEvent]:
    return type(event) in WORKER_KINDS
