"""Numbers and foreign strings as fixed-width text, so that nothing on the screen moves when a value changes.

Everything that comes from a log (ids, reasons, notes) goes through :func:`clean` before it is drawn: a control
character in it must never reach the terminal.
"""

import re
from typing import Final

from rich.cells import cell_len, set_cell_size

from cluster.units import format_bytes

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
_WORKER: Final = re.compile(r"(prefill|decode)-(\d+)")
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS: Final = " _.:-=+*#"

SHORT_ID: Final = 7
NONE: Final = "-"
"""What stands where there is no value (yet)."""


def clean(text: str) -> str:
    """Control, zero-width and direction-changing characters replaced by a middle dot-free ``?``."""
    return _CONTROL.sub("?", text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Exactly ``width`` cells: padded, or cut with ``~`` as the last cell."""
    text = clean(text)
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(width - 1, 0)) + "~" if width > 0 else ""
    padding = " " * (width - length)
    return padding + text if right else text + padding


def ascii_only(text: str) -> str:
    """Every character outside ASCII replaced by ``?``."""
    return text.encode("ascii", "replace").decode("ascii")


def format_clock(seconds: float) -> str:
    """252.4 -> "00:04:12"."""
    whole = max(int(seconds), 0)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def format_stamp(seconds: float) -> str:
    """Time since the run's start for a list: 247.93 -> "04:07.9", from an hour on "1:04:07"."""
    tenths = round(max(seconds, 0.0) * 10)
    minutes, tenths = divmod(tenths, 600)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d}:{tenths // 10:02d}"
    return f"{minutes:02d}:{tenths // 10:02d}.{tenths % 10}"


def format_ms(value_ms: float | None) -> str:
    """At most 7 cells: "0.4 ms", "61 ms", "2.71 s", "95 s"; ``-`` for None."""
    if value_ms is None:
        return NONE
    if value_ms < 9.95:
        return f"{value_ms:.1f} ms"
    if value_ms < 999.5:
        return f"{value_ms:.0f} ms"
    if value_ms < 9_995:
        return f"{value_ms / 1000:.2f} s"
    if value_ms < 99_950:
        return f"{value_ms / 1000:.1f} s"
    return f"{value_ms / 1000:.0f} s"


def format_short_ms(value_ms: float | None) -> str:
    """Milliseconds without the unit, at most 5 cells: "0.4", "14", "2711", "95k"."""
    if value_ms is None:
        return NONE
    if value_ms < 9.95:
        return f"{value_ms:.1f}"
    return f"{value_ms:.0f}" if value_ms < 99_999.5 else f"{value_ms / 1000:.0f}k"


def format_mib(num_bytes: float) -> str:
    """Number only, at most 6 cells: "2.8", "175.8", "12345"."""
    mib = num_bytes / 2**20
    return f"{mib:.1f}" if mib < 9_999.5 else f"{mib:.0f}"


def format_skipped(tokens: int, num_bytes: int) -> str:
    """What a transfer left away, to be put after it: ", skipped 4,096 tokens, 24.0 MiB"; "" for none."""
    return f", skipped {tokens:,} tokens, {format_bytes(num_bytes)}" if tokens else ""


def format_rate_pair(achieved_bits_per_s: float, asked_bits_per_s: float) -> str:
    """Achieved over asked in one unit: "9.42/10 Gb/s"; "-/10 Gb/s" before a probe; "9.42 Gb/s" when unlimited."""
    scale, unit = _rate_unit(asked_bits_per_s or achieved_bits_per_s)
    achieved = f"{achieved_bits_per_s / scale:.2f}" if achieved_bits_per_s > 0 else NONE
    if asked_bits_per_s <= 0:
        return f"{achieved} {unit}"
    return f"{achieved}/{asked_bits_per_s / scale:g} {unit}"


def format_megabytes_per_s(bytes_per_s: float) -> str:
    """Decimal, number only: "68", "1,175"; below ten one digit."""
    value = bytes_per_s / 1e6
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def format_ratio(value: float | None) -> str:
    """Three significant digits: "0.42", "17", "1240"; ``-`` for None."""
    if value is None:
        return NONE
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def bar(share: float, width: int, *, ascii_mode: bool) -> str:
    """``share`` of 1 as a bar of ``width`` cells, brackets included."""
    inner = max(width - 2, 0)
    filled = min(max(round(share * inner), 0), inner)
    full, empty = ("#", ".") if ascii_mode else ("█", "·")
    return "[" + full * filled + empty * (inner - filled) + "]"


def block_strip(values: list[float | None], top: float, *, ascii_mode: bool) -> str:
    """One cell a value, its height the share of ``top`` in eighths; a space for None."""
    glyphs = _ASCII_BLOCKS if ascii_mode else _BLOCKS
    scale = (len(glyphs) - 1) / top if top > 0 else 0.0
    cells = [
        " " if value is None else glyphs[min(max(round(value * scale), 1), len(glyphs) - 1)]
        for value in values
    ]
    return "".join(cells)


def short_worker(worker_id: str) -> str:
    """ "prefill-0" -> "P0", "decode-1" -> "D1"; any other id as it is."""
    found = _WORKER.fullmatch(worker_id)
    return f"{found[1][0].upper()}{found[2]}" if found else clean(worker_id)


def short_id(request_id: str) -> str:
    """The first SHORT_ID characters: enough to tell the requests on a screen apart."""
    return clean(request_id[:SHORT_ID])


def _rate_unit(bits_per_s: float) -> tuple[float, str]:
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits_per_s >= size:
            return size, unit
    return 1.0, "b/s"
