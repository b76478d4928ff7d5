"""Charts of latency and KV rate: plotext where there is room, one line of blocks where there is not.

plotext keeps one figure for the whole process, so every chart clears it, draws and takes the text away at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import plotext
from rich.text import Text

from console.palette import BAD, GOOD, MARK, WARN, rgb
from console.series import BucketSeries, ColumnGrid, Mark
from console.text_format import block_strip, fit, format_megabytes_per_s, format_ms, format_short_ms
from console.view_state import ViewState

WINDOW_S: Final = 120.0
PERCENTILE_WINDOW_S: Final = 10.0
AXIS_CELLS: Final = 5
"""Width of the y axis' numbers, fixed so that the plot does not move sideways when the scale changes."""

_TO_ASCII: Final = str.maketrans("┌┐└┘├┤┬┴┼─│", "++++++++++|", "")
_MARK_ORDER: Final = "KfRgb"
"""Letters that win where several marks fall into one column, the strongest first."""
_NICE: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Curve:
    values: list[float | None]
    colour: str


@dataclass(frozen=True, slots=True)
class ChartData:
    """One chart: what is drawn and how its title and strip name the numbers. Values share one unit."""

    name: str
    title: str
    now_text: str
    top_text: str
    grid: ColumnGrid
    curves: tuple[Curve, ...]
    marks: Sequence[Mark]

    @property
    def top(self) -> float:
        return max((v for curve in self.curves for v in curve.values if v is not None), default=0.0)


def itl_chart(state: ViewState, now: float, num_columns: int) -> ChartData:
    """Gaps between tokens in ms, p50 and p99 of each column."""
    return _latency_chart("ITL ms", state.requests.itl_ms, state, now, num_columns, scale=1.0)


def ttft_chart(state: ViewState, now: float, num_columns: int) -> ChartData:
    """Time to first token in s, p50 and p99 of each column."""
    return _latency_chart("TTFT s", state.requests.ttft_ms, state, now, num_columns, scale=1000.0)


def kv_chart(state: ViewState, now: float, num_columns: int) -> ChartData:
    """KV payload on the wire in MB/s, mean of each column."""
    grid = ColumnGrid(now, WINDOW_S, num_columns)
    rates = [None if rate is None else rate / 1e6 for rate in state.requests.kv_bytes.rates(grid)]
    current = state.requests.kv_bytes.total(now, 2.0) / 2.0
    link = state.link_bytes_per_s
    link_text = f"link {format_megabytes_per_s(link)}" if link is not None else "link not limited"
    return ChartData(
        name="KV MB/s",
        title=f"KV MB/s  now {format_megabytes_per_s(current):>6}  {link_text}",
        now_text=format_megabytes_per_s(current),
        top_text=link_text,
        grid=grid,
        curves=(Curve(rates, GOOD),),
        marks=_marks(state),
    )


def _latency_chart(
    name: str, series: BucketSeries, state: ViewState, now: float, num_columns: int, *, scale: float
) -> ChartData:
    grid = ColumnGrid(now, WINDOW_S, num_columns)
    p50, p99 = series.percentiles(now, PERCENTILE_WINDOW_S, 0.5, 0.99)
    upper = [None if v is None else v / scale for v in series.columns(grid, 0.99)]
    lower = [None if v is None else v / scale for v in series.columns(grid, 0.5)]
    top_ms = max((v for v in upper if v is not None), default=0.0) * scale
    return ChartData(
        name=name.replace(" ", " p99 "),
        title=f"{name}  p50 {format_ms(p50):>7}  p99 {format_ms(p99):>7}  last 10 s",
        now_text=format_short_ms(p99) if scale == 1.0 else _seconds(p99),
        top_text=f"max {format_ms(top_ms) if top_ms else '-'}",
        grid=grid,
        curves=(Curve(upper, WARN), Curve(lower, GOOD)),
        marks=_marks(state),
    )


def _marks(state: ViewState) -> list[Mark]:
    """The strongest last, so that it is drawn over the others."""
    return sorted(state.marks, key=lambda mark: -(_MARK_ORDER.find(mark.letter) % 99))


def strip_line(chart: ChartData, width: int, *, ascii_mode: bool) -> Text:
    """The chart's first curve in one line of exactly ``width`` cells, marks as letters in it."""
    label, tail = (
        f" {fit(chart.name, 10)} {fit(chart.now_text, 5, right=True)} ",
        f" {fit(chart.top_text, 13)}",
    )
    room = width - len(label) - len(tail) - 2
    if room < 1:
        return Text(fit(label, width))
    values = chart.curves[0].values[-room:]
    cells = list(block_strip(values, chart.top, ascii_mode=ascii_mode).rjust(room))
    line = Text(label + "|", no_wrap=True)
    offset = room - len(values)
    dropped = len(chart.curves[0].values) - len(values)
    marked: set[int] = set()
    for mark in chart.marks:
        column = chart.grid.column_of(mark.at)
        if column is not None and column >= dropped:
            cells[offset + column - dropped] = mark.letter
            marked.add(offset + column - dropped)
    for position, cell in enumerate(cells):
        line.append(cell, MARK if position in marked else GOOD)
    line.append("|" + tail)
    return line


def strip_columns(width: int) -> int:
    """How many columns :func:`strip_line` of that width has room for."""
    return max(width - 18 - 14 - 2, 1)


def plot_chart(chart: ChartData, width: int, height: int, *, ascii_mode: bool) -> Text:
    """The chart as exactly ``height`` lines of ``width`` cells (at least 20 x 5)."""
    top = _nice_top(chart.top)
    plotext.clear_figure()
    plotext.limit_size(False, False)  # the real terminal's size is not this chart's
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.clear_data()
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    ages = chart.grid.ages()
    marker = "*" if ascii_mode else "braille"
    for curve in chart.curves:
        points = [(age, value) for age, value in zip(ages, curve.values, strict=True) if value is not None]
        if points:
            plotext.plot(
                [age for age, _ in points],
                [min(value, top) for _, value in points],
                marker=marker,
                color=rgb(curve.colour),
            )
    if not any(value is not None for curve in chart.curves for value in curve.values):
        plotext.plot([-WINDOW_S], [0.0], marker=" ")  # without a point there would be no axes
    for mark in chart.marks:
        column = chart.grid.column_of(mark.at)
        if column is not None:
            colour = rgb(BAD if mark.letter == "K" else MARK)
            plotext.vertical_line(ages[column], color=colour)
            plotext.text(mark.letter, ages[column], top, color=colour)
    plotext.xlim(-WINDOW_S, 0.0)
    plotext.ylim(0.0, top)
    plotext.xticks([-120.0, -90.0, -60.0, -30.0, 0.0], ["-120s", "-90", "-60", "-30", "now"])
    plotext.yticks(
        [0.0, top / 2, top], [f"{value:g}"[:AXIS_CELLS].rjust(AXIS_CELLS) for value in (0.0, top / 2, top)]
    )
    built = Text.from_ansi(str(plotext.build()), no_wrap=True)
    lines = built.split("\n")[:height]
    if ascii_mode:
        lines = [_ascii_line(line) for line in lines]
    return Text("\n").join(lines)


def _ascii_line(line: Text) -> Text:
    plain = line.plain.translate(_TO_ASCII)
    return Text(plain, spans=line.spans, no_wrap=True)


def _nice_top(value: float) -> float:
    """The next round number at or above ``value``, for the axis; 1 for an empty chart."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in _NICE if power * step >= value * 0.999999)


def _seconds(value_ms: float | None) -> str:
    return (
        "-"
        if value_ms is None
        else f"{value_ms / 1000:.2f}"
        if value_ms < 9_995
        else f"{value_ms / 1000:.0f}"
    )
