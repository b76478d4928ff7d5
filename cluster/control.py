"""Messages between the processes of a cluster, other than KV: one JSON object a line.

Three conversations use them:

- parent link: a supervisor and each child it spawned (and ``pdconsole`` and the supervisor), over an inherited
  socket pair. Its end of file is the lifeline: a child whose parent is gone exits.
- request link: the router and one worker, over TCP, authenticated with the cluster secret before the first line.
- operator commands: from the console or ``/admin`` to the supervisor, each answered by a ``CommandDone``.

This module knows the words only; ``json_stream`` moves them.
"""

from typing import Final

import msgspec

from cluster.events import Event
from cluster.profile import Profile
from engine.request import SamplingParams
from transport.codec_choice import CodecRate


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="msg", omit_defaults=True):
    """Base of every control message."""


# --- parent link: parent -> child --------------------------------------------------------------------------------


class WorkerSpec(Message, frozen=True, kw_only=True, tag="worker_spec"):
    """All a worker needs to start; the first line it reads. The secret travels here, never in argv or files."""

    worker_id: str
    role: str  # prefill | decode: its home role; it can take every role
    run: str
    secret: str  # hex
    profile: Profile
    cpus: tuple[int, ...] = ()
    netns_fd: int = -1  # an inherited descriptor of the namespace its KV sockets live in, -1 = none
    kv_host: str = "127.0.0.1"


class RouterSpec(Message, frozen=True, kw_only=True, tag="router_spec"):
    """All a router needs. ``listen_fd`` is the bound HTTP socket, inherited so that a restart keeps the port."""

    run: str
    run_dir: str
    secret: str
    token: str  # operator's bearer token
    profile: Profile
    listen_fd: int
    mode: str
    codec: str
    handoff: str = "always"
    cpus: tuple[int, ...] = ()
    has_served: bool = False  # an earlier router of this run was ready: requests may wait for workers


class SupervisorSpec(Message, frozen=True, kw_only=True, tag="supervisor_spec"):
    """All a supervisor needs to bring a cluster up."""

    run: str
    run_dir: str
    profile: Profile
    load: str = ""  # a named load to start when ready, "" = none


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    seq: int


class Detach(Message, frozen=True, kw_only=True, tag="detach"):
    """To the supervisor: go on when this link ends. Answered by ``Detached``."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Stop taking work, finish nothing, exit 0."""


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a ready worker answers and what it can do. The router knows a worker by this, never by its process."""

    worker_id: str
    role: str
    control_host: str
    control_port: int
    kv_host: str
    kv_port: int
    total_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    kv_bytes_per_token: int
    fingerprint: str

    def is_place_of(self, other: "WorkerAddress") -> bool:
        """The same life of the same worker, whatever its role is now."""
        return msgspec.structs.replace(self, role=other.role) == other


class AbsentWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the cluster that is not ready now. ``is_coming`` False: it was given up and is not restarted."""

    worker_id: str
    role: str
    is_coming: bool


class SetWorkers(Message, frozen=True, kw_only=True, tag="set_workers"):
    """The supervisor's list of the cluster's workers, whole, at every change: those ready, and those that are not.

    ``draining``: ids of workers that take no new requests.
    """

    workers: tuple[WorkerAddress, ...]
    absent: tuple[AbsentWorker, ...] = ()
    draining: tuple[str, ...] = ()


class SetLink(Message, frozen=True, kw_only=True, tag="set_link"):
    """To a worker: new shape for its KV sockets (pacing backend, and delay in the transport). To the router: what was
    asked of the links. Rate 0 = unlimited."""

    bits_per_s: float
    delay_ms: float = 0.0
    jitter_ms: float = 0.0


class ProbeLink(Message, frozen=True, kw_only=True, tag="probe_link"):
    """Ask a worker to measure its KV path to ``to_worker``."""

    to_worker: str
    kv_host: str
    kv_port: int
    num_bytes: int


class MeasurePrefill(Message, frozen=True, kw_only=True, tag="measure_prefill"):
    """Ask the router for one request through this pair ("" = the decode worker prefills), as a readiness probe."""

    prefill_worker: str
    decode_worker: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


# --- parent link: child -> parent --------------------------------------------------------------------------------


class WorkerUp(Message, frozen=True, kw_only=True, tag="worker_up"):
    """Loaded, warmed up, listening: "ready" is this message."""

    pid: int
    address: WorkerAddress
    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int


class RouterUp(Message, frozen=True, kw_only=True, tag="router_up"):
    pid: int
    url: str


class RouterPairReady(Message, frozen=True, kw_only=True, tag="router_pair_ready"):
    """The router's probe request went through this pair and gave a real token."""

    prefill_worker: str
    decode_worker: str


class PrefillMeasured(Message, frozen=True, kw_only=True, tag="prefill_measured"):
    """The request of a MeasurePrefill is over (``error`` "": finished). The worker's own events tell its times."""

    request_id: str
    error: str = ""


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    seq: int


class Detached(Message, frozen=True, kw_only=True, tag="detached"):
    """The link is no lifeline any more."""


class Events(Message, frozen=True, kw_only=True, tag="events"):
    """Facts a child saw, for the run log."""

    events: tuple[Event, ...]


class StartFailed(Message, frozen=True, kw_only=True, tag="start_failed"):
    """A child or the supervisor cannot start for a reason the user can act on. ``exit_code`` as of the command line."""

    message: str
    exit_code: int = 3


class LinkMeasured(Message, frozen=True, kw_only=True, tag="link_measured"):
    to_worker: str
    achieved_bits_per_s: float = 0.0
    rtt_ms: float = 0.0
    error: str = ""


class SupervisorUp(Message, frozen=True, kw_only=True, tag="supervisor_up"):
    """Cluster ready; the router answers at ``url``."""

    pid: int
    url: str


class SupervisorStopped(Message, frozen=True, kw_only=True, tag="supervisor_stopped"):
    """Everything has ended; ``summary.json`` is written. ``problem``: what of log or summary could not be."""

    orphans: int = 0
    problem: str = ""


# --- request link: router -> worker ------------------------------------------------------------------------------


class StartPrefill(Message, frozen=True, kw_only=True, tag="start_prefill"):
    """Compute the prompt's KV and the first token, hand both to the decode worker at ``decode_kv_*``."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    decode_worker: str
    decode_kv_host: str
    decode_kv_port: int
    codec: str
    path: str  # v1 | v2


class StartDecode(Message, frozen=True, kw_only=True, tag="start_decode"):
    """Expect KV for this request from ``prefill_worker``; stream its tokens back."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prefill_worker: str


class StartLocal(Message, frozen=True, kw_only=True, tag="start_local"):
    """Prefill and decode here. ``output_token_ids`` were delivered already (migration): go on after them."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()


class AbortRequest(Message, frozen=True, kw_only=True, tag="abort_request"):
    """Stop this attempt in whatever phase it is and free everything."""

    request_id: str
    attempt: int
    reason: str


class ReportBlocks(Message, frozen=True, kw_only=True, tag="report_blocks"):
    """Say who holds KV blocks now; answered by a BlocksReported with the same ``report_id``."""

    report_id: int


# --- request link: worker -> router ------------------------------------------------------------------------------


class TokenProduced(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``at``: sampled (or, for a handed-off first token, admitted)."""

    request_id: str
    attempt: int
    position: int
    token_id: int
    at: float
    finish_reason: str = ""  # set on the last token


class Tokens(Message, frozen=True, kw_only=True, tag="tokens"):
    """All tokens of one engine step."""

    tokens: tuple[TokenProduced, ...]


class PrefillDone(Message, frozen=True, kw_only=True, tag="prefill_done"):
    """Times for the TTFT parts; from whoever prefilled. Sent before the first token of that attempt where possible.

    ``compute_s``: engine time of this prompt alone, 0 = its steps were shared or part of it was cached.
    """

    request_id: str
    attempt: int
    started_at: float
    done_at: float
    compute_s: float = 0.0


class DecodeAdopted(Message, frozen=True, kw_only=True, tag="decode_adopted"):
    """The transfer was verified and the sequence admitted; precedes its first token."""

    request_id: str
    attempt: int
    verified_at: float
    admitted_at: float
    prefill_started_at: float
    prefill_done_at: float


class HandoffFailed(Message, frozen=True, kw_only=True, tag="handoff_failed"):
    """From either side: the KV of this attempt will not arrive. Both sides have freed what they held for it."""

    request_id: str
    attempt: int
    reason: str  # as TransferFailed.reason, or decode_full
    detail: str = ""


class RequestError(Message, frozen=True, kw_only=True, tag="request_error"):
    """The worker cannot do this attempt at all."""

    request_id: str
    attempt: int
    reason: str


class WorkerLoad(Message, frozen=True, kw_only=True, tag="worker_load"):
    """A worker's own counts and what it has measured, sent at most every 0.5 s; ``handoff = "auto"`` decides by it.

    ``links``: bytes/s of its KV paths, measured, by "host:port" of the receiver. ``stream_from_tokens``: a prompt of
    that length leaves while it is computed, 0 = none does.
    """

    worker_id: str
    waiting_prompt_tokens: int
    running: int
    free_blocks: int
    reserved: int
    prefill_tokens_per_s: float = 0.0  # measured over its last prompt-only steps, 0 = not yet
    decode_step_ms: float = 0.0  # the same over steps without prompts
    links: dict[str, float] = msgspec.field(default_factory=dict)
    codecs: dict[str, CodecRate] = msgspec.field(default_factory=dict)  # by name
    stream_from_tokens: int = 0


class BlockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that holds KV blocks on a worker, in what status (as the engine's), for how long, and with whom it
    shares its fate: the worker at the other end of its transfer, "" = none.

    ``owner``: prefill | decode, the side of the worker that will free them; "" = nobody does, they are stranded.
    """

    request_id: str
    attempt: int
    status: str
    blocks: int
    age_s: float
    owner: str
    peer: str = ""


class BlocksReported(Message, frozen=True, kw_only=True, tag="blocks_reported"):
    """Blocks of a common prefix are held once and by each holder: the holders' sum may exceed ``held_blocks``."""

    report_id: int
    worker_id: str
    total_blocks: int
    held_blocks: int
    stranded_blocks: int
    holders: tuple[BlockHolder, ...]


# --- operator commands: console or /admin -> supervisor ----------------------------------------------------------


class InjectBurst(Message, frozen=True, kw_only=True, tag="inject_burst"):
    prompts: int = 2
    prompt_tokens: int = 8000
    max_tokens: int = 16
    cause: str = ""


class KillWorker(Message, frozen=True, kw_only=True, tag="kill_worker"):
    """Send a signal by name (KILL, TERM, STOP, CONT) to one process of the cluster, by worker id or "router".

    STOP: CONT follows after ``seconds``; 0 = never, the missed heartbeats end it.
    """

    worker_id: str
    signal: str = "KILL"
    seconds: float = 0.0
    cause: str = ""


class SetMode(Message, frozen=True, kw_only=True, tag="set_mode"):
    mode: str  # disagg | colocated
    cause: str = ""


class SetCodec(Message, frozen=True, kw_only=True, tag="set_codec"):
    codec: str
    cause: str = ""


class SetHandoff(Message, frozen=True, kw_only=True, tag="set_handoff"):
    """From the next request on."""

    handoff: str  # always | auto | never
    cause: str = ""


class SetLoad(Message, frozen=True, kw_only=True, tag="set_load"):
    """Start the named load of the profile, or stop it with ""."""

    name: str
    cause: str = ""


class ChangeLink(Message, frozen=True, kw_only=True, tag="change_link"):
    """Reshape every worker-to-worker path while serving. Rate 0 = unlimited.

    With ``seconds`` it is a fault: the shape of before comes back after so long.
    """

    bits_per_s: float
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    seconds: float = 0.0
    cause: str = ""


class InjectLinkFault(Message, frozen=True, kw_only=True, tag="inject_link_fault"):
    """Break the KV that one worker sends, on each of its connections. Also told to the worker itself.

    ``kind``: corrupt (a bit of a DATA frame), cut (the connection, in the middle of one), stall (nothing is sent for
    ``seconds``, from the middle of one). corrupt and cut hit the next frame, or with ``seconds`` each one until then.
    """

    worker_id: str
    kind: str
    seconds: float = 0.0
    cause: str = ""


class HealLink(Message, frozen=True, kw_only=True, tag="heal_link"):
    """To a worker: every fault of the KV that it sends is over."""


class HealFaults(Message, frozen=True, kw_only=True, tag="heal_faults"):
    """End every fault that is not over: what hangs goes on, links are as before."""

    cause: str = ""


class DrainWorker(Message, frozen=True, kw_only=True, tag="drain_worker"):
    """No new requests for this worker; what it has finishes."""

    worker_id: str
    cause: str = ""


class ResumeWorker(Message, frozen=True, kw_only=True, tag="resume_worker"):
    """End of a drain: new requests again."""

    worker_id: str
    cause: str = ""


class RestartWorker(Message, frozen=True, kw_only=True, tag="restart_worker"):
    """Drain for at most ``drain_s``, stop, start anew. What is not finished by then goes on elsewhere."""

    worker_id: str
    drain_s: float = 30.0
    cause: str = ""


class SetRole(Message, frozen=True, kw_only=True, tag="set_role"):
    """What new requests use this worker for; what it has goes on as it began. Also told to the worker itself."""

    worker_id: str
    role: str  # prefill | decode | both
    cause: str = ""


class AddWorker(Message, frozen=True, kw_only=True, tag="add_worker"):
    """One more worker, on the least used cores."""

    role: str
    cause: str = ""


class RemoveWorker(Message, frozen=True, kw_only=True, tag="remove_worker"):
    """Drain for at most ``drain_s``, stop, forget. What is not finished by then goes on elsewhere."""

    worker_id: str
    drain_s: float = 30.0
    cause: str = ""


class AddNote(Message, frozen=True, kw_only=True, tag="add_note"):
    text: str


class StopCluster(Message, frozen=True, kw_only=True, tag="stop_cluster"):
    reason: str = "operator"


FleetCommand = DrainWorker | ResumeWorker | RestartWorker | SetRole | AddWorker | RemoveWorker
"""What changes the set of workers. Each is answered as soon as it has begun; events tell how it goes on."""

Command = (
    InjectBurst | KillWorker | InjectLinkFault | HealFaults | SetMode | SetCodec | SetHandoff | SetLoad | ChangeLink
    | AddNote | StopCluster | FleetCommand
)  # fmt: skip


class CommandSent(Message, frozen=True, kw_only=True, tag="command_sent"):
    command_id: int
    command: Command


class CommandDone(Message, frozen=True, kw_only=True, tag="command_done"):
    """One line for the operator; ``ok`` False says what is wrong and what is allowed."""

    command_id: int
    ok: bool
    message: str


AnyMessage = (
    WorkerSpec | RouterSpec | SupervisorSpec | Ping | Shutdown | SetWorkers | SetLink | HealLink | ProbeLink
    | MeasurePrefill | WorkerUp | RouterUp | RouterPairReady | PrefillMeasured | Pong | Events | StartFailed
    | LinkMeasured | Detach | Detached | SupervisorUp | SupervisorStopped
    | StartPrefill | StartDecode | StartLocal | AbortRequest
    | Tokens | PrefillDone | DecodeAdopted | HandoffFailed | RequestError | WorkerLoad
    | ReportBlocks | BlocksReported
    | Command | CommandSent | CommandDone
)  # fmt: skip

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode_message(line: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError for anything that is not one known message."""
    return _decoder.decode(line)
