"""Which codec a transfer should take, and why. Pure arithmetic on measured rates; knows no codec and no clock.

A transfer goes frame by frame through three stages that work side by side: the sending core encodes and sends, the link
carries, the receiving core receives and decodes. The slowest stage decides, after one frame has been through all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

RAW: Final = "raw"
LOSSLESS: Final = "lossless"
AUTO: Final = "auto"
CODEC_CHOICES: Final = (RAW, "int8", LOSSLESS, AUTO)
"""What may be asked for. ``lossless`` means: where it saves time. ``auto``: the fastest that is allowed."""

MIN_GAIN: Final = 0.1
"""So much less time than raw a codec has to take: it costs its core time that raw leaves to the engine."""

SOCKET_BYTES_PER_S: Final = 3e9
"""What one core sends or receives by TCP on one host (25 Gb/s on loopback); a core that also encodes has both to do."""

_FRAME_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CodecRate:
    """What a codec does on one core of this machine. Rates are of stored bytes; ``ratio``: wire over stored bytes."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float
    is_lossy: bool = False


@dataclass(frozen=True, slots=True)
class LinkRate:
    """``source``: measured, or asked where nothing was measured yet."""

    bytes_per_s: float
    source: str


_RAW_RATE: Final = CodecRate(math.inf, math.inf, 1.0)


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """``reason`` is printable; "" where the codec was asked for by name."""

    codec: str
    reason: str = ""


def choose_codec(
    asked: str, raw_bytes: int, link: LinkRate | None, rates: Mapping[str, CodecRate], *, allow_lossy: bool
) -> CodecChoice:
    """``asked`` is one of CODEC_CHOICES; ``link`` None and missing ``rates``: not known yet."""
    if asked not in (LOSSLESS, AUTO):
        return CodecChoice(asked)
    candidates = {
        name: rate
        for name, rate in rates.items()
        if (name == LOSSLESS or asked == AUTO) and (allow_lossy or not rate.is_lossy)
    }
    if not rates:
        return CodecChoice(LOSSLESS if asked == LOSSLESS else RAW, "the codecs' rates are not measured yet")
    if link is None:
        return CodecChoice(LOSSLESS if asked == LOSSLESS else RAW, "the link is not measured yet")
    times_s = {
        name: transfer_s(raw_bytes, link, rate) for name, rate in {RAW: _RAW_RATE, **candidates}.items()
    }
    best = min(times_s, key=lambda name: times_s[name])
    if times_s[best] > (1 - MIN_GAIN) * times_s[RAW]:
        best = RAW
    return CodecChoice(best, _reason(best, times_s, raw_bytes, link, _left_out(asked, rates, candidates)))


def transfer_s(raw_bytes: int, link: LinkRate, rate: CodecRate) -> float:
    """Estimated seconds from the first byte encoded to the last one decoded, on cores that do nothing else."""
    socket_s = rate.ratio / SOCKET_BYTES_PER_S
    stages = (
        1 / rate.encode_bytes_per_s + socket_s,
        rate.ratio / link.bytes_per_s,
        1 / rate.decode_bytes_per_s + socket_s,
    )
    first = min(raw_bytes, _FRAME_BYTES)
    return first * sum(stages) + (raw_bytes - first) * max(stages)


def _left_out(asked: str, rates: Mapping[str, CodecRate], candidates: Mapping[str, CodecRate]) -> str:
    lossy = [name for name in rates if name not in candidates and rates[name].is_lossy]
    return f"; {', '.join(lossy)} may lose and is not allowed" if lossy and asked == AUTO else ""


def _reason(best: str, times_s: Mapping[str, float], raw_bytes: int, link: LinkRate, left_out: str) -> str:
    others = [name for name in sorted(times_s, key=lambda name: times_s[name]) if name != best]
    estimates = ", ".join(f"{name} {times_s[name] * 1e3:.3g} ms" for name in (best, *others))
    return (
        f"estimated {estimates} for {raw_bytes / 1e6:.3g} MB over {link.bytes_per_s / 1e6:.3g} MB/s "
        f"{link.source}{left_out}"
    )
