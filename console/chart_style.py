"""How every saved chart looks: colours, sizes, axes with units. Whoever draws imports this module late: it needs
matplotlib, which nothing else does.

Figures are made without pyplot: no display, no state outside the figure. SVG keeps text as text and holds no date, so
that the same data give the same file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from console.text_format import ascii_only, clean

SERIES: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours that are dark enough for lines on white, in the order of use."""

MARKERS: Final = ("o", "s", "^", "D", "v", "P")
"""One with each colour, so that no curve is told by its colour alone."""

INK: Final = "#222222"
FAINT: Final = "#8A8A8A"
BAND: Final = "#E3E3E3"
"""Text and axes; grid and notes; the spread of something that every curve is compared with."""

FORMATS: Final = ("png", "svg")
WIDTH_IN: Final = 10.0
ROW_IN: Final = 2.9
DPI: Final = 150
_SVG_METADATA: Final = {"Date": None}

_RC: Final = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": BAND,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "pdconsole",
    "text.parse_math": False,
}


@contextmanager
def chart_style() -> Iterator[None]:
    """Make and save figures inside it."""
    with mpl.rc_context(_RC):  # type: ignore[arg-type]
        yield


def new_figure(num_rows: int) -> Figure:
    """As wide as every chart, ``num_rows`` rows of panels high."""
    return Figure(figsize=(WIDTH_IN, 0.9 + ROW_IN * num_rows), layout="constrained")


def save_chart(figure: Figure, path: Path) -> None:
    """PNG or SVG by the path's ending. Raises OSError, and ValueError for another ending."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"{path.name}: allowed endings are {', '.join(f'.{name}' for name in FORMATS)}")
    metadata = _SVG_METADATA if kind == "svg" else {"Software": None}
    figure.savefig(path, format=kind, dpi=DPI, metadata=metadata)


def svg_of(figure: Figure) -> bytes:
    """What ``save_chart`` would write to an SVG file."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", dpi=DPI, metadata=_SVG_METADATA)
    return out.getvalue()


def plain(text: str) -> str:
    """Foreign words (a model's name, a CPU's) with ``?`` for what the font or a terminal may not have."""
    return ascii_only(clean(text))


def log_axis_of_rates(axes: Axes) -> None:
    """The x axis counts bits/s, by powers of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_rate(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def log_axis_of_ms(axes: Axes) -> None:
    """The y axis counts milliseconds, by powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_ms(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def short_rate(bits_per_s: float) -> str:
    """1e9 -> "1 Gb/s"."""
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits_per_s >= size * 0.9995:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s:.3g} b/s"


def short_ms(value_ms: float) -> str:
    """1000 -> "1 s"."""
    return f"{value_ms / 1000:.3g} s" if value_ms >= 999.5 else f"{value_ms:.3g} ms"
