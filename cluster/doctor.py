"""What this machine can do for a cluster, found by trying it. Imports no torch: a process of its own is asked."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.cpu_plan import available_cpus
from cluster.http_listener import port_holder
from cluster.link_backend import pacing_problem
from cluster.machine_facts import TOLD_FLAGS
from cluster.machine_probes import (
    ProbeError,
    ProcessLine,
    ask_torch,
    directory_problem,
    find_leftovers,
    loopback_bits_per_s,
    process_table,
)
from cluster.netns import Fabric, NetnsError
from cluster.profile import RouterSection, builtin_profiles, load_profile
from cluster.run_dir import list_runs, runs_home
from cluster.units import format_bits_per_s, format_bytes
from engine.downloadable import DOWNLOADABLE
from engine.dtypes import cpu_flags, resolve_dtype
from engine.model_ids import ModelError, resolve_model

OK: Final = "ok"
WARN: Final = "warn"
MISSING: Final = "missing"

DISTRIBUTIONS: Final = (
    "pdconsole",
    "torch",
    "numpy",
    "aiohttp",
    "msgspec",
    "textual",
    "safetensors",
    "tokenizers",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``status``: ok, warn (works with less) or missing (a cluster cannot run without it)."""

    name: str
    status: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    checks: tuple[Check, ...]

    @property
    def missing(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == MISSING)

    @property
    def can_run(self) -> bool:
        return not self.missing

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "can_run": self.can_run,
            "missing": [check.name for check in self.missing],
            "checks": [asdict(check) for check in self.checks],
        }


def examine(port: int = RouterSection().port) -> DoctorReport:
    """Try everything; takes a few seconds, most of them torch's import."""
    return DoctorReport(
        (
            *machine_checks(),
            torch_check(ask_torch),
            *shaping_checks(),
            loopback_check(loopback_bits_per_s),
            *model_checks(),
            port_check(port, port_holder),
            data_dir_check(runs_home().parent),
            *run_checks(process_table()),
            versions_check(),
        )
    )


def machine_checks() -> Iterator[Check]:
    cores = len(available_cpus())
    detail = (
        "" if cores >= 2 else "prefill and decode share one core: disaggregation cannot show its gain here"
    )
    yield Check("cores", OK if cores >= 2 else WARN, f"{cores} usable of {os.cpu_count()}", detail)
    memory = psutil.virtual_memory()
    yield Check("memory", OK, f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}")
    flags = cpu_flags()
    told = [flag for flag in TOLD_FLAGS if flag in flags]
    yield Check("cpu flags", OK, " ".join(told) or "none of those that matter")
    dtype = resolve_dtype("auto")
    detail = "" if dtype == "bfloat16" else "this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX)"
    yield Check("dtype auto", OK, dtype, detail)


def torch_check(ask: Callable[[], dict[str, Any]]) -> Check:
    try:
        answer = ask()
    except ProbeError as error:
        return Check("torch", MISSING, "cannot be imported", str(error))
    devices = ", ".join(answer["devices"])
    return Check("torch", OK, answer["version"], f"GPU: {devices}" if devices else "CPU only")


def shaping_checks() -> Iterator[Check]:
    """Builds the network that the netns backend would build for one worker, and lets it go."""
    is_root = os.geteuid() == 0
    yield Check(
        "root", OK if is_root else WARN, "yes" if is_root else "no", "" if is_root else "netns needs it"
    )
    tc = shutil.which("tc")
    yield Check("tc", OK if tc else WARN, tc or "not found", "" if tc else "netns needs iproute2")
    try:
        fabric = Fabric.create(1)
    except NetnsError as error:
        netns, has_netem = Check("netns", WARN, "no", str(error)), None
    else:
        netns, has_netem = Check("netns", OK, "yes", "namespace, veth, bridge and tbf made"), fabric.has_netem
        fabric.close()
    yield netns
    if has_netem is not None:
        detail = (
            ""
            if has_netem
            else "no sch_netem in this kernel: the transport adds delay, loss cannot be emulated"
        )
        yield Check("netem", OK if has_netem else WARN, "yes" if has_netem else "no", detail)
    problem = pacing_problem()
    yield Check("pacing", WARN if problem else OK, "no" if problem else "yes", problem)
    backend = "netns" if netns.status == OK else "none" if problem else "pacing"
    detail = "links cannot be shaped here" if backend == "none" else ""
    yield Check("link backend auto", WARN if backend == "none" else OK, backend, detail)


def loopback_check(measure: Callable[[], float]) -> Check:
    """Names the shipped profiles that ask more than loopback carries here."""
    try:
        bits_per_s = measure()
    except ProbeError as error:
        return Check("loopback TCP", MISSING, "no", str(error))
    asked = {name: load_profile(name).link_bits_per_s for name in builtin_profiles()}
    beyond = [name for name, rate in asked.items() if rate > bits_per_s]
    detail = f"profiles that cannot reach their rate here: {', '.join(beyond)}" if beyond else ""
    return Check("loopback TCP", WARN if beyond else OK, format_bits_per_s(bits_per_s), detail)


def model_checks() -> Iterator[Check]:
    """Only ``tiny`` is required: it ships, and every profile can use it."""
    for model_id in ("tiny", *DOWNLOADABLE):
        absent = MISSING if model_id == "tiny" else OK
        try:
            path = resolve_model(model_id).path
        except ModelError as error:
            yield Check(f"model {model_id}", absent, "not here", str(error))
            continue
        if path is not None and not any(path.glob("*.safetensors")):
            yield Check(f"model {model_id}", absent, "incomplete", f"{path} holds no weights")
        else:
            yield Check(f"model {model_id}", OK, str(path))


def port_check(port: int, holder_of: Callable[[int], str]) -> Check:
    holder = holder_of(port)
    if holder:
        return Check(
            "port", WARN, f"{port} is held by {holder}", "use --port N, or --port 0 for any free one"
        )
    return Check("port", OK, f"{port} is free")


def data_dir_check(directory: Path) -> Check:
    problem = directory_problem(directory)
    return Check("data directory", MISSING if problem else OK, str(directory), problem)


def run_checks(table: list[ProcessLine]) -> Iterator[Check]:
    alive = [record for record in list_runs() if record.is_alive]
    yield Check("runs that are up", OK, ", ".join(record.run for record in alive) or "none")
    pids = [record.info.supervisor_pid for record in alive if record.info is not None]
    leftovers = find_leftovers(table, pids)
    if leftovers:
        value = ", ".join(f"pid {line.pid} ({line.module})" for line in leftovers)
        yield Check("leftovers", WARN, value, "their cluster is gone; end them by pid")
    else:
        yield Check("leftovers", OK, "none", "network namespaces of a cluster end with its processes")


def versions_check() -> Check:
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return Check(
        "versions", OK, f"Python {platform.python_version()}, Linux {platform.release()}", ", ".join(found)
    )
