"""A sized trace as a page for a person: one line per split, a chart of goodput, the verdict. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotext
from rich.text import Text

from console.run_page import number

_CHART_WIDTH: Final = 78
_CHART_HEIGHT: Final = 14


def plan_trace_text(document: Mapping[str, Any]) -> str:
    """What ``sweep_document`` gives."""
    model, trace = document["model"], document["trace"]
    rows = [*document["splits"], document["colocated"]]
    lines = [
        f"model {model['id']}, {model['dtype']}; engine steps from {document['costs_from']}",
        f"trace: {trace['detail']}",
        f"limits: {document['slo']}; link {document['link']['name']}; {document['nodes']} workers",
        "",
        f"{'P:D':>13} {'TTFT p50':>9}{'p90':>9}{'p99':>9}  {'ITL p50':>8}{'p99':>8}  "
        f"{'good':>6}{'good/s':>8}  {'busy P':>6}{'D':>6}{'link':>6}",
    ]
    for row in rows:
        mark = " <" if row["name"] == document["best"] else ""
        lines.append(_line(row) + mark)
    lines.append(
        "TTFT and ITL in ms; good: requests within the limits; busy: share of the time (D: all, co-located)"
    )
    lines += ["", *goodput_chart(document["splits"], document["colocated"]), ""]
    best = next(row for row in document["splits"] if row["name"] == document["best"])
    lines.append(f"bottleneck at {best['name']}: {best['bottleneck']}")
    lines.append(f"bottleneck {document['colocated']['name']}: {document['colocated']['bottleneck']}")
    lines += ["", document["verdict"], document["when_not"]]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    ttft, itl = row["ttft_ms"], row["itl_ms"]
    is_apart = row["prefill"] > 0
    return (
        f"{row['name']:>13} {number(ttft['p50']):>9}{number(ttft['p90']):>9}{number(ttft['p99']):>9}  "
        f"{number(itl['p50']):>8}{number(itl['p99']):>8}  {row['good_share']:>6.1%}{row['goodput_per_s']:>8.3g}  "
        f"{_share(row['prefill_utilisation'], is_apart):>6}{row['decode_utilisation']:>6.0%}"
        f"{_share(row['link_utilisation'], is_apart):>6}"
    )


def _share(value: float, is_known: bool) -> str:
    return f"{value:.0%}" if is_known else "-"


def goodput_chart(splits: Sequence[Mapping[str, Any]], colocated: Mapping[str, Any]) -> list[str]:
    """Goodput over the number of prefill workers; a line for co-located ones."""
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.theme("clear")
    plotext.plot_size(_CHART_WIDTH, _CHART_HEIGHT)
    places = [row["prefill"] for row in splits]
    rates = [row["goodput_per_s"] for row in splits]
    plotext.scatter(places, rates, marker="o", label="prefill:decode")
    plotext.horizontal_line(colocated["goodput_per_s"])
    plotext.xticks(places, [row["name"] for row in splits])
    plotext.ylim(0, max(*rates, colocated["goodput_per_s"], 1e-9) * 1.1)
    plotext.title(f"good requests/s by split; line: {colocated['name']}")
    drawn = Text.from_ansi(str(plotext.build())).plain
    plotext.clear_figure()
    return [line.rstrip() for line in drawn.rstrip().split("\n")]
