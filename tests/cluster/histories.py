"""Lists of events for tests: small runs told by hand."""

from cluster.events import (
    DecodeAdmitted,
    Event,
    FirstToken,
    LinkConfigured,
    LinkProbed,
    ModelDescribed,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestDispatched,
    RequestFinished,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
    TokensDelivered,
    TransferCompleted,
    TransferStarted,
    WorkerStarting,
    WorkerStats,
)

BYTES_PER_TOKEN = 512


def run_started(at: float = 0.0, *, mode: str = "disagg") -> list[Event]:
    """A run of one prefill and one decode worker, ready at ``at + 2``."""
    return [
        RunStarted(
            at=at,
            run="r1",
            profile="10gbe",
            model="tiny",
            mode=mode,
            codec="raw",
            wall_at=1.7e9,
            source="supervisor",
        ),
        LinkConfigured(at=at, backend="pacing", asked_bits_per_s=1e10, asked_delay_ms=0.05),
        WorkerStarting(at=at, worker_id="router", role="router", pid=10),
        WorkerStarting(at=at, worker_id="prefill-0", role="prefill", pid=11),
        WorkerStarting(at=at, worker_id="decode-0", role="decode", pid=12),
        ModelDescribed(
            at=at + 1.0,
            model="tiny",
            fingerprint="f",
            dtype="float32",
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            kv_bytes_per_token=BYTES_PER_TOKEN,
            max_model_len=8192,
            block_size=16,
        ),
        LinkProbed(
            at=at + 1.5, from_worker="prefill-0", to_worker="decode-0", achieved_bits_per_s=9.4e9, rtt_ms=0.1
        ),
        RunReady(at=at + 2.0, after_s=2.0, url="http://127.0.0.1:1"),
    ]


def run_stopped(at: float) -> list[Event]:
    return [
        RunStopping(at=at, reason="operator"),
        worker_stats(at=at, worker_id="prefill-0", role="prefill"),
        worker_stats(at=at, worker_id="decode-0", role="decode"),
        RunStopped(at=at + 0.1, orphans=0),
    ]


def worker_stats(
    at: float, worker_id: str = "decode-0", role: str = "decode", **counts: float
) -> WorkerStats:
    return WorkerStats(at=at, worker_id=worker_id, role=role, total_blocks=100, **counts)  # type: ignore[arg-type]


def arrived(
    request_id: str = "a", at: float = 10.0, *, label: str = "steady", prompt_tokens: int = 100
) -> Event:
    return RequestArrived(
        at=at, request_id=request_id, prompt_tokens=prompt_tokens, max_tokens=8, label=label
    )


def tokens(request_id: str, first_position: int, *token_at: float) -> Event:
    return TokensDelivered(
        at=token_at[-1], request_id=request_id, first_position=first_position, token_at=token_at
    )


def finished(
    request_id: str, at: float, *, output_tokens: int, e2el_ms: float, tpot_ms: float | None
) -> Event:
    return RequestFinished(
        at=at,
        request_id=request_id,
        finish_reason="length",
        output_tokens=output_tokens,
        e2el_ms=e2el_ms,
        tpot_ms=tpot_ms,
    )


def handed_off(
    request_id: str = "a",
    at: float = 10.0,
    *,
    label: str = "steady",
    prompt_tokens: int = 100,
    gaps_s: tuple[float, ...] = (0.01, 0.01, 0.02),
    codec: str = "raw",
    skipped_tokens: int = 0,
) -> list[Event]:
    """One request through prefill, transfer and decode. TTFT is 100 ms: 10 + 50 + 20 + 5 + 10 + 4 and 1 left over.

    ``skipped_tokens`` of the prompt the decode worker held already.
    """
    first_at = at + 0.1
    token_at = [first_at]
    for gap in gaps_s:
        token_at.append(token_at[-1] + gap)
    moved_tokens = prompt_tokens - skipped_tokens
    raw_bytes = moved_tokens * BYTES_PER_TOKEN
    half = len(token_at) // 2
    worker = {"request_id": request_id, "attempt": 1}
    path = {"from_worker": "prefill-0", "to_worker": "decode-0", "codec": codec, "tokens": moved_tokens}
    path |= {"skipped_tokens": skipped_tokens, "skipped_bytes": skipped_tokens * BYTES_PER_TOKEN}
    last_at = token_at[-1]
    batches = [tokens(request_id, 0, *token_at[:half])] if half else []
    return [
        arrived(request_id, at, label=label, prompt_tokens=prompt_tokens),
        RequestDispatched(
            at=at + 0.001,
            request_id=request_id,
            attempt=1,
            mode="disagg",
            codec=codec,
            prefill_worker="prefill-0",
            prefill_reason="least queued",
            decode_worker="decode-0",
            decode_reason="most free blocks",
        ),
        PrefillStarted(at=at + 0.01, worker_id="prefill-0", **worker),  # type: ignore[arg-type]
        PrefillFinished(
            at=at + 0.06,
            worker_id="prefill-0",
            prompt_tokens=prompt_tokens,
            compute_s=0.05,
            **worker,  # type: ignore[arg-type]
        ),
        TransferStarted(at=at + 0.06, raw_bytes=raw_bytes, **worker, **path),  # type: ignore[arg-type]
        TransferCompleted(
            at=at + 0.08,
            raw_bytes=raw_bytes,
            wire_bytes=raw_bytes if codec == "raw" else raw_bytes // 4,
            duration_s=0.02,
            exposed_s=0.02,
            busy_s=0.01,
            **worker,  # type: ignore[arg-type]
            **path,  # type: ignore[arg-type]
        ),
        DecodeAdmitted(at=at + 0.085, worker_id="decode-0", verified_at=at + 0.08, **worker),  # type: ignore[arg-type]
        FirstToken(
            at=first_at,
            request_id=request_id,
            ttft_ms=100.0,
            queue_ms=10.0,
            prefill_ms=50.0,
            transfer_exposed_ms=20.0,
            admit_wait_ms=5.0,
            first_decode_ms=10.0,
            router_ms=4.0,
            residual_ms=1.0,
        ),
        *batches,
        tokens(request_id, half, *token_at[half:]),
        finished(
            request_id,
            last_at,
            output_tokens=len(token_at),
            e2el_ms=(last_at - at) * 1000.0,
            tpot_ms=(last_at - first_at) * 1000.0 / len(gaps_s) if gaps_s else None,
        ),
    ]
