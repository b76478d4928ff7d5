"""A break-even document as one chart: a panel for each prompt length. Imported late: it needs matplotlib."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from console.chart_style import (
    BAND,
    FAINT,
    FORMATS,
    INK,
    MARKERS,
    SERIES,
    chart_style,
    log_axis_of_ms,
    log_axis_of_rates,
    new_figure,
    plain,
    save_chart,
    short_ms,
    short_rate,
)

_COLUMNS: Final = 3


def save_breakeven_charts(document: dict[str, Any], directory: Path) -> None:
    """breakeven.png and breakeven.svg into ``directory``. Raises OSError."""
    with chart_style():
        figure = _figure(document)
        for ending in FORMATS:
            save_chart(figure, directory / f"breakeven.{ending}")


def _figure(document: Mapping[str, Any]) -> Figure:
    lengths = [row["tokens"] for row in document["recompute"]]
    num_rows = math.ceil(len(lengths) / _COLUMNS)
    figure = new_figure(num_rows)
    panels = figure.subplots(num_rows, min(_COLUMNS, len(lengths)), squeeze=False, sharex=True).flatten()
    for index, (panel, tokens) in enumerate(zip(panels, lengths, strict=False)):
        _draw(panel, document, tokens)
        if index % _COLUMNS == 0:
            panel.set_ylabel("time after prefill, ms")
        if index + _COLUMNS >= len(lengths):
            panel.set_xlabel("link as probed, bits/s")
            panel.tick_params(labelbottom=True)
    spare = panels[len(lengths) :]
    for panel in spare:
        panel.set_axis_off()
    if len(spare):
        spare[0].legend(handles=_legend(document), loc="center left", borderaxespad=0.0)
    else:
        figure.legend(handles=_legend(document), loc="outside lower center", ncols=3)
    model, machine, judged = document["model"], document["machine"], document["forecast"]
    errors = judged["transfer_error"]
    note = (
        f"{plain(machine['cpu'])}, {machine['cores']} cores; forecast off by {errors['median']:.0%} in the median of "
        f"{errors['count']} transfers, decision right in {judged['decisions_right']} of {judged['decisions']}"
    )
    figure.suptitle(
        f"Moving KV against computing it again: {plain(model['id'])} in {document['dtype']}, "
        f"{model['kv_bytes_per_token']:,} bytes of KV per token\n{note}",
        fontsize=10.0,
    )
    return figure


def _draw(panel: Axes, document: Mapping[str, Any], tokens: int) -> None:
    again = next(row for row in document["recompute"] if row["tokens"] == tokens)["recompute_ms"]
    log_axis_of_rates(panel)
    log_axis_of_ms(panel)
    for (delivery, codec), colour, marker in _styles(document):
        points = [
            point
            for point in document["transfers"]
            if (point["delivery"], point["codec"], point["tokens"]) == (delivery, codec, tokens)
        ]
        curve = next(
            curve
            for curve in document["curves"]
            if (curve["delivery"], curve["codec"], curve["tokens"]) == (delivery, codec, tokens)
        )
        panel.plot(
            [step["bits_per_s"] for step in curve["forecast"]],
            [step["ms"] for step in curve["forecast"]],
            color=colour,
            linestyle=(0, (4, 2)),
            linewidth=0.9,
            zorder=3,
        )
        middle = [point["transfer_ms"]["median"] for point in points]
        panel.errorbar(
            [point["achieved_bits_per_s"] for point in points],
            middle,
            yerr=[
                [value - point["transfer_ms"]["p10"] for value, point in zip(middle, points, strict=True)],
                [point["transfer_ms"]["p90"] - value for value, point in zip(middle, points, strict=True)],
            ],
            color=colour,
            marker=marker,
            capsize=2.0,
            elinewidth=0.8,
            zorder=4,
        )
        _mark_crossings(panel, curve, again["median"], colour)
    panel.axhspan(again["p10"], again["p90"], color=BAND, zorder=1)
    panel.axhline(again["median"], color=INK, linewidth=1.0, zorder=2)
    panel.set_title(f"{tokens:,} tokens: computed again in {short_ms(again['median'])}", loc="left")


def _mark_crossings(panel: Axes, curve: Mapping[str, Any], again_ms: float, colour: str) -> None:
    """A ring where the measured curve meets the line, a cross where the forecast does."""
    measured, expected = curve["break_even_bits_per_s"], curve["forecast_break_even_bits_per_s"]
    low, high = curve["forecast"][0]["bits_per_s"], curve["forecast"][-1]["bits_per_s"]
    if measured is not None:
        panel.plot(
            measured,
            again_ms,
            "o",
            markersize=9.0,
            fillstyle="none",
            color=colour,
            markeredgewidth=1.4,
            zorder=6,
        )
        panel.annotate(
            short_rate(measured),
            (measured, again_ms),
            xytext=(4, 6 if curve["codec"] == "raw" else -12),
            textcoords="offset points",
            fontsize=7.0,
            color=colour,
            zorder=6,
        )
    if expected is not None and low <= expected <= high:
        panel.plot(expected, again_ms, "x", markersize=7.0, color=colour, markeredgewidth=1.4, zorder=6)


def _styles(document: Mapping[str, Any]) -> list[tuple[tuple[str, str], str, str]]:
    """(delivery, codec), colour and marker of each curve, the same in every panel."""
    keys = dict.fromkeys((curve["delivery"], curve["codec"]) for curve in document["curves"])
    return list(zip(keys, SERIES, MARKERS, strict=False))


def _legend(document: Mapping[str, Any]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=colour, marker=marker, label=f"{codec}, {_WORDS[delivery]}")
        for (delivery, codec), colour, marker in _styles(document)
    ]
    return [
        *handles,
        Line2D([], [], color=FAINT, linestyle=(0, (4, 2)), linewidth=0.9, label="forecast"),
        Line2D([], [], color=INK, linewidth=1.0, label="computed again, median"),
        Patch(color=BAND, label="computed again, p10 to p90"),
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            markersize=9.0,
            fillstyle="none",
            color=FAINT,
            label="break-even, measured",
        ),
        Line2D([], [], linestyle="", marker="x", markersize=7.0, color=FAINT, label="break-even, forecast"),
    ]


_WORDS: Final = {"bulk": "all after prefill (bulk)", "stream": "left after prefill (streamed)"}
