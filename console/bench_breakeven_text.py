"""A break-even document as a page for a person, with a chart of characters. Pure: a document in, text out."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import plotext
from rich.text import Text

from cluster.units import format_bits_per_s
from console.run_page import number
from console.text_format import clean

_CHART_WIDTH: Final = 100
_CHART_HEIGHT: Final = 22
_MEASURED: Final = {
    ("bulk", "raw"): "o",
    ("bulk", "int8"): "x",
    ("stream", "raw"): "*",
    ("stream", "int8"): "+",
}
_MARGIN: Final = 0.05
_WRONG_SHOWN: Final = 6


def breakeven_text(document: dict[str, Any], *, chart: bool = True) -> str:
    """Sections apart by a blank line. ``document``: see ``breakeven_document``."""
    sections = [
        _head(document),
        *(_transfers(document, delivery) for delivery in document["runs"]),
        _crossings(document),
        _chart(document) if chart else [],
        _forecast(document),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(document: Mapping[str, Any]) -> list[str]:
    machine, model, versions = document["machine"], document["model"], document["versions"]
    backends = ", ".join(dict.fromkeys(link["backend"] for link in document["links"]))
    repeats = f"{document['repeats']} repeat{'' if document['repeats'] == 1 else 's'}"
    runs = ", ".join(f"{name} ({delivery})" for delivery, name in document["runs"].items())
    return [
        f"moving KV against computing it again: {clean(model['id'])} in {document['dtype']}, "
        f"{model['kv_bytes_per_token']:,} bytes of KV per token, links by {backends}",
        f"{clean(machine['cpu']) or 'unknown CPU'}: {' '.join(machine['flags'])}; {machine['cores']} cores, "
        f"load {machine['load_average']:g} at start",
        f"pdconsole {versions['pdconsole']}, torch {versions['torch']}, Python {versions['python']}, "
        f"{machine['system']}",
        f"{repeats}, each in its own request on an idle cluster; medians. The events: runs {runs}",
    ]


def _transfers(document: Mapping[str, Any], delivery: str) -> list[str]:
    what = {
        "bulk": "BULK: all KV goes when the prompt is computed. ms from its first frame to its acknowledgement",
        "stream": "STREAMED: KV goes while the prompt is computed. ms from the end of prefill to its acknowledgement",
    }[delivery]
    points = [point for point in document["transfers"] if point["delivery"] == delivery]
    codecs = list(dict.fromkeys(point["codec"] for point in points))
    columns = "".join(f"{codec:>10}{'p10 - p90':>17}{'forecast':>10}{'off':>7}" for codec in codecs)
    lines = [what, f"{'LINK asked':<13}{'achieved':>11}{'tokens':>8}{'again':>9}{columns}"]
    again_ms = {row["tokens"]: row["recompute_ms"]["median"] for row in document["recompute"]}
    keys = dict.fromkeys((point["asked_bits_per_s"], point["tokens"]) for point in points)
    last = None
    for asked, tokens in keys:
        row = [point for point in points if (point["asked_bits_per_s"], point["tokens"]) == (asked, tokens)]
        link = "" if asked == last else format_bits_per_s(asked)
        achieved = "" if asked == last else format_bits_per_s(row[0]["achieved_bits_per_s"])
        last = asked
        cells = "".join(_cells(point) for point in row)
        lines.append(f"{link:<13}{achieved:>11}{tokens:>8,}{number(again_ms[tokens]):>9}{cells}".rstrip())
    return [
        *lines,
        "! moving took longer than computing again;  off: how far the forecast was from the median",
    ]


def _cells(point: Mapping[str, Any]) -> str:
    took = point["transfer_ms"]
    mark = " " if point["pays"] else "!"
    spread = f"{number(took['p10'])} - {number(took['p90'])}"
    return (
        f"{number(took['median']):>9}{mark}{spread:>17}{number(point['forecast_ms']):>10}"
        f"{_percent(point['error']):>7}"
    )


def _crossings(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "BREAK-EVEN: the link from which on moving is faster than computing again",
        f"{'':<10}{'tokens':>8}{'codec':>8}{'measured':>24}{'forecast':>15}{'off':>8}",
    ]
    slowest, fastest = (f(link["achieved_bits_per_s"] for link in document["links"]) for f in (min, max))
    for curve in document["curves"]:
        measured = {
            "": format_bits_per_s(curve["break_even_bits_per_s"] or 0.0),
            "below": f"below {format_bits_per_s(slowest)}",
            "above": f"above {format_bits_per_s(fastest)}",
        }[curve["break_even_side"]]
        forecast = curve["forecast_break_even_bits_per_s"]
        error = curve["break_even_error"]
        lines.append(
            f"{curve['delivery']:<10}{curve['tokens']:>8,}{curve['codec']:>8}{measured:>24}"
            f"{'no link' if forecast is None else format_bits_per_s(forecast):>15}"
            f"{'' if error is None else _percent(error):>8}".rstrip()
        )
    return lines


def _forecast(document: Mapping[str, Any]) -> list[str]:
    judged, inputs = document["forecast"], document["inputs"]
    lengths = ", ".join(f"{row['tokens']:,}" for row in inputs["prefill"])
    codecs = "; ".join(
        f"{name} {number(rate['encode_bytes_per_s'] / 1e9)} GB/s encoded, "
        f"{number(rate['decode_bytes_per_s'] / 1e9)} decoded, {rate['ratio']:.3f} of raw"
        for name, rate in inputs["codecs"].items()
    )
    lines = [
        "FORECAST by the planner from the probed links, prefill alone on a core at "
        f"{lengths} tokens{'; ' if codecs else ''}{codecs}"
    ]
    for name, what in (
        ("transfer_error", "transfer"),
        ("recompute_error", "computing again"),
        ("break_even_error", "break-even link"),
    ):
        errors = judged[name]
        if errors["count"]:
            lines.append(
                f"  {what:<16} off by {errors['median'] * 100:.0f} % in the median, "
                f"{errors['p90'] * 100:.0f} % at p90, {errors['max'] * 100:.0f} % at worst "
                f"of {errors['count']}; leans {_percent(errors['lean'])}"
            )
    right, count = judged["decisions_right"], judged["decisions"]
    lines.append(f"  {'decision':<16} right in {right} of {count}{_wrong(judged['wrong_decisions'])}")
    return lines


def _wrong(decisions: Sequence[Mapping[str, Any]]) -> str:
    named = [
        f"{row['delivery']} {row['codec']} {row['tokens']:,} tokens at {format_bits_per_s(row['asked_bits_per_s'])}"
        for row in decisions[:_WRONG_SHOWN]
    ]
    more = len(decisions) - len(named)
    return f"; wrong: {', '.join(named)}{f' and {more} more' if more else ''}" if named else ""


def _chart(document: Mapping[str, Any]) -> list[str]:
    """The longest prompt: measured points, and the crossing of each curve with the time to compute again."""
    tokens = max(curve["tokens"] for curve in document["curves"])
    again_ms = next(row["recompute_ms"]["median"] for row in document["recompute"] if row["tokens"] == tokens)
    points = [point for point in document["transfers"] if point["tokens"] == tokens]
    rates = [point["achieved_bits_per_s"] for point in points]
    times = [point["transfer_ms"]["median"] for point in points] + [again_ms]
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.theme("clear")
    plotext.plot_size(_CHART_WIDTH, _CHART_HEIGHT)
    for (delivery, codec), marker in _MEASURED.items():
        own = [point for point in points if (point["delivery"], point["codec"]) == (delivery, codec)]
        if own:
            plotext.scatter(
                [math.log10(point["achieved_bits_per_s"]) for point in own],
                [math.log10(point["transfer_ms"]["median"]) for point in own],
                marker=marker,
                label=f"{codec} {delivery}",
            )
    plotext.horizontal_line(math.log10(again_ms))
    for curve in document["curves"]:
        crossing = curve["break_even_bits_per_s"]
        if curve["tokens"] == tokens and crossing is not None:
            plotext.text("X", math.log10(crossing), math.log10(again_ms))
    for axis, values, unit in ((plotext.xticks, rates, _rate), (plotext.yticks, times, _ms)):
        places = _decades(values)
        axis([math.log10(place) for place in places], [unit(place) for place in places])
    plotext.xlim(math.log10(min(rates)) - _MARGIN, math.log10(max(rates)) + _MARGIN)
    plotext.ylim(math.log10(min(times)) - _MARGIN, math.log10(max(times)) + _MARGIN)
    plotext.xlabel("link, bits per second")
    title = (
        f"{tokens:,} tokens: ms after prefill; line: computed again ({number(again_ms)} ms); X: break-even"
    )
    plotext.title(title)
    drawn = Text.from_ansi(str(plotext.build())).plain
    plotext.clear_figure()
    return [line.rstrip() for line in drawn.rstrip().split("\n")]


def _decades(values: Iterable[float]) -> list[float]:
    """Powers of ten among the values, and the smallest and largest of these where that gives fewer than two."""
    known = list(values)
    low, high = math.ceil(math.log10(min(known))), math.floor(math.log10(max(known)))
    places = [10.0**power for power in range(low, high + 1)]
    return places if len(places) > 1 else [min(known), max(known)]


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.3g}G" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g}M"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _percent(share: float) -> str:
    return f"{share * 100:+.0f} %"
