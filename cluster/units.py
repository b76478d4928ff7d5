"""Sizes and rates as people write them: "10gbit" (network rates are decimal bits), "512MiB" (memory is binary)."""

import re

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bits_per_s(text: str) -> float:
    """``"10gbit"`` -> 1e10. "unlimited" -> 0.0. Raises ValueError saying what is allowed."""
    if text.strip().lower() == "unlimited":
        return 0.0
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"{text!r} is not a rate; allowed: a number above 0 with bit, kbit, mbit, gbit, or unlimited"
        )
    return float(found[1]) * 1000.0 ** _POWER[found[2].lower()]


def parse_bytes(text: str) -> int:
    """``"512MiB"`` -> 536870912, ``"1GB"`` -> 10**9. Raises ValueError saying what is allowed."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; allowed: a number with B, KiB, MiB, GiB, kB, MB or GB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _POWER[found[2].lower()])


def format_bits_per_s(bits_per_s: float) -> str:
    """1e10 -> "10.00 Gb/s"; 0 -> "unlimited"."""
    if bits_per_s <= 0:
        return "unlimited"
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.2f} {unit}"
    return f"{bits_per_s:.0f} b/s"


def format_bytes(num_bytes: float) -> str:
    """Binary units, as memory and KV are counted: 184320000 -> "175.8 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
