"""The break-even benchmark as one document: what was measured, what was forecast, and how far apart they are. Pure."""

import importlib.metadata
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

from cluster.breakeven_bench import (
    BreakevenResult,
    BreakevenSpec,
    Calibration,
    MeasuredLink,
    TransferSample,
)
from cluster.breakeven_bench_forecast import Forecast, break_even_bytes_per_s, forecast
from cluster.profile import Profile
from cluster.samples import percentiles
from engine.config import ModelConfig

SCHEMA: Final = 1
_CURVE_POINTS: Final = 25


def breakeven_document(
    spec: BreakevenSpec,
    profile: Profile,
    config: ModelConfig,
    machine: Mapping[str, Any],
    calibration: Calibration,
    result: BreakevenResult,
) -> dict[str, Any]:
    """JSON-ready. ``machine`` is ``machine_facts()``.

    ``transfer_ms``: a bulk transfer's from first frame to acknowledgement, of a streamed one what is left of that when
    the prompt is computed. ``recompute_ms``: first engine step to first token on the decode worker, beside the
    transfers of the same delivery and link. ``pays``: the median transfer took less than the median of all
    recomputations of that length, which no link changes. An
    ``error`` is (forecast - measured) / measured. Every summary is ``{"p10", "median", "p90"}``.
    """
    links = {(link.delivery, link.asked_bits_per_s): link for link in result.links}
    recomputes = [_recompute(tokens, calibration, result) for tokens in spec.tokens]
    again_ms = {row["tokens"]: row["recompute_ms"]["median"] for row in recomputes}
    points = [
        _point(delivery, links[delivery, asked], codec, tokens, calibration, result, again_ms[tokens])
        for delivery, asked, codec, tokens in product(spec.deliveries, spec.links, spec.codecs, spec.tokens)
    ]
    curves = [
        _curve(delivery, codec, tokens, points, links, calibration, again_ms[tokens])
        for delivery, codec, tokens in product(spec.deliveries, spec.codecs, spec.tokens)
    ]
    inputs = calibration.inputs
    return {
        "schema": SCHEMA,
        "benchmark": "breakeven",
        "machine": dict(machine),
        "versions": {
            "pdconsole": importlib.metadata.version("pdconsole"),
            "python": platform.python_version(),
            "torch": calibration.torch_version,
            "numba": importlib.metadata.version("numba"),
        },
        "model": {
            "id": profile.model.id,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "kv_bytes_per_token": inputs.kv.bytes_per_token,
            "max_model_len": config.max_model_len,
        },
        "dtype": calibration.dtype,
        "kernels": calibration.kernels,
        "repeats": spec.repeats,
        "runs": result.runs,
        "inputs": {
            "prefill": [
                {"tokens": tokens, "seconds": seconds, "fit_seconds": inputs.prefill.seconds(tokens)}
                for tokens, seconds in calibration.prefill_s.items()
            ],
            "prefill_fit": {
                "fixed_s": inputs.prefill.fixed_s,
                "per_token_s": inputs.prefill.per_token_s,
                "per_pair_s": inputs.prefill.per_pair_s,
            },
            "codecs": {
                name: {
                    "encode_bytes_per_s": rate.encode_bytes_per_s,
                    "decode_bytes_per_s": rate.decode_bytes_per_s,
                    "ratio": rate.ratio,
                }
                for name, rate in inputs.codecs.items()
                if math.isfinite(rate.encode_bytes_per_s)
            },
            "chunk_tokens": inputs.kv.chunk_tokens,
        },
        "links": [
            {
                "delivery": link.delivery,
                "backend": link.backend,
                "asked_bits_per_s": link.asked_bits_per_s,
                "achieved_bits_per_s": link.achieved_bits_per_s,
                "back_bits_per_s": link.back_bits_per_s,
                "rtt_ms": link.rtt_ms,
                "limit": link.limit,
            }
            for link in result.links
        ],
        "recompute": recomputes,
        "transfers": points,
        "curves": curves,
        "forecast": _judged(points, recomputes, curves),
    }


def _point(
    delivery: str,
    link: MeasuredLink,
    codec: str,
    tokens: int,
    calibration: Calibration,
    result: BreakevenResult,
    again_ms: float,
) -> dict[str, Any]:
    asked = link.asked_bits_per_s
    samples = [
        sample
        for sample in result.transfers
        if (sample.delivery, sample.asked_bits_per_s, sample.codec, sample.tokens)
        == (delivery, asked, codec, tokens)
    ]
    again = [
        sample
        for sample in result.recomputes
        if (sample.delivery, sample.asked_bits_per_s, sample.tokens) == (delivery, asked, tokens)
    ]
    expected = _forecast(delivery, link, codec, tokens, calibration)
    transfer_ms = _summary([sample.left_s * 1e3 for sample in samples])
    recompute_ms = _summary([sample.compute_s * 1e3 for sample in again])
    return {
        "delivery": delivery,
        "asked_bits_per_s": asked,
        "achieved_bits_per_s": link.achieved_bits_per_s,
        "codec": codec,
        "tokens": tokens,
        "wire_bytes": samples[0].wire_bytes,
        "transfer_ms": transfer_ms,
        "forecast_ms": expected.transfer_ms,
        "error": _error(expected.transfer_ms, transfer_ms["median"]),
        "recompute_ms": recompute_ms,
        "pays": transfer_ms["median"] < again_ms,
        "forecast_pays": expected.transfer_pays,
        "ttft_ms": _summary([sample.ttft_ms for sample in samples]),
        "local_ttft_ms": _summary([sample.ttft_ms for sample in again]),
        "samples": [_sample(sample) for sample in samples],
    }


def _sample(sample: TransferSample) -> dict[str, float]:
    return {
        "left_ms": sample.left_s * 1e3,
        "duration_ms": sample.duration_s * 1e3,
        "prefill_ms": sample.prefill_s * 1e3,
        "ttft_ms": sample.ttft_ms,
    }


def _recompute(tokens: int, calibration: Calibration, result: BreakevenResult) -> dict[str, Any]:
    samples = [sample.compute_s * 1e3 for sample in result.recomputes if sample.tokens == tokens]
    forecast_ms = calibration.inputs.prefill.seconds(tokens) * 1e3
    recompute_ms = _summary(samples)
    return {
        "tokens": tokens,
        "recompute_ms": recompute_ms,
        "forecast_ms": forecast_ms,
        "error": _error(forecast_ms, recompute_ms["median"]),
        "samples_ms": samples,
    }


def _curve(
    delivery: str,
    codec: str,
    tokens: int,
    points: Sequence[Mapping[str, Any]],
    links: Mapping[tuple[str, float], MeasuredLink],
    calibration: Calibration,
    again_ms: float,
) -> dict[str, Any]:
    """Where transfer and recomputation take equally long, measured and forecast, and the forecast between the links."""
    own = sorted(
        (
            point
            for point in points
            if (point["delivery"], point["codec"], point["tokens"]) == (delivery, codec, tokens)
        ),
        key=lambda point: point["achieved_bits_per_s"],
    )
    rates = [point["achieved_bits_per_s"] for point in own]
    measured, side = crossing(rates, [point["transfer_ms"]["median"] / again_ms for point in own])
    delay_ms = statistics.median(link.rtt_ms for key, link in links.items() if key[0] == delivery) / 2
    expected = break_even_bytes_per_s(tokens, delivery, codec, delay_ms, calibration.inputs)
    forecast_bits = None if expected is None else expected * 8

    def at(bits_per_s: float) -> float:
        return forecast(tokens, delivery, codec, bits_per_s / 8, delay_ms, calibration.inputs).transfer_ms

    return {
        "delivery": delivery,
        "codec": codec,
        "tokens": tokens,
        "break_even_bits_per_s": measured,
        "break_even_side": side,
        "forecast_break_even_bits_per_s": forecast_bits,
        "break_even_error": (
            None if measured is None or forecast_bits is None else _error(forecast_bits, measured)
        ),
        "forecast": [{"bits_per_s": rate, "ms": at(rate)} for rate in _spaced(rates[0], rates[-1])],
    }


def crossing(rates: Sequence[float], ratios: Sequence[float]) -> tuple[float | None, str]:
    """The rate from which on ``ratios`` (transfer over recomputation, by rising rate) are below 1, straight lines
    between points on logarithmic axes; and "" or, where it lies outside, on which side of the rates: below or above.
    """
    above = [index for index, ratio in enumerate(ratios) if ratio >= 1]
    if not above:
        return None, "below"
    last = above[-1]
    if last == len(rates) - 1:
        return None, "above"
    low, high = math.log(rates[last]), math.log(rates[last + 1])
    from_ratio, to_ratio = math.log(ratios[last]), math.log(ratios[last + 1])
    return math.exp(low + (high - low) * from_ratio / (from_ratio - to_ratio)), ""


def _judged(
    points: Sequence[Mapping[str, Any]],
    recomputes: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """How good the forecast was, over all points."""
    crossings = [curve["break_even_error"] for curve in curves if curve["break_even_error"] is not None]
    return {
        "transfer_error": _errors([point["error"] for point in points]),
        "transfer_error_by_delivery": {
            delivery: _errors([point["error"] for point in points if point["delivery"] == delivery])
            for delivery in dict.fromkeys(point["delivery"] for point in points)
        },
        "recompute_error": _errors([row["error"] for row in recomputes]),
        "break_even_error": _errors(crossings),
        "decisions": len(points),
        "decisions_right": sum(point["pays"] == point["forecast_pays"] for point in points),
        "wrong_decisions": [
            {name: point[name] for name in ("delivery", "asked_bits_per_s", "codec", "tokens", "pays")}
            for point in points
            if point["pays"] != point["forecast_pays"]
        ],
    }


def _errors(errors: Sequence[float]) -> dict[str, float | int | None]:
    """Sizes of the errors whatever their sign, and the median with its sign: which way the forecast leans."""
    sizes = [abs(error) for error in errors]
    median, p90 = percentiles(sizes, 50, 90)
    return {
        "count": len(errors),
        "median": median,
        "p90": p90,
        "max": max(sizes, default=None),
        "lean": percentiles(errors, 50)[0],
    }


def _forecast(
    delivery: str, link: MeasuredLink, codec: str, tokens: int, calibration: Calibration
) -> Forecast:
    rate = link.achieved_bits_per_s / 8
    return forecast(tokens, delivery, codec, rate, link.rtt_ms / 2, calibration.inputs)


def _spaced(low: float, high: float) -> list[float]:
    """From ``low`` to ``high`` in equal factors."""
    return [low * (high / low) ** (index / (_CURVE_POINTS - 1)) for index in range(_CURVE_POINTS)]


def _error(expected: float, measured: float) -> float:
    return (expected - measured) / measured


def _summary(values: Sequence[float]) -> dict[str, float]:
    p10, median, p90 = percentiles(values, 10, 50, 90)
    assert p10 is not None
    assert median is not None
    assert p90 is not None
    return {"p10": p10, "median": median, "p90": p90}
