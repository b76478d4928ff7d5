"""The two lines at the top: what runs, on which link, and the totals."""

from typing import Final

from rich.text import Text

from cluster.units import format_bytes
from console.own_cost import OwnCost
from console.palette import BAD, BUSY, GOOD, WARN
from console.text_format import (
    fit,
    format_clock,
    format_megabytes_per_s,
    format_rate_pair,
    format_ratio,
)
from console.view_state import ViewState

WIDE: Final = 120
UNREAD: Final = "totals and verdict come later"
_MODE_WORDS: Final = {"disagg": "DISAGG", "colocated": "COLOC"}


def header_lines(state: ViewState, now: float, width: int, cost: OwnCost) -> Text:
    """Two lines of at most ``width`` cells; every number has a fixed place."""
    lines = (_wide_lines if width >= WIDE else _narrow_lines)(state, now, width, cost)
    if cost.read_share is not None:
        lines[1] = Text(fit(f" {UNREAD}: {cost.read_share:.0%} of the log before this is read", width), WARN)
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def state_word(state: ViewState, cost: OwnCost) -> tuple[str, str]:
    """What the run is doing, with its style; the product's name while there is nothing to say."""
    if cost.replay:
        return "REPLAY", f"bold {BUSY}"
    if cost.paused:
        return "PAUSED", f"bold {BUSY}"
    if state.stopped:
        return "STOPPED", f"bold {WARN}"
    if state.stopping:
        return "STOPPING", f"bold {WARN}"
    if state.ready_after_s is None:
        return "STARTING", f"bold {BUSY}"
    return ("read-only" if cost.read_only else "pdconsole"), "bold"


def _link_text(state: ViewState, width: int, *, backend: bool = True) -> str:
    asked = state.topology.asked
    if asked is None:
        return fit("-", width)
    rates = format_rate_pair(state.topology.achieved_bits_per_s(), asked.asked_bits_per_s)
    return fit(f"{asked.backend:<6} {rates}" if backend else rates, width)


def _target_rho(state: ViewState) -> str:
    """ "/0.65": what the run's target has; "" where none was asked."""
    return f"/{fit(format_ratio(state.tuned.target_rho), 4)}" if state.tuned is not None else ""


def _narrow_lines(state: ViewState, now: float, width: int, cost: OwnCost) -> list[Text]:
    word, style = state_word(state, cost)
    first = Text(no_wrap=True)
    first.append(fit(word, 9), style)
    first.append(f" {fit(state.profile, 8)} | {fit(_MODE_WORDS.get(state.mode, state.mode), 6)} | ")
    target = _target_rho(state)  # takes the backend's place
    link = _link_text(state, 21 - len(target), backend=not target)
    first.append(f"{fit(state.codec, 4)} | {link} | rho {fit(format_ratio(state.rho), 4)}{target} | ")
    first.append(format_clock(state.since_start(now)))
    book = state.requests
    second = Text(no_wrap=True)
    second.append(f"run {_count(book.num_running, 2)} wait {_count(book.num_waiting, 3)} ")
    second.append(f"done {_count(book.finished, 5)} ")
    _alarm(second, f"fail {_count(book.failed, 3)}", book.failed, BAD)
    second.append(" | ")
    fallbacks = sum(book.fallbacks.values())
    _alarm(second, f"fallback {_count(fallbacks, 3)}", fallbacks, WARN)
    second.append(f" retry {_count(book.retries, 2)} migr {_count(book.migrations, 2)} | ")
    stranded = state.topology.stranded_blocks()
    _alarm(second, f"strand {_count(stranded, 3)}", stranded, BAD)
    return [first, second]


def _wide_lines(state: ViewState, now: float, width: int, cost: OwnCost) -> list[Text]:
    word, style = state_word(state, cost)
    book, topology = state.requests, state.topology
    clock = f" {format_clock(state.since_start(now))} "
    first = Text(no_wrap=True)
    first.append(f" {fit(word, 9)}", style)
    b_star = state.b_star_bytes_per_s
    _fill(
        first,
        width - len(clock),
        [
            Text(f"  profile {fit(state.profile, 8)}"),
            Text(f"  mode {fit(_MODE_WORDS.get(state.mode, state.mode), 6)}  codec {fit(state.codec, 4)}"),
            Text(f"  link {_link_text(state, 21)}"),
            Text(f"  rho {fit(format_ratio(state.rho), 4)}{_target_rho(state)}"),
            Text(f"  B* {fit(format_megabytes_per_s(b_star) if b_star else '-', 5, right=True)} MB/s"),
            Text(f"  log {fit(format_bytes(cost.log_bytes), 9, right=True)}"),
            Text(f"  {fit(state.model, 16)}"),
            Text(f"  run {fit(state.run, 22)}"),
        ],
    )
    first.append(" " * (width - len(clock) - first.cell_len) + clock)
    fallbacks, stranded = sum(book.fallbacks.values()), topology.stranded_blocks()
    second = Text(no_wrap=True)
    _fill(
        second,
        width,
        [
            Text(f" run {_count(book.num_running, 3)} wait {_count(book.num_waiting, 3)} "),
            Text(f"done {_count(book.finished, 5)} "),
            _alarm(Text(), f"fail {_count(book.failed, 3)}", book.failed, BAD),
            _alarm(Text(" | "), f"fallback {_count(fallbacks, 3)}", fallbacks, WARN),
            Text(f" retry {_count(book.retries, 2)} migr {_count(book.migrations, 2)}"),
            Text(f"| held {_count(topology.held_blocks(), 4)} "),
            _alarm(Text(), f"stranded {_count(stranded, 3)}", stranded, BAD),
            Text(f" | own cpu {cost.cpu_percent:3.0f}% lag {min(cost.loop_lag_ms, 9999):4.0f} ms"),
            Text(f" {cost.redraws_per_s:4.1f}/s skip {_count(cost.skipped_redraws, 3)}"),
            Text(f" | 429 {_count(book.rejected.get(429, 0), 3)} gone {_count(book.cancelled, 3)}"),
            Text(f" | load {fit(state.load_names, 10)}"),
        ],
    )
    return [first, second]


def _fill(line: Text, width: int, segments: list[Text]) -> None:
    """Append segments while they fit: the important ones come first."""
    for segment in segments:
        if line.cell_len + segment.cell_len > width:
            return
        line.append_text(segment)


def _alarm(line: Text, text: str, count: int, colour: str) -> Text:
    line.append(text, f"bold {colour}" if count else GOOD)
    return line


def _count(value: int, width: int) -> str:
    """A count in ``width`` cells: thousands and millions shortened where they must be."""
    for text in (f"{value}", f"{value // 1000}k", f"{value // 1_000_000}M"):
        if len(text) <= width:
            return text.rjust(width)
    return "9" * (width - 1) + "+"
