"""Service level objectives as people write them: "ttft=2s,itl=50ms". What they mean for a request is in ``metrics``."""

import math
import re
from typing import Final

from cluster.metrics import Slos

_FIELDS: Final = {"ttft": "ttft_ms", "itl": "itl_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


def parse_slos(text: str) -> Slos:
    """``"ttft=2s,itl=50ms"`` -> limits in ms. Raises ValueError naming the part and what is allowed."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        found = _TIME.fullmatch(value)
        if name not in _FIELDS or found is None:
            raise ValueError(
                f"{part.strip()!r}; allowed are {', '.join(_FIELDS)}, each as in ttft=2s,itl=50ms"
            )
        if _FIELDS[name] in limits:
            raise ValueError(f"{name} twice; allowed is once")
        limit_ms = float(found[1]) * (1000.0 if found[2] == "s" else 1.0)
        if not 0 < limit_ms < math.inf:
            raise ValueError(f"{part.strip()!r}; allowed is above 0")
        limits[_FIELDS[name]] = limit_ms
    return Slos(**limits)


def format_slos(slos: Slos) -> str:
    """The inverse, in the order of ``_FIELDS``; "" for no limit."""
    limits = ((name, getattr(slos, field)) for name, field in _FIELDS.items())
    return ",".join(f"{name}={_time(limit)}" for name, limit in limits if limit is not None)


def _time(limit_ms: float) -> str:
    return f"{limit_ms / 1000:g}s" if limit_ms >= 1000 else f"{limit_ms:g}ms"
