"""Which events become lines of the event feed, and how they read. Pure."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, get_args

from cluster.events import (
    NO_PREFILL_WORKER,
    BlocksStranded,
    BurstInjected,
    CodecChanged,
    Event,
    FaultHealed,
    FaultInjected,
    FellBack,
    HandoffChanged,
    HandoffChosen,
    HeartbeatMissed,
    LinkConfigured,
    LinkProbed,
    LinkTuned,
    LoadStarted,
    LoadStopped,
    ModeChanged,
    NoteAdded,
    PeerRefused,
    PrefillProgressed,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    RoleChanged,
    RouterStats,
    RunLogResumed,
    RunLogStalled,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    TextDelivered,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    TransferProgressed,
    TransferStarted,
    WorkerAdded,
    WorkerDrained,
    WorkerDraining,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRemoved,
    WorkerRestarting,
    WorkerResumed,
    WorkerStarting,
    WorkerStats,
)
from cluster.units import format_bits_per_s, format_bytes
from console.event_kinds import is_of_request
from console.text_format import (
    format_ms,
    format_rate_pair,
    format_ratio,
    format_skipped,
    short_id,
    short_worker,
)
from console.worker_view import exit_words, not_started_words

NOTABLE: Final = "notable"
FAULTS: Final = "faults"
TRANSFERS: Final = "transfers"
DRILLS: Final = "drills"
REQUESTS: Final = "requests"
FILTERS: Final = (NOTABLE, FAULTS, TRANSFERS, DRILLS, REQUESTS)
"""The feed's tabs. ``notable`` shows everything except the lines that every request makes."""

CLUSTER: Final = "cluster"
"""Category of lines that only ``notable`` shows: processes starting, links probed."""

BIG_TRANSFER_BYTES: Final = 16 * 2**20
"""A transfer from this size on is notable by itself."""

SILENT: Final[frozenset[type]] = frozenset(
    {TokensDelivered, WorkerStats, RouterStats, PrefillProgressed, TransferProgressed, TextDelivered}
)
"""The frequent kinds of events, none of which has a line or a mark."""

_ProcessEvent = (
    RunStarted | RunReady | RunLogStalled | RunLogResumed | RunStopping | RunStopped
    | WorkerStarting | WorkerReady | PeerRefused | WorkerExited | WorkerRestarting | WorkerFailed | HeartbeatMissed
    | LinkConfigured | LinkProbed | LinkTuned
)  # fmt: skip
_FleetEvent = (
    WorkerDraining
    | WorkerDrained
    | WorkerResumed
    | WorkerAdded
    | WorkerRemoved
    | RoleChanged
    | BlocksStranded
)
_TransferEvent = TransferStarted | TransferCompleted | TransferFailed
_RequestEvent = (
    RequestArrived | HandoffChosen | RequestFinished | FellBack | RequestRetried | RequestMigrated
    | RequestFailed | RequestRejected | RequestCancelled
)  # fmt: skip
_OperatorEvent = (
    ModeChanged | CodecChanged | HandoffChanged | LoadStarted | LoadStopped | BurstInjected
    | FaultInjected | FaultHealed | NoteAdded
)  # fmt: skip


class Line(NamedTuple):
    """Of an event. ``level``: info | good | warn | bad. ``routine`` lines show only under their own category.

    Lines with the same ``flood`` ("" = none) that come close together become one with their number.
    """

    category: str
    text: str
    level: str = "info"
    routine: bool = False
    flood: str = ""


def feed_line(event: Event) -> Line | None:
    """The event's line, or None where it has none (stats, single steps of a request)."""
    write = _WRITERS.get(type(event))
    return write(event) if write is not None else None


def _process_line(event: _ProcessEvent) -> Line:
    match event:
        case RunStarted():
            return Line(CLUSTER, f"run {event.run} started: {event.profile}, {event.model}, {event.mode}")
        case RunReady():
            return Line(CLUSTER, f"cluster READY after {event.after_s:.1f} s at {event.url}", "good")
        case RunLogStalled():
            return Line(FAULTS, f"run log CANNOT BE WRITTEN: {event.reason}; events wait in memory", "bad")
        case RunLogResumed():
            return Line(
                FAULTS, f"run log written again after {event.after_s:.1f} s, nothing is missing", "good"
            )
        case RunStopping():
            return Line(CLUSTER, f"stopping: {event.reason}")
        case RunStopped():
            return Line(
                CLUSTER, f"stopped; {event.orphans} processes left", "bad" if event.orphans else "info"
            )
        case WorkerStarting():
            return Line(CLUSTER, f"{event.worker_id} starting, pid {event.pid}{_restart(event.restarts)}")
        case WorkerReady():
            return Line(CLUSTER, f"{event.worker_id} READY after {event.after_s:.1f} s", "good")
        case PeerRefused():
            more = f" ({event.count} since the last such line)" if event.count > 1 else ""
            text = f"{event.worker_id} refused {event.peer} on its {event.port} port: {event.reason}{more}"
            return Line(FAULTS, text, "warn")
        case WorkerExited():
            level = "info" if event.cause == "stop" else "bad"
            return Line(FAULTS, f"{event.worker_id} EXITED {exit_words(event)} ({event.cause})", level)
        case WorkerRestarting():
            return Line(
                FAULTS,
                f"{event.worker_id} restarts in {event.backoff_s:.1f} s{_restart(event.restarts)}",
                "warn",
            )
        case WorkerFailed():
            return Line(FAULTS, f"{event.worker_id} FAILED, not restarted: {event.reason}", "bad")
        case HeartbeatMissed(part="start"):
            return Line(FAULTS, f"{event.worker_id} {not_started_words(event)}", "bad")
        case HeartbeatMissed():
            return Line(FAULTS, f"{event.worker_id} SILENT for {event.silent_s:.1f} s", "warn")
        case LinkConfigured():
            asked = format_bits_per_s(event.asked_bits_per_s)
            limit = f"; {event.limit}" if event.limit else ""
            return Line(CLUSTER, f"link {event.backend}: {asked}, {event.asked_delay_ms:g} ms one way{limit}")
        case LinkProbed():
            pair = f"{short_worker(event.from_worker)}>{short_worker(event.to_worker)}"
            rate = format_rate_pair(event.achieved_bits_per_s, 0.0)
            return Line(CLUSTER, f"link {pair} probed: {rate}, round trip {event.rtt_ms:.2f} ms")
        case LinkTuned():
            return _tuned_line(event)


def subject(event: Event) -> tuple[str, str]:
    """(request id, worker id) that the event's line is about; "" where there is none."""
    if is_of_request(event):
        return event.request_id, ""
    match event:
        case FaultInjected() | FaultHealed():
            return "", event.target
        case (
            WorkerStarting() | WorkerReady() | WorkerExited() | WorkerRestarting() | WorkerFailed() | HeartbeatMissed()
            | PeerRefused() | WorkerDraining() | WorkerDrained() | WorkerResumed() | WorkerAdded() | WorkerRemoved()
            | RoleChanged() | BlocksStranded()
        ):  # fmt: skip
            return "", event.worker_id
        case _:
            return "", ""


def _fleet_line(event: _FleetEvent) -> Line:
    match event:
        case WorkerDraining():
            why = "" if event.reason == "drain" else f" to {event.reason}"
            return Line(
                FAULTS, f"{event.worker_id} DRAINING{why}: no new requests{_cause(event.cause)}", "warn"
            )
        case WorkerDrained():
            return Line(
                FAULTS, f"{event.worker_id} drained in {event.after_s:.1f} s: nothing is left on it", "good"
            )
        case WorkerResumed():
            return Line(FAULTS, f"{event.worker_id} takes new requests again{_cause(event.cause)}", "good")
        case WorkerAdded():
            return Line(CLUSTER, f"{event.worker_id} added as {event.role}{_cause(event.cause)}", "good")
        case WorkerRemoved():
            return Line(CLUSTER, f"{event.worker_id} removed{_cause(event.cause)}", "warn")
        case RoleChanged():
            text = f"{event.worker_id} role {event.from_role} -> {event.role}{_cause(event.cause)}"
            return Line(CLUSTER, text, "good")
        case BlocksStranded():
            return Line(FAULTS, f"{event.worker_id} STRANDED {event.blocks} blocks: {event.holders}", "bad")


def _tuned_line(event: LinkTuned) -> Line:
    asked = f"rho {format_ratio(event.target_rho)}" + (f" of {event.target}" if event.target else "")
    limit = f"; {event.limit}" if event.limit else ""
    text = (
        f"link tuned for {asked}: asked {format_bits_per_s(event.asked_bits_per_s)} at "
        f"{event.prefill_tokens_per_s:,.0f} prefill tokens/s, rho here {format_ratio(event.rho)}{limit}"
    )
    return Line(CLUSTER, text, "warn" if event.limit else "good")


def _transfer_line(event: _TransferEvent) -> Line:
    match event:
        case TransferStarted():
            path = f"{short_worker(event.from_worker)}>{short_worker(event.to_worker)}"
            what = f"{event.codec} {format_bytes(event.raw_bytes)} ({event.tokens:,} tokens)"
            skipped = format_skipped(event.skipped_tokens, event.skipped_bytes)
            text = f"{short_id(event.request_id)} transfer {path} started: {what}{skipped}"
            return Line(TRANSFERS, text, routine=event.raw_bytes < BIG_TRANSFER_BYTES)
        case TransferCompleted():
            text = (
                f"{short_id(event.request_id)} transferred {format_bytes(event.wire_bytes)} {event.codec} in "
                f"{format_ms(event.duration_s * 1000)}, exposed {format_ms(event.exposed_s * 1000)}"
            )
            return Line(TRANSFERS, text, "good", routine=event.raw_bytes < BIG_TRANSFER_BYTES)
        case TransferFailed():
            why = f"{event.reason}{_detail(event.detail)}"
            text = f"{short_id(event.request_id)} transfer FAILED at {event.worker_id}: {why}"
            return Line(TRANSFERS, text, "bad")


def _request_line(event: _RequestEvent) -> Line:
    match event:
        case RequestArrived():
            asked = f"{event.prompt_tokens:,} tokens in, {event.max_tokens} out ({event.label})"
            return Line(REQUESTS, f"{short_id(event.request_id)} arrived: {asked}", routine=True)
        case HandoffChosen():
            where = f"{short_worker(event.prefill_worker)}>{short_worker(event.decode_worker)}"
            where = where if event.choice == "remote" else short_worker(event.decode_worker)
            return Line(REQUESTS, f"{short_id(event.request_id)} to {where}: {event.reason}", routine=True)
        case RequestFinished():
            took = format_ms(event.e2el_ms)
            return Line(
                REQUESTS,
                f"{short_id(event.request_id)} finished: {event.output_tokens} tokens in {took}",
                routine=True,
            )
        case FellBack():
            why = f"{event.reason}{_detail(event.detail)}"
            text = f"{short_id(event.request_id)} FALLBACK local prefill on {event.worker_id}: {why}"
            is_flood = (
                event.reason == NO_PREFILL_WORKER
            )  # no fault of its own, and every request's until one is there
            return Line(FAULTS, text, "warn", flood=event.reason if is_flood else "")
        case RequestRetried():
            why = f"{event.reason}{_detail(event.detail)}"
            return Line(FAULTS, f"{short_id(event.request_id)} RETRY attempt {event.attempt}: {why}", "warn")
        case RequestMigrated():
            tokens = f"{event.delivered_tokens} tokens"
            return Line(
                FAULTS,
                f"{short_id(event.request_id)} MIGRATED from {event.from_worker} after {tokens}",
                "warn",
            )
        case RequestFailed():
            return Line(
                FAULTS, f"{short_id(event.request_id)} FAILED ({event.status}): {event.reason}", "bad"
            )
        case RequestRejected():
            return Line(
                REQUESTS,
                f"{short_id(event.request_id) or 'a request'} rejected {event.status}: {event.reason}",
                "warn",
                flood=f"rejected {event.status}",
            )
        case RequestCancelled():
            return Line(REQUESTS, f"{short_id(event.request_id)} client left in {event.phase}", "warn")


def _operator_line(event: _OperatorEvent) -> Line:
    match event:
        case ModeChanged():
            return Line(DRILLS, f"mode is now {event.mode}{_cause(event.cause)}")
        case CodecChanged():
            return Line(DRILLS, f"codec is now {event.codec}{_cause(event.cause)}")
        case HandoffChanged():
            return Line(DRILLS, f"handoff is now {event.handoff}{_cause(event.cause)}")
        case LoadStarted():
            detail = f": {event.detail}" if event.detail else ""
            return Line(DRILLS, f"load {event.name} started{detail}{_cause(event.cause)}")
        case LoadStopped():
            return Line(DRILLS, f"load {event.name} stopped{_cause(event.cause)}")
        case BurstInjected():
            text = f"burst: {event.prompts} prompts of {event.prompt_tokens:,} tokens{_cause(event.cause)}"
            return Line(DRILLS, text, "warn")
        case FaultInjected():
            lasts = f" for {event.seconds:g} s" if event.seconds else ""
            text = f"{event.fault} {event.target}{lasts}{_detail(event.detail)}{_cause(event.cause)}"
            return Line(DRILLS, text, "warn")
        case FaultHealed():
            text = f"{event.fault} {event.target} healed after {event.after_s:.1f} s{_detail(event.detail)}"
            return Line(DRILLS, text, "good")
        case NoteAdded():
            return Line(DRILLS, f"note: {event.text}")


def _cause(cause: str) -> str:
    return f" ({cause})" if cause else ""


def _detail(detail: str) -> str:
    return f": {detail}" if detail else ""


def _restart(restarts: int) -> str:
    return f" (restart {restarts})" if restarts else ""


_WRITERS: Final[dict[type, Callable[[Any], Line]]] = {
    kind: write
    for write, kinds in (
        (_process_line, _ProcessEvent),
        (_fleet_line, _FleetEvent),
        (_transfer_line, _TransferEvent),
        (_request_line, _RequestEvent),
        (_operator_line, _OperatorEvent),
    )
    for kind in get_args(kinds)
}
