"""A codec benchmark's document as a page for a person. Pure: a document in, text out."""

from typing import Any, Final

from console.run_page import number
from console.text_format import clean

_BUSY_BELOW: Final = 0.95


def codec_bench_text(document: dict[str, Any]) -> str:
    """Sections apart by a blank line. ``document``: see ``codec_bench_document``."""
    sections = [_head(document), _speed(document), _outputs(document), _errors(document), _remarks(document)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(document: dict[str, Any]) -> list[str]:
    machine, model, kv = document["machine"], document["model"], document["kv"]
    repeats = f"{document['repeats']} repeat{'' if document['repeats'] == 1 else 's'}"
    return [
        f"codecs on KV of {clean(model['id'])} in {document['dtype']} on core {machine['core']}, "
        f"zstandard {document['versions']['zstandard']}",
        f"{clean(machine['cpu']) or 'unknown CPU'}: {' '.join(machine['flags'])}",
        f"{kv['prompt_tokens']:,} tokens, {kv['raw_bytes'] / 1e6:,.1f} MB in frames of up to "
        f"{kv['frame_bytes'] / 1e6:.2f} MB; {repeats}, codecs in turns; median, and p10 to p90 in brackets",
    ]


def _speed(document: dict[str, Any]) -> list[str]:
    lines = [f"{'CODEC':<10}{'encode GB/s':>24}{'decode GB/s':>24}{'of raw':>10}"]
    for codec in document["codecs"]:
        encode, decode = _spread(codec["encode_bytes_per_s"]), _spread(codec["decode_bytes_per_s"])
        lines.append(f"{codec['codec']:<10}{encode:>24}{decode:>24}{codec['ratio']:>10.3f}")
    return [*lines, "raw is a copy; a raw transfer needs none"]


def _outputs(document: dict[str, Any]) -> list[str]:
    asked = document["outputs"]
    lines = [
        f"greedy output of {asked['prompts']} prompts of {asked['prompt_tokens']:,} tokens, "
        f"{asked['output_tokens']} tokens each, against raw",
        f"{'CODEC':<10}{'tokens equal':>16}{'outputs equal':>16}{'first difference: earliest, median':>38}",
    ]
    for codec in document["codecs"]:
        earliest, median = codec["earliest_divergence"], codec["median_divergence"]
        where = "never" if earliest is None else f"token {earliest}, token {median:g}"
        lines.append(
            f"{codec['codec']:<10}{codec['agreement'] * 100:>14.1f} %"
            f"{codec['identical']:>8} of {asked['prompts']:>4}"
            f"{where:>38}"
        )
    return lines


def _errors(document: dict[str, Any]) -> list[str]:
    """Of the codecs that change anything."""
    lines: list[str] = []
    for codec in document["codecs"]:
        if not any(layer[kv]["max"] for layer in codec["error"] for kv in ("keys", "values")):
            continue
        lines += [
            *([""] if lines else []),
            f"error of {codec['codec']} by layer: mean and largest, and the size (rms) of what was encoded",
            f"{'LAYER':>5}{'keys mean':>12}{'max':>12}{'rms':>12}{'values mean':>16}{'max':>12}{'rms':>12}",
        ]
        for layer in codec["error"]:
            keys, values = (
                f"{layer[kv]['mean']:>{width}.3g}{layer[kv]['max']:>12.3g}{layer[kv]['rms']:>12.3g}"
                for kv, width in (("keys", 12), ("values", 16))
            )
            lines.append(f"{layer['layer']:>5}{keys}{values}")
    return lines


def _remarks(document: dict[str, Any]) -> list[str]:
    least = min(codec["cpu_share"] for codec in document["codecs"])
    if least >= _BUSY_BELOW:
        return []
    return [
        f"the core was not free: in one case other processes had it {(1 - least) * 100:.0f} % of the time"
    ]


def _spread(summary: dict[str, float]) -> str:
    median, p10, p90 = (number(summary[name] / 1e9) for name in ("median", "p10", "p90"))
    return f"{median} ({p10} - {p90})"
