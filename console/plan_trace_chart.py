"""A sized trace as one chart: goodput and latencies over the split. Imported late: it needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from console.chart_style import (
    FAINT,
    INK,
    MARKERS,
    SERIES,
    chart_style,
    log_axis_of_ms,
    new_figure,
    plain,
    save_chart,
)

_TITLE_CHARS: Final = 130


def save_plan_chart(document: Mapping[str, Any], path: Path) -> None:
    """PNG or SVG by the ending. Raises OSError, and ValueError for another ending."""
    splits, mixed = document["splits"], document["colocated"]
    places = list(range(len(splits)))
    names = [split["name"] for split in splits]
    with chart_style():
        figure = new_figure(2)
        goodput, latency = figure.subplots(2, 1, sharex=True)
        goodput.plot(
            places,
            [split["goodput_per_s"] for split in splits],
            color=SERIES[0],
            marker=MARKERS[0],
            label="prefill:decode",
        )
        goodput.axhline(mixed["goodput_per_s"], color=INK, linewidth=1.0, label=mixed["name"])
        goodput.set_ylabel("good requests per s")
        goodput.set_ylim(bottom=0)
        goodput.legend()
        log_axis_of_ms(latency)
        curves = (
            ("ttft_ms", "p50", "TTFT p50"),
            ("ttft_ms", "p90", "TTFT p90"),
            ("itl_ms", "p99", "ITL p99"),
        )
        for (field, q, label), colour, marker in zip(curves, SERIES, MARKERS, strict=False):
            latency.plot(
                places, [split[field][q] for split in splits], color=colour, marker=marker, label=label
            )
            if mixed[field][q] is not None:
                latency.axhline(mixed[field][q], color=colour, linestyle=(0, (4, 2)), linewidth=0.9)
        latency.plot([], [], color=FAINT, linestyle=(0, (4, 2)), linewidth=0.9, label=mixed["name"])
        latency.set_ylabel("ms")
        latency.set_xlabel("prefill:decode workers")
        latency.set_xticks(places, names)
        latency.legend()
        title = f"{document['nodes']} workers, {document['slo']}: {document['trace']['detail']}"
        lines = [line for text in (title, document["verdict"]) for line in wrap(plain(text), _TITLE_CHARS)]
        figure.suptitle("\n".join(lines), fontsize=9.0)
        save_chart(figure, path)
