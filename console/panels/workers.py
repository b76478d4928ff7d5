"""Panel 1: every process and link, one line each. Enter opens the process under the cursor."""

from typing import Final

from rich.text import Text

from cluster.events import RequestDispatched
from cluster.units import format_bytes
from console.palette import BAD, GOOD, STATE_STYLES, WARN
from console.panels.line_view import ChoiceLines
from console.request_view import PREFILL, RequestView
from console.text_format import (
    NONE,
    bar,
    clean,
    fit,
    format_clock,
    format_megabytes_per_s,
    format_mib,
    format_ms,
    format_rate_pair,
    format_ratio,
    short_id,
    short_worker,
)
from console.view_state import ViewState
from console.worker_view import ROUTER, LinkView, WorkerView

WIDE: Final = 96
"""From this width on there is room for each process's second line and the summary."""
PICK_LINES: Final = 2
SUMMARY_LINES: Final = 1 + PICK_LINES
_PICK_CELLS: Final = 7


class WorkersPanel(ChoiceLines):
    """The chosen key is a worker's id."""

    def __init__(self, *, id: str, ascii_mode: bool) -> None:
        super().__init__(id=id, classes="panel")
        self._ascii_mode = ascii_mode

    def draw(self, state: ViewState, now: float) -> None:
        lines = worker_lines(
            state, now, self.text_width, self.scrollable_content_region.height, ascii_mode=self._ascii_mode
        )
        workers = {worker.worker_id for worker in state.topology.by_role()}
        starts = [line.plain[1:].split(" ", 1)[0] for line in lines]
        self.show_choices(lines, [start if start in workers else "" for start in starts])


def worker_lines(state: ViewState, now: float, width: int, height: int, *, ascii_mode: bool) -> list[Text]:
    """Lines for a panel of ``width`` x ``height`` cells.

    What matters least goes first where there is not enough height: each process's second line, the summary, the
    links. Process lines that still do not fit scroll.
    """
    workers = state.topology.by_role()
    if not workers:
        return [Text(" waiting for the first process to start", no_wrap=True)]
    links = sum(len(state.topology.links_from(worker.worker_id)) for worker in workers)
    summary = _summary_lines(state, width) if width >= WIDE else []
    with_links = len(workers) + links <= height
    with_summary = with_links and len(workers) + links + len(summary) <= height
    with_details = width >= WIDE and 2 * len(workers) + links + len(summary) <= height
    lines: list[Text] = []
    for worker in workers:
        lines.append(_worker_line(state, worker, now, width, ascii_mode))
        if with_details:
            lines.append(_detail_line(worker, now, width))
        if with_links:
            for link in state.topology.links_from(worker.worker_id):
                lines.append(_link_line(state, link, width, ascii_mode))
    return lines + summary if with_summary else lines


def wanted_height(state: ViewState, *, wide: bool) -> int:
    """Lines that show everything there is."""
    workers, links = len(state.topology.workers), len(state.topology.links)
    return max(workers * 2 + links + SUMMARY_LINES if wide else workers + links, 4)


def _worker_line(state: ViewState, worker: WorkerView, now: float, width: int, ascii_mode: bool) -> Text:
    glyph, word = worker.word
    stale = worker.is_stale(now)
    line = Text(no_wrap=True)
    line.append(f" {fit(worker.worker_id, 10)} ")
    line.append(f"{glyph} {word:<8} ", "dim" if stale else STATE_STYLES[word])
    percent = worker.cpu_percent
    tail = f" cpu {percent:3.0f}% " if percent is not None else " cpu   -  "
    room = width - line.cell_len - len(tail)
    if worker.state != "ready":
        age = format_ms((now - worker.state_at) * 1000)
        line.append(fit(f"{clean(worker.detail)} ({age} ago)" if worker.detail else f"for {age}", room))
    elif stale:
        silent_s = now - max(worker.stats_at or 0.0, worker.state_at)
        line.append(fit(f"no news for {silent_s:.0f} s", room), "dim")
    else:
        line.append(fit(_work_text(state, worker, width >= WIDE, ascii_mode), room))
    line.append(tail, WARN if (percent or 0.0) >= 95 else "")
    return line


def _detail_line(worker: WorkerView, now: float, width: int) -> Text:
    """The second line of a process: what rarely changes."""
    newest = worker.stats or worker.router_stats
    cores = ",".join(map(str, worker.cpus)) if worker.cpus else "any"
    up = format_clock(now - worker.state_at) if worker.state == "ready" else NONE
    rss = format_bytes(newest.rss_bytes) if newest is not None else NONE
    text = f"{'':12}pid {worker.pid:<8} core {fit(cores, 5)} up {up:<8}  restarts {worker.restarts:<3} memory {rss:<10}"
    if worker.stats is not None and worker.stats.preemptions:
        text += f" preempted {worker.stats.preemptions}"
    if worker.prefill_tokens_per_s > 0:
        text += f" {worker.prefill_tokens_per_s:>7,.0f} tok/s"
    return Text(fit(text, width), "dim", no_wrap=True)


def _work_text(state: ViewState, worker: WorkerView, wide: bool, ascii_mode: bool) -> str:
    if worker.role == ROUTER:
        stats = worker.router_stats
        return f"in-flight {stats.in_flight:>3}  queue {stats.queued:>3}" if stats is not None else ""
    found = worker.stats
    if found is None:
        return ""
    total = found.total_blocks or worker.total_blocks
    blocks = f"blk {found.held_blocks:>4}/{total:<5}"
    computing = _prefilling(state, worker.worker_id)
    if computing is not None:
        attempt = computing.latest
        done = attempt.computed_tokens if attempt is not None else 0
        share = done / max(computing.prompt_tokens, 1)
        progress = f"{_thousands(done):>4}/{_thousands(computing.prompt_tokens):<4}"
        progress += bar(share, 10, ascii_mode=ascii_mode)
    elif worker.role == "prefill":
        progress = f"{'idle':<19}"
    else:
        progress = f"{'':<9}{bar(found.held_blocks / max(total, 1), 10, ascii_mode=ascii_mode)}"
    if worker.role == "prefill":
        head = f"q {found.waiting:>3}     "
        rate = ""
    else:
        head = f"run {found.running:>2} w{found.waiting:>2}"
        rate = f" {found.step_ms:>5.1f} ms a step" if wide else ""
    return f"{head} {progress} {blocks}{rate}"


def _prefilling(state: ViewState, worker_id: str) -> RequestView | None:
    """The request whose prompt this worker computes now, the longest-running first."""
    for request in state.requests.live.values():
        attempt = request.latest
        if attempt is None or request.phase != PREFILL:
            continue
        if (attempt.prefill_worker or attempt.decode_worker) == worker_id:
            return request
    return None


def _link_line(state: ViewState, link: LinkView, width: int, ascii_mode: bool) -> Text:
    asked = state.topology.asked
    rate = format_rate_pair(link.achieved_bits_per_s, asked.asked_bits_per_s if asked is not None else 0.0)
    line = Text(no_wrap=True)
    line.append("   `-> " if ascii_mode else "   └─> ", "dim")
    line.append(f"{fit(link.to_worker, 9)} {fit(rate, 14)} ")
    if width >= WIDE:
        back = format_rate_pair(link.back_bits_per_s, 0.0) if link.back_bits_per_s else "-"
        line.append(f"<- {fit(back, 9)} rtt {fit(format_ms(link.rtt_ms), 6)} ")
    if link.active:
        (request_id, number), started = next(iter(link.active.items()))
        request = state.requests.get(request_id)
        sent_bytes = request.attempt(number).sent_bytes if request is not None else 0
        progress = bar(sent_bytes / max(started.raw_bytes, 1), 10, ascii_mode=ascii_mode)
        more = f" +{len(link.active) - 1}" if len(link.active) > 1 else ""
        text = (
            f"{format_mib(sent_bytes):>5}/{format_mib(started.raw_bytes)} MiB {progress} {started.codec[:4]} "
            f"{short_id(request_id)}{more}"
        )
        line.append(fit(text, width - line.cell_len), GOOD)
    elif link.last is not None:
        last = link.last
        speed = last.wire_bytes / last.busy_s if last.busy_s > 0 else 0.0
        text = (
            f"{format_mib(last.wire_bytes):>5} MiB {last.codec[:4]:<4} {format_megabytes_per_s(speed):>5} MB/s "
            f"exposed {format_ms(last.exposed_s * 1000):>7}"
        )
        line.append(fit(text, width - line.cell_len))
        if link.failures:
            line.append(f" {link.failures} failed", BAD)
    return line


def _summary_lines(state: ViewState, width: int) -> list[Text]:
    lines: list[Text] = []
    rate, described = state.topology.prefill_tokens_per_s(), state.described
    b_star, link = state.b_star_bytes_per_s, state.link_bytes_per_s
    if b_star is not None and described is not None:
        link_text = f"{format_megabytes_per_s(link)} MB/s" if link is not None else "not limited"
        text = (
            f" B* {format_megabytes_per_s(b_star)} MB/s = {described.kv_bytes_per_token:,} B/token x "
            f"{rate:,.0f} tok/s   link {link_text}   rho {format_ratio(state.rho)}"
        )
        if state.tuned is not None:
            text += f" ({state.tuned.target or 'asked'}: {format_ratio(state.tuned.target_rho)})"
        lines.append(Text(fit(text, width), no_wrap=True))
    picks: list[str] = []
    for pick in reversed(state.picks):
        picks += _pick_texts(pick, width - _PICK_CELLS)
    for index, text in enumerate(picks[:PICK_LINES]):
        head = " picks " if index == 0 else ""
        lines.append(Text(fit(f"{head:<{_PICK_CELLS}}{text}", width), "dim", no_wrap=True))
    return lines


def _pick_texts(pick: RequestDispatched, width: int) -> list[str]:
    """Whom a request was given to and why, in one line or in two."""
    request = f"{short_id(pick.request_id)} "
    parts = [f"{short_worker(pick.decode_worker)}: {pick.decode_reason}"]
    if pick.prefill_worker:
        parts.insert(0, f"{short_worker(pick.prefill_worker)}: {pick.prefill_reason}")
    whole = request + " | ".join(parts)
    return (
        [whole] if len(whole) <= width else [request + parts[0], *(" " * len(request) + p for p in parts[1:])]
    )


def _thousands(tokens: int) -> str:
    """7168 -> "7.2k"; below 1000 as it is."""
    return (
        f"{tokens}"
        if tokens < 1000
        else f"{tokens / 1000:.1f}k"
        if tokens < 9_950
        else f"{tokens / 1000:.0f}k"
    )
