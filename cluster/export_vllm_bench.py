"""A run as the result file of ``vllm bench serve``: the same field names and units, from the router's own clock.

Fields as of vLLM 0.32, https://docs.vllm.ai/en/latest/cli/bench/serve.html. Requests still in flight are left out; a
request that did not finish, or was refused at once, has its reason in ``errors`` and zeros elsewhere, as there.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cluster.events import RequestRejected, RunStarted, TextDelivered, TokensDelivered
from cluster.metrics import RunMetrics
from cluster.request_timeline import RequestTimeline
from cluster.run_log import PassedOver, read_events
from cluster.samples import percentiles

_PERCENTILES: Final = (50, 90, 99)
_NOTHING: Final[dict[str, Any]] = {
    "input_lens": 0, "output_lens": 0, "ttfts": 0.0, "itls": [], "latencies": 0.0, "generated_texts": "",
}  # fmt: skip

_Value = TypeVar("_Value")


def to_vllm_bench(log: Path, passed: PassedOver) -> bytes:
    """One JSON document. Raises OSError and RunLogError."""
    metrics = RunMetrics(keep=None)
    texts: dict[str, list[str]] = {}
    per_second: Counter[int] = Counter()
    started: RunStarted | None = None
    refused: list[RequestRejected] = []
    for event in read_events(log, passed):
        metrics.fold(event)
        if isinstance(event, RunStarted):
            started = event
        elif isinstance(event, RequestRejected) and event.request_id not in metrics.timelines:
            refused.append(event)
        elif isinstance(event, TextDelivered):
            texts.setdefault(event.request_id, []).append(event.text)
        elif isinstance(event, TokensDelivered) and event.request_id in metrics.timelines:  # no probe's
            per_second.update(math.floor(at) for at in event.token_at)
    ended = [timeline for timeline in metrics.timelines.values() if timeline.has_ended]
    answered = [timeline for timeline in ended if timeline.phase == "finished"]
    duration_s = _duration_s(ended)
    input_tokens = sum(timeline.prompt_tokens for timeline in answered)
    output_tokens = sum(timeline.output_tokens for timeline in answered)
    document: dict[str, Any] = {
        "date": _date(started),
        "backend": "pdconsole",
        "endpoint_type": "openai",
        "label": started.run if started else None,
        "model_id": started.model if started else None,
        "tokenizer_id": started.model if started else None,
        "num_prompts": len(ended) + len(refused),
        "request_rate": _arrival_rate([*(t.arrived_at for t in ended), *(event.at for event in refused)]),
        "burstiness": None,  # arrivals are those of the run's clients
        "max_concurrency": None,
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(ended) - len(answered) + len(refused),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per_s(len(answered), duration_s),
        "request_goodput": None,
        "output_throughput": _per_s(output_tokens, duration_s),
        "total_token_throughput": _per_s(input_tokens + output_tokens, duration_s),
        "max_output_tokens_per_s": float(max(per_second.values(), default=0)),
        "max_concurrent_requests": _most_at_once(ended),
    }
    gaps_ms = [gap for timeline in answered for gap in timeline.itl_ms]
    document |= _statistics("ttft", [timeline.ttft_ms for timeline in answered])
    document |= _statistics("tpot", [timeline.tpot_ms for timeline in answered])
    document |= _statistics("itl", gaps_ms)
    document |= _statistics("e2el", [timeline.e2el_ms for timeline in answered])
    document |= {
        "input_lens": [timeline.prompt_tokens for timeline in ended],
        "output_lens": [_if_answered(timeline, timeline.output_tokens, 0) for timeline in ended],
        "ttfts": [_if_answered(timeline, (timeline.ttft_ms or 0.0) / 1000.0, 0.0) for timeline in ended],
        "itls": [_if_answered(timeline, [gap / 1000.0 for gap in timeline.itl_ms], []) for timeline in ended],
        "latencies": [_if_answered(timeline, (timeline.e2el_ms or 0.0) / 1000.0, 0.0) for timeline in ended],
        "start_times": [timeline.arrived_at for timeline in ended],
        "generated_texts": ["".join(texts.get(timeline.request_id, ())) for timeline in ended],
        "errors": [
            _if_answered(timeline, "", f"{timeline.phase}: {timeline.end_reason}") for timeline in ended
        ],
    }
    for event in refused:
        for key, nothing in _NOTHING.items():
            document[key].append(nothing)
        document["start_times"].append(event.at)
        document["errors"].append(f"rejected {event.status}: {event.reason}")
    return msgspec.json.encode(document)


def _if_answered(timeline: RequestTimeline, value: _Value, otherwise: _Value) -> _Value:
    return value if timeline.phase == "finished" else otherwise


def _date(started: RunStarted | None) -> str | None:
    """As there: local digits without a zone; here UTC."""
    return None if started is None else datetime.fromtimestamp(started.wall_at, UTC).strftime("%Y%m%d-%H%M%S")


def _duration_s(ended: Sequence[RequestTimeline]) -> float:
    """First arrival to last end."""
    if not ended:
        return 0.0
    return max(timeline.ended_at or 0.0 for timeline in ended) - min(
        timeline.arrived_at for timeline in ended
    )


def _arrival_rate(arrivals: Sequence[float]) -> float | None:
    """Requests per second between first and last arrival."""
    span_s = max(arrivals) - min(arrivals) if arrivals else 0.0
    return (len(arrivals) - 1) / span_s if span_s > 0 else None


def _most_at_once(ended: Sequence[RequestTimeline]) -> int:
    changes = [(timeline.arrived_at, 1) for timeline in ended]
    changes += [(timeline.ended_at or timeline.arrived_at, -1) for timeline in ended]
    open_now = most = 0
    for _, change in sorted(changes):
        open_now += change
        most = max(most, open_now)
    return most


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _statistics(name: str, values_ms: Sequence[float | None]) -> dict[str, float]:
    """Mean, median, standard deviation of the population and percentiles; zeros where nothing was measured."""
    values = [value for value in values_ms if value is not None]
    figures = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": statistics.median(values) if values else 0.0,
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
    }
    ranks = percentiles(values, *_PERCENTILES)
    return figures | {f"p{q}_{name}_ms": rank or 0.0 for q, rank in zip(_PERCENTILES, ranks, strict=True)}
