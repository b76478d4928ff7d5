"""A run as one picture: ITL over time with what was done, TTFT by its parts, KV on the wire, distributions.

Imported late: it needs matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.request_timeline import TTFT_PARTS
from console.chart_style import (
    BAND,
    FAINT,
    INK,
    SERIES,
    WIDTH_IN,
    chart_style,
    new_figure,
    plain,
    save_chart,
    short_ms,
    svg_of,
)
from console.run_chart_data import ChartData, transfer_rate

_BINS: Final = 120
_KEY_PT: Final = 7.0
_KEY_LINES: Final = 2
_KEY_ENTRY: Final = 46
_KEY_GAP: Final = "   "
_KEY_COLUMNS: Final = int((WIDTH_IN - 1.0) * 72 / (_KEY_PT * 0.58))
"""Of the panel's width in points, at an average letter's width; the inch is the axis' numbers and margins."""
_LEAST_MS: Final = 0.1  # tokens that came together have no gap, and a logarithm no zero
_MOST_BARS: Final = 60  # requests of their own; more are drawn as means of neighbours in order of arrival
_PART_COLOURS: Final = ("#999999", SERIES[0], SERIES[1], SERIES[3], SERIES[2], SERIES[4], INK)
_HATCHES: Final = ("", "", "//", "", "..", "", "xx")  # so that parts are told apart without colour


def save_run_chart(data: ChartData, path: Path) -> None:
    """Raises OSError, and ValueError for an ending that is no picture's."""
    with chart_style():
        save_chart(_figure(data), path)


def run_chart_svg(data: ChartData) -> bytes:
    with chart_style():
        return svg_of(_figure(data))


def comparison_svg(runs: Sequence[ChartData]) -> bytes:
    """Distributions of TTFT and ITL of several runs in one picture."""
    with chart_style():
        figure = new_figure(1)
        left, right = figure.subplots(1, 2)
        for index, run in enumerate(runs):
            look = {
                "color": SERIES[index % len(SERIES)],
                "linestyle": ("-", "--", ":", "-.")[index // len(SERIES) % 4],
            }
            _distribution(
                left, [each.ttft_ms for each in run.finished if each.ttft_ms is not None], run.run, look
            )
            _distribution(right, run.gap_ms, run.run, look)
        for panel, title in ((left, "TTFT"), (right, "ITL")):
            _finish_distribution(panel, title)
        return svg_of(figure)


def _figure(data: ChartData) -> Figure:
    figure = new_figure(3)
    grid = figure.add_gridspec(3, 2)
    _itl(figure.add_subplot(grid[0, :]), data)
    _ttft(figure.add_subplot(grid[1, :]), data)
    _rate(figure.add_subplot(grid[2, 0]), data)
    spread = figure.add_subplot(grid[2, 1])
    ttfts = [each.ttft_ms for each in data.finished if each.ttft_ms is not None]
    _distribution(spread, ttfts, "TTFT", {"color": SERIES[1], "linestyle": "--"})
    _distribution(spread, data.gap_ms, "ITL", {"color": SERIES[0], "linestyle": "-"})
    _finish_distribution(spread, "how many were as fast or faster")
    figure.suptitle(
        f"{plain(data.run)}: {plain(str(data.summary['model']))}, {plain(str(data.summary['mode']))}, "
        f"profile {plain(str(data.summary['profile']))}, {len(data.finished):,} requests finished",
        fontsize=11.0,
    )
    return figure


def _itl(panel: Axes, data: ChartData) -> None:
    panel.set_title(f"gaps between tokens (ITL); below {_LEAST_MS:g} ms drawn at {_LEAST_MS:g}")
    panel.set_ylabel("ms")
    panel.set_xlabel("seconds from the run's start")
    panel.set_xlim(0.0, data.duration_s or 1.0)
    if data.gap_ms:
        at, gaps = np.array(data.gap_at_s), np.array(data.gap_ms)
        bins = np.minimum((at / (data.duration_s or 1.0) * _BINS).astype(int), _BINS - 1)
        used = np.unique(bins)
        middle = (used + 0.5) / _BINS * data.duration_s
        parts = [gaps[bins == index] for index in used]
        panel.set_yscale("log")
        for share, colour, style in ((50, SERIES[0], "-"), (99, SERIES[1], "--")):
            line = [max(_LEAST_MS, float(np.percentile(part, share))) for part in parts]
            panel.plot(middle, line, color=colour, linestyle=style, label=f"p{share}")
        worst = [float(part.max()) for part in parts]
        panel.plot(middle, worst, color=FAINT, linestyle="none", marker=".", label="largest")
        panel.yaxis.set_major_formatter(lambda value, _: short_ms(value).removesuffix(" ms"))
        panel.set_ylim(_LEAST_MS * 0.9, 8 * max(worst))
        panel.legend(loc="upper left", ncols=3)
    else:
        _nothing(panel, "no request with two tokens finished")
    _draw_marks(panel, data)


def _draw_marks(panel: Axes, data: ChartData) -> None:
    """A line and a letter for everything that was done; the first of each letter is spelt out below the panel."""
    told: dict[str, str] = {}
    for mark in data.marks:
        panel.axvline(mark.at, color=FAINT, linewidth=0.7, linestyle=(0, (2, 2)), zorder=1)
        panel.annotate(
            mark.letter,
            (mark.at, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=7.0,
        )
        told.setdefault(mark.letter, mark.text)
    if told:
        panel.annotate(
            "\n".join(mark_key_lines(told)),
            (0.0, 0.0),
            xytext=(0.0, -32.0),  # below the numbers and the name of the axis
            xycoords="axes fraction",
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=_KEY_PT,
        )


def mark_key_lines(told: dict[str, str]) -> list[str]:
    """What the letters stand for, in at most _KEY_LINES lines as wide as the panel; what finds no room is left out."""
    lines: list[str] = []
    for letter, text in told.items():
        entry = f"{letter}: {shorten(plain(text), _KEY_ENTRY, placeholder=' ...')}"
        if lines and len(lines[-1]) + len(_KEY_GAP) + len(entry) <= _KEY_COLUMNS:
            lines[-1] += _KEY_GAP + entry
        elif len(lines) < _KEY_LINES:
            lines.append(entry)
        else:
            break
    return lines


def _ttft(panel: Axes, data: ChartData) -> None:
    requests = [each for each in data.finished if each.ttft_parts_ms]
    panel.set_ylabel("ms")
    if not requests:
        panel.set_title("TTFT by its parts")
        _nothing(panel, "no request finished")
        return
    groups = np.array_split(np.arange(len(requests)), min(len(requests), _MOST_BARS))
    many = len(requests) > _MOST_BARS
    panel.set_title(
        "TTFT by its parts" + (f", means of {len(groups)} groups in order of arrival" if many else "")
    )
    panel.set_xlabel("requests in order of arrival")
    base = np.zeros(len(groups))
    for part, colour, hatch in zip(TTFT_PARTS, _PART_COLOURS, _HATCHES, strict=True):
        heights = np.array(
            [
                float(np.mean([max(0.0, requests[index].ttft_parts_ms.get(part, 0.0)) for index in group]))
                for group in groups
            ]
        )
        panel.bar(
            np.arange(len(groups)), heights, 0.85, bottom=base, color=colour, hatch=hatch, edgecolor="white",
            linewidth=0.0, label=part.replace("_", " "),
        )  # fmt: skip
        base += heights
    panel.set_xticks([])
    panel.grid(visible=False, axis="x")
    panel.legend(loc="upper left", ncols=len(TTFT_PARTS), fontsize=7.0)
    panel.set_ylim(0.0, float(base.max()) * 1.25 or 1.0)


def _rate(panel: Axes, data: ChartData) -> None:
    panel.set_title("KV on the wire")
    panel.set_ylabel("MB/s")
    panel.set_xlabel("seconds from the run's start")
    panel.set_xlim(0.0, data.duration_s or 1.0)
    if not data.transfers:
        _nothing(panel, "no KV was moved")
        return
    edges, rates = transfer_rate(data, _BINS)
    panel.stairs([rate / 1e6 for rate in rates], edges, color=SERIES[2], fill=True, alpha=0.55, label="moved")
    steps = [*data.asked, (data.duration_s, data.asked[-1][1])] if data.asked else []
    if steps and any(rate for _, rate in steps):
        values = [rate / 1e6 or np.nan for _, rate in steps]
        panel.step(
            [at for at, _ in steps],
            values,
            where="post",
            color=INK,
            linestyle="--",
            label="asked of the link",
        )
        panel.set_yscale("symlog", linthresh=1.0)
        panel.set_ylim(top=20 * max(rate / 1e6 for _, rate in steps))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panel.set_ylim(bottom=0.0)
    panel.legend(loc="upper left", ncols=2)


def _distribution(panel: Axes, values: Sequence[float], label: str, look: dict[str, str]) -> None:
    if values:
        ordered = np.sort(np.asarray(values))
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        panel.step(ordered, shares, where="post", label=plain(label), **look)  # type: ignore[arg-type]


def _finish_distribution(panel: Axes, title: str) -> None:
    panel.set_title(title)
    panel.set_xlabel("ms")
    panel.set_ylabel("share")
    panel.set_ylim(0.0, 1.02)
    if not panel.lines:
        _nothing(panel, "nothing was measured")
        return
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: short_ms(value).removesuffix(" ms"))
    for share in (0.5, 0.9, 0.99):
        panel.axhline(share, color=BAND, linewidth=0.8, zorder=1)
    panel.legend(loc="lower right", fontsize=7.0)


def _nothing(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color=FAINT)
