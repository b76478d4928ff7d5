"""The upper half of a process's page as lines. Pure."""

import textwrap
from typing import Final

from rich.text import Text

from cluster.units import format_bytes
from console.held_blocks import WorkerBlocks
from console.palette import BAD, GOOD, STATE_STYLES, WARN
from console.text_format import (
    NONE,
    bar,
    block_strip,
    clean,
    fit,
    format_clock,
    format_ms,
    format_stamp,
    short_id,
)
from console.view_state import ViewState
from console.worker_view import ROUTER, WorkerView

MAX_HOLDERS: Final = 50
_LABEL: Final = 12


def fact_lines(
    state: ViewState, worker: WorkerView, held: WorkerBlocks, now: float, width: int, *, ascii_mode: bool
) -> list[Text]:
    """Lines of at most ``width`` cells."""
    glyph, word = worker.word
    first = Text(no_wrap=True)
    first.append(f"{'state':<{_LABEL}}")
    first.append(f"{glyph} {word:<9}", STATE_STYLES[word])
    since = format_clock(now - worker.state_at)
    first.append(fit(f"for {since}  {clean(worker.detail)}", max(width - first.cell_len, 0)))
    newest = worker.stats or worker.router_stats
    percent = worker.cpu_percent
    cores = ",".join(map(str, worker.cpus)) if worker.cpus else "any"
    lines = [
        first,
        _fact("process", f"pid {worker.pid}   role {worker.role}   core {cores}   restarts {worker.restarts}   "
              f"cpu {f'{percent:.0f}%' if percent is not None else NONE}   "
              f"memory {format_bytes(newest.rss_bytes) if newest is not None else NONE}"),
    ]  # fmt: skip
    if worker.role == ROUTER:
        lines += _router_lines(worker)
    else:
        lines += _engine_lines(worker, width, ascii_mode)
        lines += _block_lines(worker, held, width, ascii_mode)
    lines += _pick_lines(state, worker)
    return [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: Text, width: int) -> list[Text]:
    """The line, or its words on several lines under its label."""
    if line.cell_len <= width:
        return [line]
    parts = textwrap.wrap(line.plain, max(width, 20), subsequent_indent=" " * _LABEL)
    return [Text(part, line.style, no_wrap=True) for part in parts]


def _fact(label: str, text: str, style: str = "") -> Text:
    return Text(f"{label:<{_LABEL}}{text}", style, no_wrap=True)


def _router_lines(worker: WorkerView) -> list[Text]:
    stats = worker.router_stats
    return (
        [] if stats is None else [_fact("requests", f"in flight {stats.in_flight}   queued {stats.queued}")]
    )


def _engine_lines(worker: WorkerView, width: int, ascii_mode: bool) -> list[Text]:
    stats = worker.stats
    if stats is None:
        return [_fact("engine", "no statistics yet")]
    lines = [
        _fact(
            "engine",
            f"waiting {stats.waiting} ({stats.waiting_prompt_tokens:,} prompt tokens)   running {stats.running}   "
            f"waiting for KV {stats.reserved}   handing off {stats.handing_off}   step {stats.step_ms:.1f} ms   "
            f"preempted {stats.preemptions}   late frames {stats.late_frames}",
        )
    ]
    room = max(width - _LABEL - 36, 8)  # its largest value has ten cells
    rates = list(worker.rates)[-room:]
    for label, unit, values in (
        ("prefill", "tok/s", [rate.prefill_tokens_per_s for rate in rates]),
        ("decode", "tok/s", [rate.decode_tokens_per_s for rate in rates]),
        ("busy", "% of time", [rate.busy_share * 100 for rate in rates]),
    ):
        top = max(values, default=0.0)
        strip = block_strip([value or None for value in values], top, ascii_mode=ascii_mode)
        current = values[-1] if values else 0.0
        lines.append(_fact(label, f"{current:>8,.0f} {unit:<9} |{strip}| max {top:,.0f}"))
    if worker.prefill_tokens_per_s > 0:
        lines.append(_fact("", f"{worker.prefill_tokens_per_s:>8,.0f} tok/s in its last prompt-only steps"))
    return lines


def _block_lines(worker: WorkerView, held: WorkerBlocks, width: int, ascii_mode: bool) -> list[Text]:
    stats = worker.stats
    if stats is None:
        return []
    total = stats.total_blocks or worker.total_blocks
    stranded = worker.stranded_blocks
    lines = [
        _fact(
            "blocks",
            f"held {stats.held_blocks:,} of {total:,} "
            f"{bar(stats.held_blocks / max(total, 1), 20, ascii_mode=ascii_mode)}   stranded {stranded}",
            f"bold {BAD}" if stranded else "",
        )
    ]
    if held.error:
        return [*lines, _fact("held by", clean(held.error), "dim")]
    if not held.holders:
        return [*lines, _fact("held by", "nobody", "dim")]
    lines.append(
        _fact(
            "held by",
            f"{'request':<9}{'att':>3} {'status':<11}{'blocks':>7} {'age':>8}  owner    peer",
            "bold",
        )
    )
    for holder in sorted(held.holders, key=lambda holder: -holder.age_s)[:MAX_HOLDERS]:
        wanted = "" if holder.is_wanted else "  no longer wanted: being freed"
        text = (
            f"{short_id(holder.request_id):<9}{holder.attempt:>3} {fit(holder.status, 10)} {holder.blocks:>7,} "
            f"{format_ms(holder.age_s * 1000):>8}  {fit(holder.owner or 'STRANDED', 8)} "
            f"{clean(holder.peer) or NONE}{wanted}"
        )
        lines.append(
            _fact("", text, "" if holder.owner and holder.is_wanted else WARN if holder.owner else BAD)
        )
    return lines


def _pick_lines(state: ViewState, worker: WorkerView) -> list[Text]:
    lines: list[Text] = []
    for pick in reversed(state.picks):
        for role, worker_id, reason in (
            ("prefill", pick.prefill_worker, pick.prefill_reason),
            ("decode", pick.decode_worker, pick.decode_reason),
        ):
            if worker_id == worker.worker_id:
                when = format_stamp(state.since_start(pick.at))
                text = f"{when} {short_id(pick.request_id)} as {role}: {clean(reason)}"
                lines.append(_fact("" if lines else "picked for", text, GOOD if not lines else ""))
    return lines[:4]
