"""Two runs at the same moment after their clusters were ready: figures side by side, charts on one scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Static

from console.panels.line_view import LineView
from console.series import ColumnGrid
from console.text_format import (
    NONE,
    block_strip,
    fit,
    format_clock,
    format_megabytes_per_s,
    format_mib,
    format_ms,
    format_ratio,
)
from console.view_state import ViewState

WINDOW_S: Final = 10.0
CHART_S: Final = 120.0
NAME_CELLS: Final = 22
RATIO_CELLS: Final = 8


@dataclass(frozen=True, slots=True)
class Side:
    """One run as it is shown: the fold, the moment on its own clock, and whether its log goes on after that."""

    state: ViewState
    now: float
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. ``ratio``: B / A says something."""

    name: str
    of: Callable[[Side], float | None]
    text: Callable[[float | None], str]
    ratio: bool = True


def _percentile(series: str, share: float) -> Callable[[Side], float | None]:
    def of(side: Side) -> float | None:
        found: float | None = getattr(side.state.requests, series).percentiles(side.now, WINDOW_S, share)[0]
        return found

    return of


def _tokens_per_s(side: Side) -> float:
    """Gaps between tokens, and first tokens, are tokens."""
    book = side.state.requests
    return (book.itl_ms.count(side.now, WINDOW_S) + book.ttft_ms.count(side.now, WINDOW_S)) / WINDOW_S


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return NONE if value is None else format_megabytes_per_s(value)


LAST_WINDOW: Final = (
    Figure("ITL p50", _percentile("itl_ms", 0.5), format_ms),
    Figure("ITL p99", _percentile("itl_ms", 0.99), format_ms),
    Figure("TTFT p50", _percentile("ttft_ms", 0.5), format_ms),
    Figure("TTFT p99", _percentile("ttft_ms", 0.99), format_ms),
    Figure("output tokens/s", _tokens_per_s, _count),
    Figure("KV MB/s", lambda side: side.state.requests.kv_bytes.total(side.now, WINDOW_S) / WINDOW_S, _rate),
    Figure("running", lambda side: side.state.requests.num_running, _count, ratio=False),
    Figure("waiting", lambda side: side.state.requests.num_waiting, _count, ratio=False),
)
SINCE_START: Final = (
    Figure("finished", lambda side: side.state.requests.finished, _count),
    Figure("failed", lambda side: side.state.requests.failed, _count, ratio=False),
    Figure("refused", lambda side: sum(side.state.requests.rejected.values()), _count, ratio=False),
    Figure("fallbacks", lambda side: sum(side.state.requests.fallbacks.values()), _count, ratio=False),
    Figure(
        "retries, migrations",
        lambda side: side.state.requests.retries + side.state.requests.migrations,
        _count,
        ratio=False,
    ),
    Figure("KV MiB on the wire", lambda side: side.state.requests.wire_bytes, lambda v: format_mib(v or 0.0)),
)
_Columns = Callable[[Side, ColumnGrid], list[float | None]]
_CHARTS: Final[tuple[tuple[str, _Columns, Callable[[float], str]], ...]] = (
    ("ITL p99", lambda side, grid: side.state.requests.itl_ms.columns(grid, 0.99), format_ms),
    ("TTFT p99", lambda side, grid: side.state.requests.ttft_ms.columns(grid, 0.99), format_ms),
    ("KV MB/s", lambda side, grid: side.state.requests.kv_bytes.rates(grid), format_megabytes_per_s),
)


def compare_lines(sides: Sequence[Side], names: Sequence[str], width: int, *, ascii_mode: bool) -> list[Text]:
    """The whole page, every line of at most ``width`` cells."""
    column = max((width - NAME_CELLS - RATIO_CELLS) // 2, 8)
    lines = [
        _row(
            "",
            [f"{letter} {name}" for letter, name in zip("AB", names, strict=True)],
            "B / A",
            column,
            "bold",
        ),
        _row("", [_what(side.state) for side in sides], "", column),
        _row("", [_where(side) for side in sides], "", column),
    ]
    for title, figures in ((f"last {WINDOW_S:.0f} s", LAST_WINDOW), ("since the start", SINCE_START)):
        lines.append(Text(fit(title, width), "bold"))
        lines += [_figure(figure, sides, column) for figure in figures]
    lines.append(Text(fit(f"last {CHART_S:.0f} s, A over B, on one scale", width), "bold"))
    for name, columns, text in _CHARTS:
        room = max(width - NAME_CELLS - 12, 8)
        values = [columns(side, ColumnGrid(side.now, CHART_S, room)) for side in sides]
        top = max((v for row in values for v in row if v is not None), default=0.0)
        for letter, row in zip("AB", values, strict=True):
            label = fit(f"  {name} {letter}", NAME_CELLS)
            drawn = block_strip(row, top, ascii_mode=ascii_mode)[-room:].rjust(room)
            lines.append(Text(f"{label}|{drawn}| {fit(text(top) if top else NONE, 9)}", no_wrap=True))
    return lines


def _figure(figure: Figure, sides: Sequence[Side], column: int) -> Text:
    a, b = (figure.of(side) for side in sides)
    ratio = format_ratio(b / a) if figure.ratio and a and b is not None else ""
    return _row(f"  {figure.name}", [figure.text(a), figure.text(b)], ratio, column)


def _row(name: str, cells: Sequence[str], ratio: str, column: int, style: str = "") -> Text:
    text = fit(name, NAME_CELLS) + "".join(fit(cell, column) for cell in cells) + fit(ratio, RATIO_CELLS)
    return Text(text.rstrip(), style, no_wrap=True)


def _what(state: ViewState) -> str:
    return f"{state.profile} {state.mode} {state.codec}".strip() or "not started"


def _where(side: Side) -> str:
    state = side.state
    if state.stopped or not side.goes_on:
        return f"ended at {format_clock(state.since_start(state.last_at))}"
    word = "starting" if state.ready_after_s is None else "stopping" if state.stopping else "serving"
    return f"{word} {format_clock(state.since_start(side.now))}"


class CompareScreen(Screen[None]):
    """Both runs; the replay's line and the footer are the main screen's."""

    DEFAULT_CSS = """
    CompareScreen #compare { height: 1fr; border: solid $foreground 40%; }
    CompareScreen.-ascii #compare { border: ascii $foreground 40%; }
    CompareScreen #compare-bar, CompareScreen #compare-footer { height: 1; }
    """

    def __init__(self, names: Sequence[str], *, ascii_mode: bool) -> None:
        super().__init__()
        self._names = names
        self._ascii_mode = ascii_mode
        self._view = LineView(id="compare")
        self._bar = Static("", id="compare-bar", markup=False)
        self._footer = Static("", id="compare-footer", markup=False)

    def compose(self) -> ComposeResult:
        yield self._view
        yield self._bar
        yield self._footer

    def on_mount(self) -> None:
        self._view.border_title = Text("two runs, at the same time after they were ready")
        self._view.focus()

    def show_bar(self, line: Text) -> None:
        self._bar.update(line, layout=False)

    def show(self, sides: Sequence[Side], footer: Text) -> None:
        """Draw this moment."""
        width = self._view.text_width
        self._view.show(compare_lines(sides, self._names, width, ascii_mode=self._ascii_mode))
        self._footer.update(footer, layout=False)
