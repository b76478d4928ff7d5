"""Which number format to compute in. Knows the CPU's flags, not torch."""

from pathlib import Path

from engine.config import DTYPE_BYTES

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of this CPU; empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def has_fast_bfloat16(flags: frozenset[str]) -> bool:
    """True where matrix products run in bfloat16 hardware; elsewhere bfloat16 is emulated and slow."""
    return bool(flags & _BF16_FLAGS)


def resolve_dtype(dtype: str, device: str = "cpu", flags: frozenset[str] | None = None) -> str:
    """``auto`` -> the fastest format of the device; anything else is checked and returned.

    Raises ValueError naming the value and what is allowed.
    """
    if dtype in DTYPE_BYTES:
        return dtype
    if dtype != "auto":
        raise ValueError(f"dtype is {dtype!r}; allowed are auto, {', '.join(DTYPE_BYTES)}")
    if device.split(":")[0] != "cpu":
        return "bfloat16"
    return "bfloat16" if has_fast_bfloat16(cpu_flags() if flags is None else flags) else "float32"
