"""Everything that can happen in a run, as a closed union of past-tense facts.

The run log is a list of these; metrics, the console and replay are folds over it. An event knows no widget, no
socket and no clock: ``at`` is ``time.monotonic()`` of the process that saw the fact (one clock for all processes of
a host), ``source`` names that process, ``index`` is given by the run log when the event is appended.
"""

from typing import Final

import msgspec

SCHEMA: Final = 1

PROMPT_CHARACTERS: Final = 2000
NO_PREFILL_WORKER: Final = "no_prefill_worker"  # a reason of a pick and of its fallback
MIN_PREFILL_TOKENS: Final = 64
"""Steps and prompts with fewer say little about the prefill rate: fixed costs dominate them."""


class EventBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Fields every event has."""

    at: float
    source: str = ""
    index: int = -1


# --- the run ---------------------------------------------------------------------------------------------------


class RunStarted(EventBase, frozen=True, kw_only=True, tag="run_started", omit_defaults=False):
    """First event of every log. ``wall_at`` (seconds since the epoch) anchors ``at`` to the wall clock.

    Defaults are written too, so that every log says its ``schema``.
    """

    run: str
    profile: str
    model: str
    mode: str
    codec: str
    wall_at: float
    handoff: str = "always"
    schema: int = SCHEMA


class RunReady(EventBase, frozen=True, kw_only=True, tag="run_ready"):
    """A real token went through every prefill x decode pair."""

    after_s: float
    url: str


class RunStopping(EventBase, frozen=True, kw_only=True, tag="run_stopping"):
    reason: str


class RunStopped(EventBase, frozen=True, kw_only=True, tag="run_stopped"):
    orphans: int = 0


class RunLogStalled(EventBase, frozen=True, kw_only=True, tag="run_log_stalled"):
    """The log could not be written (a full disk); events wait in memory. ``reason`` is the system's word."""

    reason: str


class RunLogResumed(EventBase, frozen=True, kw_only=True, tag="run_log_resumed"):
    """It could again, ``after_s`` later; nothing is missing."""

    after_s: float


class ModelDescribed(EventBase, frozen=True, kw_only=True, tag="model_described"):
    """What the workers loaded; one per run. Enough to compute KV bytes without the model."""

    model: str
    fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    max_model_len: int
    block_size: int


# --- processes -------------------------------------------------------------------------------------------------


class WorkerStarting(EventBase, frozen=True, kw_only=True, tag="worker_starting"):
    """A child process (worker or router) was spawned. ``cpus`` are the cores it is pinned to, () = not pinned."""

    worker_id: str
    role: str  # prefill | decode | both | router
    pid: int
    restarts: int = 0
    cpus: tuple[int, ...] = ()
    log: str = ""


class WorkerReady(EventBase, frozen=True, kw_only=True, tag="worker_ready"):
    worker_id: str
    role: str
    pid: int
    after_s: float
    total_blocks: int = 0
    kv_address: str = ""


class WorkerExited(EventBase, frozen=True, kw_only=True, tag="worker_exited"):
    """``signal`` 0: it exited by itself with ``exit_code``.

    ``cause``: crash | operator | stop | restart | hang | mismatch; stop and restart were asked for.
    """

    worker_id: str
    role: str
    pid: int
    exit_code: int = 0
    signal: int = 0
    cause: str = "crash"


class WorkerRestarting(EventBase, frozen=True, kw_only=True, tag="worker_restarting"):
    worker_id: str
    restarts: int
    backoff_s: float


class WorkerFailed(EventBase, frozen=True, kw_only=True, tag="worker_failed"):
    """Crash loop, or refused at start-up: not restarted. ``detail`` holds the last log lines."""

    worker_id: str
    reason: str
    detail: str = ""


class HeartbeatMissed(EventBase, frozen=True, kw_only=True, tag="heartbeat_missed"):
    """The process did not answer for so long, (``part`` "engine") its engine did not end a step, or ("start") it was
    not ready so long after its start. It is killed."""

    worker_id: str
    silent_s: float
    part: str = ""


class WorkerDraining(EventBase, frozen=True, kw_only=True, tag="worker_draining"):
    """It takes no new requests from now on. ``reason``: drain | restart | remove."""

    worker_id: str
    reason: str
    cause: str = ""


class WorkerDrained(EventBase, frozen=True, kw_only=True, tag="worker_drained"):
    """No request is left on it, ``after_s`` after the router heard of the drain."""

    worker_id: str
    after_s: float


class WorkerResumed(EventBase, frozen=True, kw_only=True, tag="worker_resumed"):
    """It takes new requests again."""

    worker_id: str
    cause: str = ""


class WorkerAdded(EventBase, frozen=True, kw_only=True, tag="worker_added"):
    worker_id: str
    role: str
    cause: str = ""


class WorkerRemoved(EventBase, frozen=True, kw_only=True, tag="worker_removed"):
    """Stopped and no longer part of the cluster."""

    worker_id: str
    cause: str = ""


class RoleChanged(EventBase, frozen=True, kw_only=True, tag="role_changed"):
    """For requests from now on."""

    worker_id: str
    from_role: str
    role: str  # prefill | decode | both
    cause: str = ""


class BlocksStranded(EventBase, frozen=True, kw_only=True, tag="blocks_stranded"):
    """A defect: a worker holds KV blocks that no request of it will ever free. ``holders`` names them."""

    worker_id: str
    blocks: int
    holders: str


class PeerRefused(EventBase, frozen=True, kw_only=True, tag="peer_refused"):
    """Somebody connected to a worker's port and did not prove the cluster's secret. At most one a second per worker;
    ``count`` is how many since the last."""

    worker_id: str
    port: str  # kv | request
    peer: str
    reason: str
    count: int = 1


class WorkerStats(EventBase, frozen=True, kw_only=True, tag="worker_stats"):
    """Sampled twice a second while anything changes. Counts, not rates, unless named so."""

    worker_id: str
    role: str
    waiting: int = 0
    running: int = 0
    reserved: int = 0  # waiting for KV
    handing_off: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    total_blocks: int = 0
    waiting_prompt_tokens: int = 0
    prefill_tokens: int = 0  # computed since start
    decode_tokens: int = 0  # sampled since start
    busy_s: float = 0.0  # engine time since start
    prefill_tokens_per_s: float = 0.0  # over the last steps that computed prompts only
    step_ms: float = 0.0  # last engine step
    cpu_percent: float = 0.0
    rss_bytes: int = 0
    late_frames: int = 0  # frames of an old attempt, dropped
    preemptions: int = 0  # sequences that lost their blocks and were computed again, since start
    stranded_blocks: int = 0  # held by nobody who would free them


class RouterStats(EventBase, frozen=True, kw_only=True, tag="router_stats"):
    in_flight: int = 0
    queued: int = 0
    cpu_percent: float = 0.0
    rss_bytes: int = 0


# --- links -----------------------------------------------------------------------------------------------------


class LinkConfigured(EventBase, frozen=True, kw_only=True, tag="link_configured"):
    """What was asked of every worker-to-worker path and which backend carries it. ``limit`` says what this host
    cannot do ("asked 100 Gb/s; loopback reaches about 25 Gb/s here"). Emitted again at every change."""

    backend: str  # netns | pacing | none
    asked_bits_per_s: float  # 0 = unlimited
    asked_delay_ms: float = 0.0
    asked_jitter_ms: float = 0.0
    asked_loss: float = 0.0
    limit: str = ""


class LinkProbed(EventBase, frozen=True, kw_only=True, tag="link_probed"):
    """Measured through the authenticated KV path with bytes the receiver throws away."""

    from_worker: str
    to_worker: str
    achieved_bits_per_s: float
    rtt_ms: float


class LinkTuned(EventBase, frozen=True, kw_only=True, tag="link_tuned"):
    """The link got the bandwidth that makes rho what was asked, from the prefill rate measured at start-up.

    ``target`` "" = a bare rho was asked. ``achieved_bits_per_s`` 0 = not probed; ``rho`` is of the achieved rate, else
    of the link's asked one (0 = unlimited). ``limit`` says what was not reached.
    """

    target: str
    target_rho: float
    prefill_tokens_per_s: float
    b_star_bytes_per_s: float
    asked_bits_per_s: float
    achieved_bits_per_s: float
    rho: float
    limit: str = ""


# --- one request -----------------------------------------------------------------------------------------------


class RequestArrived(EventBase, frozen=True, kw_only=True, tag="request_arrived"):
    """Fully read by the router: the TTFT clock starts at ``at``."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    label: str = "client"  # steady | burst | probe | client: who sent it
    client_id: str = ""  # the client's own id; only a label


class RequestDispatched(EventBase, frozen=True, kw_only=True, tag="request_dispatched"):
    """One attempt. ``prefill_worker`` empty: the decode worker prefills the prompt itself (colocated or fallback)."""

    request_id: str
    attempt: int
    mode: str
    codec: str
    decode_worker: str
    decode_reason: str
    prefill_worker: str = ""
    prefill_reason: str = ""


class HandoffChosen(EventBase, frozen=True, kw_only=True, tag="handoff_chosen"):
    """``handoff = "auto"`` weighed where one attempt's prompt is computed. Milliseconds from dispatch on; each way's
    sum is its parts and what the streams of the computing worker wait longer, all together (``stall``).

    ``choice``: remote | local. Without estimates (all of them 0) nothing was weighed, and ``reason`` says why.
    """

    request_id: str
    attempt: int
    choice: str
    reason: str
    prefill_worker: str
    decode_worker: str
    remote_ms: float = 0.0
    remote_queue_ms: float = 0.0
    remote_prefill_ms: float = 0.0
    remote_transfer_ms: float = 0.0  # prefill's end to first token
    remote_stall_ms: float = 0.0
    local_ms: float = 0.0
    local_queue_ms: float = 0.0
    local_prefill_ms: float = 0.0
    local_stall_ms: float = 0.0
    streams: int = 0  # that decode on the decode worker
    link_bytes_per_s: float = 0.0  # 0 = not known
    link_source: str = ""  # measured | asked


class HandoffMeasured(EventBase, frozen=True, kw_only=True, tag="handoff_measured"):
    """What the way that was chosen really took, dispatch to first token, beside its forecast (without the stall)."""

    request_id: str
    attempt: int
    choice: str
    forecast_ms: float
    actual_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float


class PrefillStarted(EventBase, frozen=True, kw_only=True, tag="prefill_started"):
    """The first chunk of the prompt entered an engine step."""

    request_id: str
    attempt: int
    worker_id: str


class PrefillProgressed(EventBase, frozen=True, kw_only=True, tag="prefill_progressed"):
    """A chunk was computed, not the last. At most a few per second per request."""

    request_id: str
    attempt: int
    worker_id: str
    computed_tokens: int


class PrefillFinished(EventBase, frozen=True, kw_only=True, tag="prefill_finished"):
    """The whole prompt is computed and the first token sampled. ``cached_tokens`` came from the prefix cache."""

    request_id: str
    attempt: int
    worker_id: str
    prompt_tokens: int
    compute_s: float
    cached_tokens: int = 0


class TransferStarted(EventBase, frozen=True, kw_only=True, tag="transfer_started"):
    """First KV frame handed to the socket. ``tokens`` and ``raw_bytes`` are of what moves; ``skipped_*`` of the leading
    tokens that the decode worker holds already, which stay away: together they are the prompt."""

    request_id: str
    attempt: int
    from_worker: str
    to_worker: str
    codec: str
    tokens: int
    raw_bytes: int
    skipped_tokens: int = 0
    skipped_bytes: int = 0  # as stored, before any codec
    codec_reason: str = ""  # where the worker chose the codec: the estimates that decided


class TransferProgressed(EventBase, frozen=True, kw_only=True, tag="transfer_progressed"):
    """So much of it was written to the link, ``sent_bytes`` as stored. At most twice a second per transfer."""

    request_id: str
    attempt: int
    sent_bytes: int


class TransferCompleted(EventBase, frozen=True, kw_only=True, tag="transfer_completed"):
    """COMMIT verified and acknowledged; seen by the sender. ``exposed_s`` is the part after prefill's end.

    Tokens and bytes as in ``TransferStarted``.
    """

    request_id: str
    attempt: int
    from_worker: str
    to_worker: str
    codec: str
    tokens: int
    raw_bytes: int
    wire_bytes: int  # payload bytes on the wire
    duration_s: float  # first frame -> acknowledged
    exposed_s: float
    busy_s: float  # the socket was busy
    hidden_busy_s: float = 0.0  # of that, before prefill's end
    skipped_tokens: int = 0
    skipped_bytes: int = 0


class TransferFailed(EventBase, frozen=True, kw_only=True, tag="transfer_failed"):
    request_id: str
    attempt: int
    worker_id: str
    reason: str  # rejected | checksum | truncated | peer_closed | timeout | aborted | mismatch | protocol
    detail: str = ""


class DecodeAdmitted(EventBase, frozen=True, kw_only=True, tag="decode_admitted"):
    """The sequence joined the decode worker's running set. ``verified_at``: COMMIT found right."""

    request_id: str
    attempt: int
    worker_id: str
    verified_at: float


class FirstToken(EventBase, frozen=True, kw_only=True, tag="first_token"):
    """First token's bytes written to the client. The parts sum to ``ttft_ms`` up to ``residual_ms``."""

    request_id: str
    ttft_ms: float
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    admit_wait_ms: float = 0.0
    first_decode_ms: float = 0.0
    router_ms: float = 0.0
    residual_ms: float = 0.0


class TokensDelivered(EventBase, frozen=True, kw_only=True, tag="tokens_delivered"):
    """Tokens written to one client since the last such event, batched to keep the log small.

    ``token_at`` has one monotonic time per token, in order; ``first_position`` is the output position of the first.
    """

    request_id: str
    first_position: int
    token_at: tuple[float, ...]


class TextDelivered(EventBase, frozen=True, kw_only=True, tag="text_delivered"):
    """What the client read since the last such event; only with ``router.log_text``. ``prompt`` comes with the first,
    cut to its last ``PROMPT_CHARACTERS``."""

    request_id: str
    text: str
    prompt: str = ""


class FellBack(EventBase, frozen=True, kw_only=True, tag="fell_back"):
    """Decode prefills the prompt itself. Never silent: every one is such an event with its reason."""

    request_id: str
    attempt: int
    worker_id: str
    reason: str  # prefill_died | no_prefill_worker | transfer_<reason> | decode_full
    prompt_tokens: int
    detail: str = ""


class RequestRetried(EventBase, frozen=True, kw_only=True, tag="request_retried"):
    """A new attempt on another prefill worker."""

    request_id: str
    attempt: int
    reason: str
    detail: str = ""


class RequestMigrated(EventBase, frozen=True, kw_only=True, tag="request_migrated"):
    """The decode worker died mid-stream; the request goes on elsewhere after the tokens already delivered."""

    request_id: str
    attempt: int
    from_worker: str
    delivered_tokens: int


class RequestFinished(EventBase, frozen=True, kw_only=True, tag="request_finished"):
    """``e2el_ms``: fully read -> last token written."""

    request_id: str
    finish_reason: str  # stop | length
    output_tokens: int
    e2el_ms: float
    tpot_ms: float | None = None  # None when only one token


class RequestFailed(EventBase, frozen=True, kw_only=True, tag="request_failed"):
    request_id: str
    reason: str
    status: int = 500


class RequestRejected(EventBase, frozen=True, kw_only=True, tag="request_rejected"):
    """Refused before it began: 400 (bad input), 429 (queue full), 503 (no worker ready)."""

    reason: str
    status: int
    request_id: str = ""


class RequestCancelled(EventBase, frozen=True, kw_only=True, tag="request_cancelled"):
    """The client left, or was dropped. ``phase``: queued | prefill | transfer | decode."""

    request_id: str
    phase: str
    reason: str = "client_gone"  # or client_too_slow: it did not take what was written to it


# --- what was done to the cluster ------------------------------------------------------------------------------


class ModeChanged(EventBase, frozen=True, kw_only=True, tag="mode_changed"):
    mode: str
    cause: str = ""  # "operator, key m", "drill", "api"


class CodecChanged(EventBase, frozen=True, kw_only=True, tag="codec_changed"):
    codec: str
    cause: str = ""


class HandoffChanged(EventBase, frozen=True, kw_only=True, tag="handoff_changed"):
    handoff: str  # always | auto | never
    cause: str = ""


class LoadStarted(EventBase, frozen=True, kw_only=True, tag="load_started"):
    name: str
    detail: str = ""
    cause: str = ""


class LoadStopped(EventBase, frozen=True, kw_only=True, tag="load_stopped"):
    name: str
    cause: str = ""


class BurstInjected(EventBase, frozen=True, kw_only=True, tag="burst_injected"):
    prompts: int
    prompt_tokens: int
    cause: str = ""


class FaultInjected(EventBase, frozen=True, kw_only=True, tag="fault_injected"):
    """Somebody broke something on purpose. ``fault`` as in ``fault_kinds``; ``seconds`` 0: it has no set end."""

    fault: str
    target: str
    cause: str = ""
    detail: str = ""
    seconds: float = 0.0


class FaultHealed(EventBase, frozen=True, kw_only=True, tag="fault_healed"):
    """A fault that was given a time is over, ``after_s`` after it began."""

    fault: str
    target: str
    after_s: float
    detail: str = ""


class NoteAdded(EventBase, frozen=True, kw_only=True, tag="note_added"):
    text: str


Event = (
    RunStarted | RunReady | RunStopping | RunStopped | RunLogStalled | RunLogResumed | ModelDescribed
    | WorkerStarting | WorkerReady | WorkerExited | WorkerRestarting | WorkerFailed | HeartbeatMissed | PeerRefused
    | WorkerDraining | WorkerDrained | WorkerResumed | WorkerAdded | WorkerRemoved | RoleChanged | BlocksStranded
    | WorkerStats | RouterStats | LinkConfigured | LinkProbed | LinkTuned
    | HandoffChosen | HandoffMeasured | HandoffChanged
    | RequestArrived | RequestDispatched | PrefillStarted | PrefillProgressed | PrefillFinished
    | TransferStarted | TransferProgressed | TransferCompleted | TransferFailed | DecodeAdmitted | FirstToken
    | TokensDelivered | TextDelivered | FellBack | RequestRetried | RequestMigrated
    | RequestFinished | RequestFailed | RequestRejected | RequestCancelled | ModeChanged | CodecChanged
    | LoadStarted | LoadStopped | BurstInjected | FaultInjected | FaultHealed | NoteAdded
)  # fmt: skip

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One JSON object, no newline."""
    return _encoder.encode(event)


def decode_event(line: bytes | str) -> Event:
    """Inverse of :func:`encode_event`. Raises msgspec.DecodeError for a line that is not a whole, known event."""
    return _decoder.decode(line)
