"""What this machine is, for whoever reads a measurement later. Linux; what cannot be read is left empty."""

import contextlib
import os
import platform
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.cpu_plan import available_cpus
from engine.dtypes import cpu_flags

TOLD_FLAGS: Final = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "neon",
    "bf16",
)
"""The CPU's flags that decide how fast a model runs."""

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")


def machine_facts() -> dict[str, Any]:
    """``caches`` are those that one core can use, smallest level first, in bytes."""
    return {
        "cpu": cpu_model(),
        "flags": [flag for flag in TOLD_FLAGS if flag in cpu_flags()],
        "cores": len(available_cpus()),
        "cores_of_machine": os.cpu_count(),
        "caches": cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel names it; "" where it does not."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return ""


def cache_bytes(directory: Path = _CACHES) -> dict[str, int]:
    """``{"L1d": 49152, "L2": ..., "L3": ...}``; empty where the system does not list them."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for index in sorted(directory.glob("index*")):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[f"L{level}" + ("d" if kind == "Data" else "")] = _kib(size)
    return found


def _kib(size: str) -> int:
    """The kernel writes "48K"."""
    return int(size.rstrip("K")) * 1024
