"""An interference document as one chart: the streams' gaps of each arm, and what each arm cost. Imported late: it needs
matplotlib.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from cluster.interference_bench_report import CURVE_SHARES
from cluster.interference_bench_verdict import figure
from console.chart_style import (
    FAINT,
    FORMATS,
    INK,
    MARKERS,
    SERIES,
    chart_style,
    new_figure,
    plain,
    save_chart,
    short_ms,
)

_LEAST_MS: Final = 0.1  # tokens that came together have no gap, and a logarithm no zero
_BARS: Final = (
    ("TTFT of burst prompts, p50", ("bursts", "prompt_ttft_ms", "p50"), True),
    ("TTFT of short prompts in bursts, p50", ("bursts", "burst_ttft_ms", "p50"), True),
    ("all tokens/s a core beside bursts", ("bursts", "tokens_per_s_per_core"), False),
)
"""Title, figure, and whether it counts milliseconds."""


def save_interference_charts(document: Mapping[str, Any], directory: Path) -> None:
    """interference.png and interference.svg into ``directory``. Raises OSError."""
    with chart_style():
        drawn = _figure(document)
        for ending in FORMATS:
            save_chart(drawn, directory / f"interference.{ending}")


def _figure(document: Mapping[str, Any]) -> Figure:
    arms, model, work = document["arms"], document["model"], document["workload"]
    drawn = new_figure(2)
    grid = drawn.add_gridspec(2, 6)
    alone = drawn.add_subplot(grid[0, :3])
    beside = drawn.add_subplot(grid[0, 3:], sharex=alone, sharey=alone)
    _gaps(alone, arms, "alone", "streams alone: gaps between tokens")
    _gaps(beside, arms, "in_burst", "in bursts")
    alone.set_ylabel("share of the streams' time in longer gaps")
    below = [drawn.add_subplot(grid[1, 2 * column : 2 * column + 2]) for column in range(len(_BARS))]
    for panel, (title, path, is_ms) in zip(below, _BARS, strict=True):
        _bars(panel, arms, title, path, is_ms=is_ms)
    looks = [
        Line2D([], [], color=colour, marker=marker, label=plain(arm["name"]))
        for arm, colour, marker in zip(arms, _cycle(SERIES, arms), _cycle(MARKERS, arms), strict=True)
    ]
    drawn.legend(handles=looks, loc="outside lower center", ncols=3)
    drawn.suptitle(
        f"{work['streams']} streams beside bursts of {work['burst_prompts']} x {work['burst_prompt_tokens']:,} tokens: "
        f"{plain(model['id'])} in {document['dtype']}, {document['workers']['cores']} cores",
        fontsize=11.0,
    )
    machine, rounds = document["machine"], document["repeats"]
    below[1].set_xlabel(
        f"{plain(machine['cpu'])}, load {machine['load_average']:g} at start; gaps of {rounds} "
        f"round{'' if rounds == 1 else 's'} pooled; bars: median, smallest and largest round",
        fontsize=8.0,
        color=FAINT,
    )
    return drawn


def _gaps(panel: Axes, arms: Sequence[Mapping[str, Any]], curve: str, title: str) -> None:
    panel.set_title(title)
    panel.set_xscale("log")
    panel.set_ylim(-0.03, 1.03)
    panel.xaxis.set_major_formatter(lambda value, _: short_ms(value))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for arm, colour, marker in zip(arms, _cycle(SERIES, arms), _cycle(MARKERS, arms), strict=True):
        if gaps := [max(_LEAST_MS, gap) for gap in arm["curves"][curve]]:  # else nothing was measured
            panel.plot(gaps, CURVE_SHARES, color=colour, marker=marker)


def _bars(
    panel: Axes, arms: Sequence[Mapping[str, Any]], title: str, path: tuple[str, ...], *, is_ms: bool
) -> None:
    panel.set_title(title)
    panel.set_xticks([])
    panel.set_xlim(-0.6, len(arms) - 0.4)
    if is_ms:
        panel.yaxis.set_major_formatter(lambda value, _: short_ms(value))
    for place, (arm, colour) in enumerate(zip(arms, _cycle(SERIES, arms), strict=True)):
        spread = figure(arm, path)
        if spread is None:
            panel.annotate("-", (place, 0.0), ha="center", va="bottom")
            continue
        middle = spread["median"]
        panel.bar(place, middle, color=colour, width=0.8, zorder=3)
        panel.errorbar(
            place,
            middle,
            yerr=[[middle - spread["min"]], [spread["max"] - middle]],
            color=INK,
            capsize=2.0,
            elinewidth=0.8,
            zorder=4,
        )
        panel.annotate(
            short_ms(middle) if is_ms else f"{middle:,.0f}",
            (place, spread["max"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7.0,
        )
    panel.margins(y=0.15)


def _cycle(values: Sequence[str], arms: Sequence[object]) -> list[str]:
    return [values[index % len(values)] for index in range(len(arms))]
