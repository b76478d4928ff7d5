"""A realistic run as a list of events: start, ready, steady requests, a burst, a kill with its fallback, a restart.

Times are seconds of a made-up monotonic clock. ``story`` is deterministic: the same numbers at every call.
"""

import random
from collections.abc import Iterator

import msgspec

from cluster.events import (
    BurstInjected,
    DecodeAdmitted,
    Event,
    FaultInjected,
    FellBack,
    FirstToken,
    LinkConfigured,
    LinkProbed,
    LoadStarted,
    ModelDescribed,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    RequestArrived,
    RequestDispatched,
    RequestFinished,
    RouterStats,
    RunReady,
    RunStarted,
    TokensDelivered,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
    WorkerExited,
    WorkerReady,
    WorkerRestarting,
    WorkerStarting,
    WorkerStats,
)

KV_BYTES_PER_TOKEN = 3072
PREFILL_TOKENS_PER_S = 2961.0
LINK_BITS_PER_S = 9.42e9
BURST_AT_S = 15.0
KILL_AT_S = 30.0
LAST_LONG_S = 38.0
END_S = 40.0


def numbered(events: list[Event]) -> list[Event]:
    """In the log's order, each with its index."""
    ordered = sorted(events, key=lambda event: event.at)
    return [msgspec.structs.replace(event, index=index) for index, event in enumerate(ordered)]


def start(at: float = 1000.0) -> list[Event]:
    """Run start to cluster ready, 3 s."""
    events: list[Event] = [
        RunStarted(
            at=at,
            run="2026-03-01T10-00-00",
            profile="10gbe",
            model="tiny",
            mode="disagg",
            codec="raw",
            wall_at=1.7e9,
        ),
        LinkConfigured(at=at + 0.1, backend="netns", asked_bits_per_s=1e10, asked_delay_ms=0.05),
    ]
    for index, (worker_id, role) in enumerate(
        (("router", "router"), ("prefill-0", "prefill"), ("decode-0", "decode"))
    ):
        blocks = 0 if role == "router" else 2048
        pid = 4301 + index
        events.append(WorkerStarting(at=at + 0.2, worker_id=worker_id, role=role, pid=pid, cpus=(index % 2,)))
        events.append(
            WorkerReady(
                at=at + 1.5, worker_id=worker_id, role=role, pid=pid, after_s=1.3, total_blocks=blocks
            )
        )
    events += [
        ModelDescribed(
            at=at + 1.6, model="tiny", fingerprint="ab12", dtype="float32", num_layers=6, num_kv_heads=2, head_dim=32,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN, max_model_len=8192, block_size=16,
        ),
        LinkProbed(
            at=at + 2.0, from_worker="prefill-0", to_worker="decode-0", achieved_bits_per_s=LINK_BITS_PER_S, rtt_ms=0.11
        ),
        RunReady(at=at + 3.0, after_s=3.0, url="http://127.0.0.1:8765"),
    ]  # fmt: skip
    return events


def request(
    request_id: str,
    at: float,
    *,
    prompt_tokens: int = 128,
    output_tokens: int = 40,
    label: str = "steady",
    gap_ms: float = 14.0,
    codec: str = "raw",
    skipped_tokens: int = 0,
    wait_s: float = 0.002,
    rng: random.Random | None = None,
) -> list[Event]:
    """A request that goes the normal way, from arrival to its last token."""
    rng = rng or random.Random(0)
    compute_s = prompt_tokens / PREFILL_TOKENS_PER_S
    tokens = prompt_tokens - skipped_tokens
    skipped_bytes = skipped_tokens * KV_BYTES_PER_TOKEN
    raw_bytes = tokens * KV_BYTES_PER_TOKEN
    wire_bytes = raw_bytes if codec == "raw" else raw_bytes * 26 // 100
    transfer_s = wire_bytes * 8 / LINK_BITS_PER_S + 0.003
    started, done = at + wait_s, at + wait_s + compute_s
    acked = done + transfer_s
    first = acked + 0.002
    events: list[Event] = [
        RequestArrived(
            at=at, request_id=request_id, prompt_tokens=prompt_tokens, max_tokens=output_tokens, label=label
        ),
        RequestDispatched(
            at=at + 0.001, request_id=request_id, attempt=1, mode="disagg", codec=codec, decode_worker="decode-0",
            decode_reason="most free blocks (1245)", prefill_worker="prefill-0", prefill_reason="least queued (0)",
        ),
        PrefillStarted(at=started, request_id=request_id, attempt=1, worker_id="prefill-0"),
        PrefillFinished(
            at=done, request_id=request_id, attempt=1, worker_id="prefill-0", prompt_tokens=prompt_tokens,
            compute_s=compute_s,
        ),
        TransferStarted(
            at=done, request_id=request_id, attempt=1, from_worker="prefill-0", to_worker="decode-0", codec=codec,
            tokens=tokens, raw_bytes=raw_bytes, skipped_tokens=skipped_tokens, skipped_bytes=skipped_bytes,
        ),
        TransferCompleted(
            at=acked, request_id=request_id, attempt=1, from_worker="prefill-0", to_worker="decode-0", codec=codec,
            tokens=tokens, raw_bytes=raw_bytes, wire_bytes=wire_bytes, duration_s=transfer_s,
            exposed_s=transfer_s, busy_s=transfer_s * 0.9, skipped_tokens=skipped_tokens,
            skipped_bytes=skipped_bytes,
        ),
        DecodeAdmitted(at=acked + 0.001, request_id=request_id, attempt=1, worker_id="decode-0", verified_at=acked),
        FirstToken(
            at=first, request_id=request_id, ttft_ms=(first - at) * 1000, queue_ms=wait_s * 1000,
            prefill_ms=compute_s * 1000, transfer_exposed_ms=transfer_s * 1000, admit_wait_ms=1.0, router_ms=0.8,
            residual_ms=0.2,
        ),
    ]  # fmt: skip
    computed = 512
    while computed < prompt_tokens:
        events.append(
            PrefillProgressed(
                at=started + computed / PREFILL_TOKENS_PER_S, request_id=request_id, attempt=1, worker_id="prefill-0",
                computed_tokens=computed,
            )
        )  # fmt: skip
        computed += 512
    times = [first]
    while len(times) < output_tokens:
        times.append(times[-1] + gap_ms / 1000 * rng.uniform(0.9, 1.2))
    for position in range(0, output_tokens, 8):
        batch = tuple(times[position : position + 8])
        events.append(
            TokensDelivered(at=batch[-1], request_id=request_id, first_position=position, token_at=batch)
        )
    e2el_ms = (times[-1] - at) * 1000
    events.append(
        RequestFinished(
            at=times[-1] + 0.0005, request_id=request_id, finish_reason="length", output_tokens=output_tokens,
            e2el_ms=e2el_ms, tpot_ms=(times[-1] - first) * 1000 / max(output_tokens - 1, 1),
        )
    )  # fmt: skip
    return events


def killed_request(request_id: str, at: float, kill_at: float) -> list[Event]:
    """A long prompt whose prefill worker dies; the decode worker computes it itself."""
    again = kill_at + 0.05
    done = again + 2.7
    parts = {"queue_ms": 9.0, "prefill_ms": (done - at) * 1000 - 12.0, "router_ms": 2.8, "residual_ms": 0.2}
    return [
        RequestArrived(at=at, request_id=request_id, prompt_tokens=8000, max_tokens=16, label="burst"),
        RequestDispatched(
            at=at + 0.001, request_id=request_id, attempt=1, mode="disagg", codec="raw", decode_worker="decode-0",
            decode_reason="most free blocks (1245)", prefill_worker="prefill-0", prefill_reason="least queued (0)",
        ),
        PrefillStarted(at=at + 0.009, request_id=request_id, attempt=1, worker_id="prefill-0"),
        PrefillProgressed(at=at + 0.5, request_id=request_id, attempt=1, worker_id="prefill-0", computed_tokens=1536),
        TransferFailed(at=kill_at + 0.01, request_id=request_id, attempt=1, worker_id="decode-0", reason="peer_closed"),
        FellBack(
            at=kill_at + 0.02, request_id=request_id, attempt=2, worker_id="decode-0", reason="prefill_died",
            prompt_tokens=8000, detail="signal 9",
        ),
        RequestDispatched(
            at=kill_at + 0.021, request_id=request_id, attempt=2, mode="disagg", codec="raw", decode_worker="decode-0",
            decode_reason="it holds the reservation",
        ),
        PrefillStarted(at=again, request_id=request_id, attempt=2, worker_id="decode-0"),
        PrefillFinished(
            at=done, request_id=request_id, attempt=2, worker_id="decode-0", prompt_tokens=8000, compute_s=2.65
        ),
        FirstToken(at=done, request_id=request_id, ttft_ms=(done - at) * 1000, **parts),
        TokensDelivered(
            at=done + 0.3, request_id=request_id, first_position=0, token_at=tuple(done + 0.02 * i for i in range(16))
        ),
        RequestFinished(
            at=done + 0.31, request_id=request_id, finish_reason="length", output_tokens=16,
            e2el_ms=(done + 0.3 - at) * 1e3,
        ),
    ]  # fmt: skip


def kill_and_restart(kill_at: float) -> list[Event]:
    """prefill-0 is killed by the operator and back 1.9 s later."""
    return [
        FaultInjected(
            at=kill_at - 0.01, fault="kill", target="prefill-0", cause="operator, key k", detail="SIGKILL"
        ),
        WorkerExited(at=kill_at, worker_id="prefill-0", role="prefill", pid=4302, signal=9, cause="operator"),
        WorkerRestarting(at=kill_at + 0.01, worker_id="prefill-0", restarts=1, backoff_s=0.1),
        WorkerStarting(
            at=kill_at + 0.12, worker_id="prefill-0", role="prefill", pid=4399, restarts=1, cpus=(1,)
        ),
        WorkerReady(
            at=kill_at + 1.9, worker_id="prefill-0", role="prefill", pid=4399, after_s=1.9, total_blocks=2048
        ),
    ]


def stats(at: float, *, prefill_alive: bool = True, running: int = 3, held: int = 800) -> Iterator[Event]:
    """One round of samples of every process."""
    yield RouterStats(at=at, in_flight=running + 1, queued=0, cpu_percent=6.0, rss_bytes=88 * 2**20)
    if prefill_alive:
        yield WorkerStats(
            at=at, worker_id="prefill-0", role="prefill", waiting=1, running=1, free_blocks=1536, held_blocks=512,
            total_blocks=2048, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, step_ms=170.0, cpu_percent=99.0,
            rss_bytes=480 * 2**20,
        )  # fmt: skip
    yield WorkerStats(
        at=at, worker_id="decode-0", role="decode", running=running, free_blocks=2048 - held, held_blocks=held,
        total_blocks=2048, step_ms=14.1, cpu_percent=61.0, rss_bytes=470 * 2**20,
    )  # fmt: skip


def story(seconds: float = END_S, rate_per_s: float = 1.5, at: float = 1000.0) -> list[Event]:
    """The whole run up to ``seconds`` after its start, in order and numbered; later events are left out."""
    rng = random.Random(7)
    events = start(at)
    events.append(
        LoadStarted(
            at=at + 4.0, name="steady", detail="3 requests/s, prompts of 128 tokens", cause="operator, key s"
        )
    )
    moment, count = at + 4.0, 0
    while moment < at + seconds:
        moment += rng.expovariate(rate_per_s)
        if not KILL_AT_S - 0.3 < moment - at < KILL_AT_S + 2.0:
            count += 1
            events += request(
                f"r{count:06x}{rng.getrandbits(24):06x}", moment, output_tokens=rng.randint(20, 60), rng=rng
            )
    events.append(BurstInjected(at=at + BURST_AT_S, prompts=2, prompt_tokens=8000, cause="operator, key b"))
    for index in range(2):
        wait_s = 0.005 + index * 8000 / PREFILL_TOKENS_PER_S
        events += request(
            f"rb0000{index}a11ce", at + BURST_AT_S + 0.01, prompt_tokens=8000, output_tokens=16, label="burst",
            wait_s=wait_s, gap_ms=31.0, rng=rng,
        )  # fmt: skip
    events += kill_and_restart(at + KILL_AT_S)
    events += killed_request("rc0000012345", at + KILL_AT_S - 0.8, at + KILL_AT_S)
    events += request(
        "rd0000012345", at + LAST_LONG_S, prompt_tokens=8000, output_tokens=16, label="burst", rng=rng
    )
    for second in range(3, int(seconds)):
        alive = not KILL_AT_S <= second + 0.25 < KILL_AT_S + 1.9
        events += stats(at + second + 0.25, prefill_alive=alive, running=rng.randint(1, 4))
    return numbered([event for event in events if event.at <= at + seconds])
