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
    cpus: tuple[int, ...] = ()


class SupervisorSpec(Message, frozen=True, kw_only=True, tag="supervisor_spec"):
    """All a supervisor needs to bring a cluster up."""

    run: str
    run_dir: str
    profile: Profile
    load: str = ""  # a named load to start when ready, "" = none


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    seq: int


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


class SetWorkers(Message, frozen=True, kw_only=True, tag="set_workers"):
    """The supervisor's list of ready workers, whole, at every change."""

    workers: tuple[WorkerAddress, ...]


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
    """Everything has ended; ``summary.json`` is written."""

    orphans: int = 0


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
    """Times for the TTFT parts; from whoever prefilled. Sent before the first token of that attempt where possible."""

    request_id: str
    attempt: int
    started_at: float
    done_at: float


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
    """A worker's own count, sent at most every 0.5 s; with the link's rate it decides ``handoff = "auto"``."""

    worker_id: str
    waiting_prompt_tokens: int
    running: int
    free_blocks: int
    reserved: int
    prefill_tokens_per_s: float = 0.0  # measured over its last prompt-only steps, 0 = not yet


# --- operator commands: console or /admin -> supervisor ----------------------------------------------------------


class InjectBurst(Message, frozen=True, kw_only=True, tag="inject_burst"):
    prompts: int = 2
    prompt_tokens: int = 8000
    max_tokens: int = 16
    cause: str = ""


class KillWorker(Message, frozen=True, kw_only=True, tag="kill_worker"):
    """Send a signal by name (KILL, TERM, STOP, CONT) to one process of the cluster, by worker id or "router"."""

    worker_id: str
    signal: str = "KILL"
    cause: str = ""


class SetMode(Message, frozen=True, kw_only=True, tag="set_mode"):
    mode: str  # disagg | colocated
    cause: str = ""


class SetCodec(Message, frozen=True, kw_only=True, tag="set_codec"):
    codec: str
    cause: str = ""


class SetLoad(Message, frozen=True, kw_only=True, tag="set_load"):
    """Start the named load of the profile, or stop it with ""."""

    name: str
    cause: str = ""


class ChangeLink(Message, frozen=True, kw_only=True, tag="change_link"):
    """Reshape every worker-to-worker path while serving. Rate 0 = unlimited."""

    bits_per_s: float
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    cause: str = ""


class AddNote(Message, frozen=True, kw_only=True, tag="add_note"):
    text: str


class StopCluster(Message, frozen=True, kw_only=True, tag="stop_cluster"):
    reason: str = "operator"


Command = InjectBurst | KillWorker | SetMode | SetCodec | SetLoad | ChangeLink | AddNote | StopCluster


class CommandSent(Message, frozen=True, kw_only=True, tag="command_sent"):
    command_id: int
    command: Command


class CommandDone(Message, frozen=True, kw_only=True, tag="command_done"):
    """One line for the operator; ``ok`` False says what is wrong and what is allowed."""

    command_id: int
    ok: bool
    message: str


AnyMessage = (
    WorkerSpec | RouterSpec | SupervisorSpec | Ping | Shutdown | SetWorkers | SetLink | ProbeLink | MeasurePrefill
    | WorkerUp | RouterUp | RouterPairReady | PrefillMeasured | Pong | Events | StartFailed | LinkMeasured
    | SupervisorUp | SupervisorStopped
    | StartPrefill | StartDecode | StartLocal | AbortRequest
    | Tokens | PrefillDone | DecodeAdopted | HandoffFailed | RequestError | WorkerLoad
    | InjectBurst | KillWorker | SetMode | SetCodec | SetLoad | ChangeLink | AddNote | StopCluster
    | CommandSent | CommandDone
)  # fmt: skip

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode_message(line: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError for anything that is not one known message."""
    return _decoder.decode(line)
