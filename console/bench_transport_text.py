"""A transport benchmark's document as a page for a person. Pure: a document in, text out."""

from typing import Any, Final

from cluster.units import format_bits_per_s
from console.run_page import number
from console.text_format import clean

_PLACES: Final = {"loopback": "bare loopback", "netns": "between two network namespaces"}
_WAYS: Final = {"v2-scattered": "v2, scattered"}
_CONDITIONS: Final = {
    "alone": "nothing is sent",
    "streamed": "its own KV leaves as it is computed",
    "beside": "another prompt's KV leaves",
}


def transport_bench_text(document: dict[str, Any]) -> str:
    """Sections apart by a blank line. ``document``: see ``transport_bench_document``."""
    places = dict.fromkeys(path["place"] for path in document["paths"])
    sections = [
        _head(document),
        *(_unlimited(document, place) for place in places),
        *(_limited(document, place) for place in places),
        _steps(document),
        _goals(document),
        _remarks(document),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(document: dict[str, Any]) -> list[str]:
    machine, model = document["machine"], document["model"]
    cores = {role: ", ".join(map(str, ends)) or "any" for role, ends in machine["ends"].items()}
    repeats = f"{document['repeats']} repeat{'' if document['repeats'] == 1 else 's'}"
    return [
        f"transport of KV of {clean(model['id'])} in {document['dtype']}, "
        f"{model['kv_bytes_per_token']:,} bytes a token: "
        f"sender on core {cores['sender']}, receiver on core {cores['receiver']}",
        f"{clean(machine['cpu']) or 'unknown CPU'}, {clean(machine['system'])}, "
        f"load {machine['load_average']:g} before; congestion control {clean(document['congestion_control'])}",
        f"{repeats}, ways in turns; median, and p10 to p90 in brackets; every byte of v1 and v2 is checked on arrival",
    ]


def _unlimited(document: dict[str, Any], place: str) -> list[str]:
    lines = [
        f"{_PLACES[place]}, as fast as the host can",
        f"{'WAY':<16}{'MB':>6}{'GB/s':>24}{'of iperf3':>11}{'CPU s/GB: sender':>19}{'receiver':>10}"
        f"{'grew MB: sender':>18}{'receiver':>10}",
    ]
    for path in document["paths"]:
        if path["place"] != place or path["asked_bits_per_s"]:
            continue
        lines.append(
            f"{_WAYS.get(path['way'], path['way']):<16}{_size(path):>6}{_spread(path['bytes_per_s'], 1e9):>24}"
            f"{_share(path['share_of_iperf3']):>11}{number(path['sender_cpu_s_per_gb']):>19}"
            f"{number(path['receiver_cpu_s_per_gb']):>10}{_megabytes(path['sender_extra_bytes']):>18}"
            f"{_megabytes(path['receiver_extra_bytes']):>10}"
        )
    return lines


def _limited(document: dict[str, Any], place: str) -> list[str]:
    limited = [path for path in document["paths"] if path["place"] == place and path["asked_bits_per_s"]]
    if not limited:
        return []
    lines = [
        f"{_PLACES[place]}, over a limited link",
        f"{'ASKED':<16}{'WAY':<10}{'MB':>6}{'Gb/s':>24}{'of asked':>11}{'CPU s/GB: sender':>19}{'receiver':>10}",
    ]
    for path in limited:
        gigabits = {name: value * 8 for name, value in path["bytes_per_s"].items()}
        lines.append(
            f"{format_bits_per_s(path['asked_bits_per_s']):<16}{path['way']:<10}{_size(path):>6}"
            f"{_spread(gigabits, 1e9):>24}{_share(path['share_of_asked']):>11}"
            f"{number(path['sender_cpu_s_per_gb']):>19}{number(path['receiver_cpu_s_per_gb']):>10}"
        )
    return lines


def _steps(document: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for measured in document["steps"]:
        rate = measured["asked_bits_per_s"]
        lines += [
            *([""] if lines else []),
            f"steps of an engine on the sender's core, prompts of {measured['prompt_tokens']:,} tokens, "
            f"{_PLACES[measured['place']]}, {format_bits_per_s(rate)}",
            f"{'MEANWHILE':<38}{'prefill ms':>26}{'longer by':>11}{'MB sent':>10}",
        ]
        for condition in measured["conditions"]:
            delay = "" if condition["condition"] == "alone" else f"{condition['delay'] * 100:.1f} %"
            lines.append(
                f"{_CONDITIONS[condition['condition']]:<38}{_spread(condition['prefill_ms'], 1):>26}{delay:>11}"
                f"{condition['sent_bytes'] / 1e6:>10.1f}"
            )
    return lines


def _goals(document: dict[str, Any]) -> list[str]:
    if not document["goals"]:
        return []
    lines = [f"{'GOAL':<52}{'at least':>10}{'here':>10}"]
    for goal in document["goals"]:
        verdict = "" if goal["ok"] else "  missed"
        lines.append(f"{goal['goal']:<52}{_share(goal['at_least']):>10}{_share(goal['actual']):>10}{verdict}")
    return lines


def _remarks(document: dict[str, Any]) -> list[str]:
    lines = [f"not measured: {clean(reason)}" for reason in document["missing"]]
    sender, receiver = (document["machine"]["ends"][role] for role in ("sender", "receiver"))
    if not sender or sender == receiver:
        lines.append("both ends share their cores: a machine with two cores or more gives higher rates")
    return lines


def _size(path: dict[str, Any]) -> str:
    return "-" if path["bytes"] is None else f"{path['bytes'] / 1e6:.0f}"


def _spread(summary: dict[str, float], unit: float) -> str:
    median, p10, p90 = (number(summary[name] / unit) for name in ("median", "p10", "p90"))
    return f"{median} ({p10} - {p90})"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"
