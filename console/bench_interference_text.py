"""An interference document as a page for a person. Pure: a document in, text out."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cluster.interference_bench_verdict import Spread, figure
from console.run_page import number
from console.text_format import clean

_NAME_WIDTH: Final = 29
_WIDTH: Final = 130
Arm = Mapping[str, Any]


def interference_text(document: Mapping[str, Any]) -> str:
    """Sections apart by a blank line. ``document``: see ``interference_document``."""
    sections = [
        _head(document),
        _streams(document),
        _prompts(document),
        _rates(document),
        _client(document),
        ["WHAT IT GAVE", *_wrapped(document["verdict"])],
        ["WHAT IT COST", *_wrapped(document["cost"])],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections if lines)


def _head(document: Mapping[str, Any]) -> list[str]:
    machine, model, versions = document["machine"], document["model"], document["versions"]
    work, workers = document["workload"], document["workers"]
    repeats = document["repeats"]
    return [
        f"long prompts beside running streams: {clean(model['id'])} in {document['dtype']}, "
        f"{workers['prefill']} prefill + {workers['decode']} decode workers on {workers['cores']} cores, "
        f"profile {clean(document['profile'])}",
        f"{work['streams']} streams of {work['prompt_tokens']:,} + {work['max_tokens']:,} tokens; bursts of "
        f"{work['burst_prompts']} x {work['burst_prompt_tokens']:,} + {work['burst_max_tokens']:,} tokens every "
        f"{work['burst_every_s']:g} s, none while one is unanswered",
        f"{clean(machine['cpu']) or 'unknown CPU'}: {' '.join(machine['flags'])}; {machine['cores']} cores, "
        f"load {machine['load_average']:g} at start",
        f"pdconsole {versions['pdconsole']}, torch {versions['torch']}, Python {versions['python']}, "
        f"{machine['system']}",
        f"{repeats} round{'' if repeats == 1 else 's'} of every arm in turns, each phase {document['seconds']:g} s or "
        "until the last burst is answered; median of the rounds, smallest - largest",
    ]


def _streams(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "STREAMS: ms between tokens (ITL), tokens/s of all streams; stalled: time in gaps above "
        f"{document['limits']['stall_ms']:g} ms",
        f"{'':<{_NAME_WIDTH}}{'ALONE p50':>10}{'p99':>9}{'max':>9}{'tok/s':>8}   "
        f"{'IN BURSTS p50':>13}{'p99':>9}{'':>19}{'max':>9}{'stalled':>9}{'tok/s':>8}",
    ]
    for arm in document["arms"]:
        alone, burst = ("alone", "itl_ms"), ("bursts", "burst_itl_ms")
        stalled = figure(arm, ("bursts", "stalled_share"))
        lines.append(
            f"{_name(arm)}{_middle(arm, *alone, 'p50', width=10)}{_middle(arm, *alone, 'p99')}"
            f"{_middle(arm, *alone, 'max')}{_middle(arm, 'alone', 'stream_tokens_per_s', width=8)}   "
            f"{_middle(arm, *burst, 'p50', width=13)}{_middle(arm, *burst, 'p99')}{_spread(arm, *burst, 'p99')}"
            f"{_middle(arm, *burst, 'max')}{_percent(stalled):>9}"
            f"{_middle(arm, 'bursts', 'burst_stream_tokens_per_s', width=8)}"
        )
    return lines


def _prompts(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "PROMPTS: ms to the first token (TTFT); none: short prompts left without one when the phase ended",
        f"{'':<{_NAME_WIDTH}}{'BURST p50':>10}{'':>19}{'max':>9}   {'SHORT alone p50':>15}{'p99':>9}   "
        f"{'SHORT in bursts p50':>19}{'':>19}{'max':>9}{'none':>7}",
    ]
    for arm in document["arms"]:
        own, short = ("bursts", "prompt_ttft_ms"), ("bursts", "burst_ttft_ms")
        lines.append(
            f"{_name(arm)}{_middle(arm, *own, 'p50', width=10)}{_spread(arm, *own, 'p50')}{_middle(arm, *own, 'max')}"
            f"   {_middle(arm, 'alone', 'ttft_ms', 'p50', width=15)}{_middle(arm, 'alone', 'ttft_ms', 'p99')}"
            f"   {_middle(arm, *short, 'p50', width=19)}{_spread(arm, *short, 'p50')}{_middle(arm, *short, 'max')}"
            f"{_count(arm, 'bursts', 'unanswered', width=7)}"
        )
    return lines


def _rates(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "RATES beside bursts: all tokens/s (prompts and answers) a core; goodput in requests/s and its share "
        f"({document['slo']}); KV on the wire; CPU in cores",
        f"{'':<{_NAME_WIDTH}}{'ALONE tok/s':>11}{'BURSTS tok/s':>13}{'':>19}{'bursts':>8}"
        f"{'GOOD streams':>15}{'bursts':>15}{'KV MB/s':>9}{'failed':>8}{'fell back':>10}   CPU",
    ]
    for arm in document["arms"]:
        cpu = arm["summary"]["bursts"]["cpu"] or {}
        used = ", ".join(f"{clean(name)} {spread['median']:.2f}" for name, spread in sorted(cpu.items()))
        kv = figure(arm, ("bursts", "kv_bytes_per_s"))
        rounds = [each[phase] for each in arm["rounds"] for phase in ("alone", "bursts")]
        failed = sum(sum(phase["failed"].values()) for phase in rounds)
        lines.append(
            f"{_name(arm)}{_middle(arm, 'alone', 'tokens_per_s_per_core', width=11)}"
            f"{_middle(arm, 'bursts', 'tokens_per_s_per_core', width=13)}"
            f"{_spread(arm, 'bursts', 'tokens_per_s_per_core')}{_count(arm, 'bursts', 'bursts', width=8)}"
            f"{_good(arm, 'steady'):>15}{_good(arm, 'burst'):>15}"
            f"{number(kv['median'] / 1e6) if kv and kv['median'] else '-':>9}{failed:>8}"
            f"{sum(phase['fallbacks'] for phase in rounds):>10}   {used}"
        )
    return lines


def _client(document: Mapping[str, Any]) -> list[str]:
    limits = document["limits"]
    lines = [
        f"LOAD GENERATOR beside bursts: valid up to {limits['lag_ms']:g} ms late at p99 and streams waiting for it "
        f"{limits['idle_share']:.0%} of their time",
        f"{'':<{_NAME_WIDTH}}{'LATE p99':>10}{'max':>9}{'waiting':>9}{'CPU':>7}{'valid':>9}",
    ]
    for arm in document["arms"]:
        cpu = figure(arm, ("bursts", "client", "cpu"))
        valid = f"{arm['valid']} of {len(arm['rounds'])}"
        lines.append(
            f"{_name(arm)}{_middle(arm, 'bursts', 'client', 'lag_ms', 'p99', width=10)}"
            f"{_middle(arm, 'bursts', 'client', 'lag_ms', 'max')}"
            f"{_percent(figure(arm, ('bursts', 'idle_share'))):>9}{cpu['median'] if cpu else 0.0:>7.2f}"
            f"{valid:>9}"
        )
    for arm in document["arms"]:
        lines += [
            f"INVALID: {arm['name']}, round {each['repeat']} (run {clean(each['run'])}): {each['invalid']}"
            for each in arm["rounds"]
            if each["invalid"]
        ]
    return lines


def _wrapped(sentences: Iterable[str]) -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(
            sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    ]


def _name(arm: Arm) -> str:
    return f"{arm['name'] + ('' if arm['valid'] else ' !'):<{_NAME_WIDTH}}"


def _middle(arm: Arm, *path: str, width: int = 9) -> str:
    spread = figure(arm, path)
    return f"{number(spread['median']) if spread else '-':>{width}}"


def _count(arm: Arm, *path: str, width: int) -> str:
    spread = figure(arm, path)
    return ("-" if spread is None else f"{spread['median']:g}").rjust(width)


def _spread(arm: Arm, *path: str) -> str:
    spread = figure(arm, path)
    text = f"{number(spread['min'])} - {number(spread['max'])}" if spread else ""
    return f"{text:>19}"


def _percent(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread['median'] * 100:.0f} %"


def _good(arm: Arm, label: str) -> str:
    rate, share = (figure(arm, ("bursts", name, label)) for name in ("goodput_per_s", "good_share"))
    return f"{number(rate['median']) if rate else '-'} ({_percent(share)})"
