"""The codecs' benchmark as one document: what was measured where, every raw sample, and what they come to. Pure."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cluster.codec_bench import CodecBenchResult, CodecBenchSpec, CodecSamples, LayerError
from cluster.samples import percentile, percentiles
from engine.config import ModelConfig

SCHEMA: Final = 1


def codec_bench_document(
    spec: CodecBenchSpec, config: ModelConfig, core: int, machine: Mapping[str, Any], result: CodecBenchResult
) -> dict[str, Any]:
    """JSON-ready. ``machine`` is ``machine_facts()``.

    Rates are of stored bytes, ``ratio`` is wire over stored bytes. ``agreement`` is the share of output tokens after
    the first (which comes with the KV) that equal, position by position, those of the same KV sent raw;
    ``first_divergence`` counts from the first output token = 0, null where nothing differs; earliest and median are of
    the prompts where something does.
    """
    return {
        "schema": SCHEMA,
        "benchmark": "codec",
        "machine": {**machine, "core": core},
        "versions": {
            "pdconsole": importlib.metadata.version("pdconsole"),
            "python": platform.python_version(),
            "torch": result.torch_version,
            "numba": importlib.metadata.version("numba"),
            "zstandard": importlib.metadata.version("zstandard"),
        },
        "model": {
            "id": spec.model,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "kv_bytes_per_token": config.kv_bytes_per_token(result.dtype),
        },
        "dtype": result.dtype,
        "repeats": spec.repeats,
        "kv": {
            "prompt_tokens": len(spec.kv_prompt),
            "raw_bytes": result.raw_bytes,
            "frame_bytes": result.frame_bytes,
        },
        "outputs": {
            "prompts": len(spec.prompts),
            "prompt_tokens": len(spec.prompts[0]),
            "output_tokens": spec.output_tokens,
        },
        "codecs": [_codec(samples, spec, result.raw_bytes) for samples in result.codecs],
    }


def _codec(samples: CodecSamples, spec: CodecBenchSpec, raw_bytes: int) -> dict[str, Any]:
    compared = len(spec.prompts) * (spec.output_tokens - 1)
    diverged = [position for position in samples.first_divergence if position is not None]
    return {
        "codec": samples.name,
        "wire_bytes": samples.wire_bytes,
        "ratio": samples.wire_bytes / raw_bytes,
        "encode_bytes_per_s": _rates(raw_bytes, samples.encode_s),
        "decode_bytes_per_s": _rates(raw_bytes, samples.decode_s),
        "encode_s": list(samples.encode_s),
        "decode_s": list(samples.decode_s),
        "cpu_share": samples.cpu_share,
        "error": [
            {"layer": layer, "keys": _error(keys), "values": _error(values)}
            for layer, (keys, values) in enumerate(zip(samples.key_errors, samples.value_errors, strict=True))
        ],
        "agreement": sum(samples.agreeing) / compared,
        "identical": len(samples.first_divergence) - len(diverged),
        "earliest_divergence": min(diverged, default=None),
        "median_divergence": percentile(diverged, 50),
        "first_divergence": list(samples.first_divergence),
        "agreeing": list(samples.agreeing),
    }


def _rates(raw_bytes: int, seconds: Sequence[float]) -> dict[str, float | None]:
    p10, median, p90 = percentiles([raw_bytes / second for second in seconds], 10, 50, 90)
    return {"p10": p10, "median": median, "p90": p90}


def _error(error: LayerError) -> dict[str, float]:
    return {"mean": error.mean, "max": error.max, "rms": error.rms}
