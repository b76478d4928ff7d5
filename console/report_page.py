"""Several runs side by side as one HTML page without a script and without a link to anything outside it."""

import base64
import html
from collections.abc import Callable, Sequence
from typing import Any, Final

from cluster.units import format_bits_per_s, format_bytes
from console.run_chart import comparison_svg, run_chart_svg
from console.run_chart_data import ChartData

_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: 1em 0; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 8px; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
tr.part th { text-align: left; background: #f3f3f3; }
td.best { font-weight: bold; } td.best::after { content: " \\2713"; color: #0072B2; }
img { width: 100%; height: auto; } p.note { color: #666; }
"""

Value = float | int | str | None


class _Row:
    """One line of the table. ``better``: -1 where the smallest value is the best, 1 where the largest is, 0 neither."""

    def __init__(
        self, name: str, read: Callable[[dict[str, Any]], Value], unit: str = "", better: int = 0
    ) -> None:
        self.name, self.read, self.unit, self.better = name, read, unit, better


def _latency(key: str, name: str) -> list[_Row]:
    def reader(q: str) -> Callable[[dict[str, Any]], Value]:
        return lambda summary: summary[key][q]

    return [_Row(f"{name} {q}", reader(q), "ms", -1) for q in ("p50", "p90", "p99", "max")]


_SECTIONS: Final[tuple[tuple[str, list[_Row]], ...]] = (
    (
        "what ran",
        [
            _Row("profile", lambda s: s["profile"]),
            _Row("model", lambda s: s["model"]),
            _Row("dtype", lambda s: s["dtype"]),
            _Row("modes", lambda s: ", ".join(s["modes"])),
            _Row("codecs", lambda s: ", ".join(s["codecs"])),
            _Row("serving time", lambda s: s["duration_s"], "s"),
        ],
    ),
    (
        "requests",
        [
            _Row("finished", lambda s: s["requests"]["finished"]),
            _Row("failed", lambda s: s["requests"]["failed"], "", -1),
            _Row("rejected", lambda s: s["requests"]["rejected"], "", -1),
            _Row("retried", lambda s: s["requests"]["retried"]),
            _Row("migrated", lambda s: s["requests"]["migrated"]),
            _Row("fell back", lambda s: sum(s["requests"]["fallbacks"].values())),
            _Row("output tokens", lambda s: s["throughput"]["output_tokens_per_s"], "/s", 1),
            _Row("prompt tokens", lambda s: s["throughput"]["prompt_tokens_per_s"], "/s", 1),
        ],
    ),
    (
        "latency of finished requests",
        [*_latency("ttft_ms", "TTFT"), *_latency("itl_ms", "ITL"), *_latency("tpot_ms", "TPOT")],
    ),
    (
        "KV and link",
        [
            _Row("transfers", lambda s: s["kv"]["transfers"]),
            _Row("KV moved", lambda s: s["kv"]["wire_bytes"], "bytes"),
            _Row("exposed p99", lambda s: s["kv"]["exposed_ms"]["p99"], "ms", -1),
            _Row("backend", lambda s: s["link"]["backend"]),
            _Row("asked", lambda s: s["link"]["asked_bits_per_s"], "bits/s"),
            _Row("achieved", lambda s: s["link"]["achieved_bits_per_s"], "bits/s"),
            _Row("rho", lambda s: s["rho"]),
        ],
    ),
)


def render_report(runs: Sequence[ChartData]) -> str:
    """One page. Everything that comes from a log is escaped."""
    names = [html.escape(run.run) for run in runs]
    body = [f"<h1>{' and '.join(names)}</h1>", _table(runs)]
    body.append(
        '<p class="note">&#10003; the best of a row where one is better. Runs differ in more than one thing unless '
        "you made them differ in one: read &ldquo;what ran&rdquo; first. Definitions: docs/metrics.md of pdconsole.</p>"
    )
    if len(runs) > 1:
        body.append(
            "<h2>distributions</h2>" + _picture(comparison_svg(runs), "distributions of TTFT and ITL")
        )
    for run, name in zip(runs, names, strict=True):
        body.append(f"<h2>{name}</h2>" + _picture(run_chart_svg(run), f"charts of run {name}"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{' and '.join(names)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _table(runs: Sequence[ChartData]) -> str:
    lines = ["<table><tr><th></th>" + "".join(f"<th>{html.escape(run.run)}</th>" for run in runs) + "</tr>"]
    for title, rows in _SECTIONS:
        lines.append(f'<tr class="part"><th colspan="{len(runs) + 1}">{title}</th></tr>')
        for row in rows:
            values = [row.read(run.summary) for run in runs]
            best = _best(values, row.better)
            cells = "".join(
                f"<td{' class=best' if value is not None and value == best else ''}>{_text(value, row.unit)}</td>"
                for value in values
            )
            lines.append(f"<tr><td>{row.name}</td>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _best(values: Sequence[Value], better: int) -> float | None:
    """The best of at least two values that differ."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not better or len(set(numbers)) < 2:
        return None
    return max(numbers) if better > 0 else min(numbers)


def _text(value: Value, unit: str) -> str:
    if value is None:
        return "&ndash;"
    if isinstance(value, str):
        return html.escape(value)
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "bits/s":
        return format_bits_per_s(value)
    digits = f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    return f"{digits} {unit}".rstrip()


def _picture(svg: bytes, label: str) -> str:
    data = base64.b64encode(svg).decode()
    return f'<img alt="{label}" src="data:image/svg+xml;base64,{data}">'
