"""One request: where its TTFT went, every attempt with the reason of each pick, its history."""

import textwrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.palette import BAD, BUSY, GOOD, MARK, WARN
from console.panels.line_view import LineView
from console.request_view import TTFT_PARTS, AttemptView, RequestView
from console.screens.dialog import Dialog, titled
from console.text_format import block_strip, clean, format_mib, format_ms, format_stamp
from console.view_state import ViewState

_PART_STYLES = ("dim", GOOD, WARN, BUSY, MARK, "")
_PART_FILLS = "-#=+*:"


class RequestDetail(Dialog[None]):
    """Stays up to date while the request goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,enter", "dismiss_empty", "Close"),
        Binding("question_mark,f1", "app.help", "Help", id="help"),
    ]

    def __init__(self, request_id: str, *, ascii_mode: bool) -> None:
        super().__init__()
        self._request_id = request_id
        self._ascii_mode = ascii_mode
        self._view = LineView(id="detail", classes="page")

    def compose(self) -> ComposeResult:
        yield self._view

    def on_mount(self) -> None:
        self._view.focus()

    def draw(self, state: ViewState, now: float) -> None:
        view = self._view
        request = state.requests.get(self._request_id)
        view.border_title = titled(f"request {clean(self._request_id)}   escape back   ? keys")
        if request is None:
            view.show([Text("no longer kept: only the newest ended requests are")])
        elif view.size.width:
            view.show(detail_lines(state, request, now, view.text_width, ascii_mode=self._ascii_mode))


def detail_lines(
    state: ViewState, request: RequestView, now: float, width: int, *, ascii_mode: bool = False
) -> list[Text]:
    """The whole page as lines of at most ``width`` cells."""
    p50, p99 = request.itl_ms()
    lines = [
        Text(
            f"{request.phase}  {request.outcome or '-'}  {clean(request.end_detail)}  label {clean(request.label)}"
            + (f"  client id {clean(request.client_id)}" if request.client_id else "")
        ),
        Text(
            f"prompt {request.prompt_tokens:,} tokens, out {request.out_tokens} of {request.max_tokens}   "
            f"ITL p50 {format_ms(p50)} p99 {format_ms(p99)}   TPOT {format_ms(request.tpot_ms)}   "
            f"E2EL {format_ms(request.e2el_ms)}"
        ),
        Text(),
        *_ttft_lines(request, now, width),
        *_gap_lines(request, width, ascii_mode),
    ]
    for number in sorted(request.attempts):
        lines.extend((Text(), *_attempt_lines(state, request, request.attempts[number])))
    lines.extend((Text(), *_text_lines(request, width), Text(), Text("history", "bold")))
    for at, text in sorted(request.story, key=lambda step: step[0]):  # told by several processes
        lines.append(Text(f" {format_stamp(state.since_start(at)):>7} {_since(at, request)}  {clean(text)}"))
    return [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: Text, width: int) -> list[Text]:
    """The line, or its words on several lines when it is too long."""
    if line.cell_len <= width:
        return [line]
    parts = textwrap.wrap(line.plain, width, subsequent_indent=" " * 11, drop_whitespace=True)
    return [Text(part, line.style) for part in parts]


def _since(at: float, request: RequestView) -> str:
    return f"{(at - request.arrived_at) * 1000:+9,.1f} ms"


def _ttft_lines(request: RequestView, now: float, width: int) -> list[Text]:
    first = request.first_token
    if first is None:
        waited = format_ms((now - request.arrived_at) * 1000) if request.live else "-"
        return [Text(f"TTFT: no token yet, {waited} since arrival")]
    values = {
        "queue_ms": first.queue_ms,
        "prefill_ms": first.prefill_ms,
        "transfer_exposed_ms": first.transfer_exposed_ms,
        "admit_wait_ms": first.admit_wait_ms,
        "first_decode_ms": first.first_decode_ms,
        "router_ms": first.router_ms,
    }
    lines = [Text(f"TTFT {format_ms(first.ttft_ms)} =", "bold")]
    whole = Text("  [")
    room = max(width - 5, 10)
    scale = room / max(first.ttft_ms, 1e-9)
    for (_, name), style, glyph in zip(TTFT_PARTS, _PART_STYLES, _PART_FILLS, strict=True):
        whole.append(glyph * min(round(max(values[name], 0.0) * scale), room - (whole.cell_len - 3)), style)
    whole.append(" " * (room - (whole.cell_len - 3)) + "]")
    lines.append(whole)
    for (label, name), style, glyph in zip(TTFT_PARTS, _PART_STYLES, _PART_FILLS, strict=True):
        share = values[name] / first.ttft_ms if first.ttft_ms > 0 else 0.0
        lines.append(Text(f"  {glyph} {label:<17}{values[name]:>10,.1f} ms  {share:4.0%}", style))
    allowed = max(1.0, 0.02 * first.ttft_ms)
    style = BAD if abs(first.residual_ms) > allowed else ""
    lines.append(Text(f"    {'residual':<17}{first.residual_ms:>10,.1f} ms  (allowed {allowed:.1f})", style))
    total = sum(values.values()) + first.residual_ms
    lines.append(Text(f"    {'sum':<17}{total:>10,.1f} ms"))
    return lines


def _gap_lines(request: RequestView, width: int, ascii_mode: bool) -> list[Text]:
    """Its ITL from the first token to the last (or now), one column a part of its tokens."""
    columns = request.gap_columns(max(width - 26, 10))
    if not columns:
        return []
    top = max(columns)
    strip = block_strip([*columns], top, ascii_mode=ascii_mode)
    line = Text("ITL  ", no_wrap=True)
    line.append("|" + strip + "|", GOOD)
    line.append(f" max {format_ms(top)}")
    return [Text(), line]


def _text_lines(request: RequestView, width: int) -> list[Text]:
    if not request.text and not request.prompt_text:
        return [Text("text     not in the log; up --set router.log_text=true keeps it there", "dim")]
    lines = []
    for title, text in (("prompt", request.prompt_text), ("text", request.text)):
        lines.append(Text(f"{title} ({len(text):,} characters)", "bold"))
        for part in text.expandtabs(4).splitlines() or [""]:
            lines += [Text(f"  {row}") for row in textwrap.wrap(clean(part), max(width - 2, 20)) or [""]]
    return lines


def _attempt_lines(state: ViewState, request: RequestView, attempt: AttemptView) -> list[Text]:
    where = f" at {format_stamp(state.since_start(attempt.at))}" if attempt.at is not None else ""
    lines = [Text(f"attempt {attempt.number}  {attempt.path or '-'}  {attempt.mode}{where}", "bold")]
    if attempt.prefill_worker:
        lines.append(Text(f"  prefill  {clean(attempt.prefill_worker)}: {clean(attempt.prefill_reason)}"))
    if attempt.decode_worker:
        what = "decode" if attempt.prefill_worker else "local"
        lines.append(Text(f"  {what:<8} {clean(attempt.decode_worker)}: {clean(attempt.decode_reason)}"))
    if attempt.computed_tokens:
        took = format_ms(attempt.compute_s * 1000 if attempt.compute_s is not None else None)
        cached = f", {attempt.cached_tokens:,} from the prefix cache" if attempt.cached_tokens else ""
        lines.append(
            Text(
                f"  prompt   {attempt.computed_tokens:,} of {request.prompt_tokens:,} tokens, {took}{cached}"
            )
        )
    done = attempt.transfer
    if done is not None:
        rate = done.wire_bytes / done.busy_s / 1e6 if done.busy_s > 0 else 0.0
        ratio = f" ({done.wire_bytes / done.raw_bytes:.2f} of raw)" if done.raw_bytes else ""
        lines.append(
            Text(
                f"  transfer {format_mib(done.wire_bytes)} MiB {done.codec}{ratio}, {done.tokens:,} tokens, "
                f"{format_ms(done.duration_s * 1000)}, written at {rate:,.0f} MB/s; transfer's own: "
                f"exposed {format_ms(done.exposed_s * 1000)}"
                f"{attempt.skipped}"
            )
        )
    elif attempt.transferring:
        lines.append(
            Text(
                f"  transfer {format_mib(attempt.transfer_raw_bytes)} MiB raw under way{attempt.skipped}",
                GOOD,
            )
        )
    if attempt.failure:
        lines.append(Text(f"  failed   {clean(attempt.failure)}", WARN))
    return lines
