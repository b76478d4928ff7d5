"""`pdconsole plan --trace`: how many prefill and how many decode workers, by simulating the requests of a trace.

The product's own router and scheduler run in simulated time; engine steps take what `bench engine` measured, here and
now or in a saved document.
"""

import argparse
import dataclasses
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cluster.cpu_plan import available_cpus
from cluster.engine_bench import benchmark_spec, run_benchmark
from cluster.engine_bench_report import engine_bench_document
from cluster.engine_settings import engine_config
from cluster.machine_facts import machine_facts
from cluster.memory_fit import with_kv_cache
from cluster.planner import PlanLink
from cluster.profile import Profile, load_profile
from cluster.run_dir import RunDirError, find_run
from cluster.run_log import EVENTS_FILE, RunLogError, read_events
from cluster.sim_calibration import Learned, NothingToLearn, calibrated
from cluster.sim_cluster import simulate
from cluster.sim_cost import NotMeasured, StepCosts, costs_from_document
from cluster.sim_figures import SimFigures
from cluster.sim_machine import SimMachine
from cluster.sim_profile import sim_spec, sweep_document
from cluster.sim_spec import SimSpec, mode_of
from cluster.sim_sweep import smallest_enough, sweep
from cluster.slo import parse_slos
from cluster.trace import ScaledTrace, Scaling, TraceError, read_trace, scale_trace
from console.bench_options import choose_core
from console.bench_output import with_progress
from console.chart_command import check_ending
from console.errors import UserError
from console.plan_trace_text import plan_trace_text
from engine.config import ModelConfig
from engine.dtypes import resolve_dtype
from engine.memory import free_memory_bytes, num_kv_blocks
from engine.model_ids import ModelError, resolve_model

DEFAULT_SLO: Final = "ttft=2s,itl=50ms"
MAX_NODES: Final = 4096

_PREFILL_TOKENS: Final = (64, 512, 2048, 8000)
_BATCHES: Final = (1, 8, 32)
_CONTEXTS: Final = (128, 2048)
_REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """What is simulated: a profile whose sizes are settled, and what its engine's steps take."""

    profile: Profile
    model_id: str
    model: ModelConfig
    dtype: str
    num_blocks: int
    costs: StepCosts
    costs_from: str


def run(args: argparse.Namespace, link: PlanLink | None) -> int:
    """Exit code 0 whatever the verdict. ``link`` None: the profile's. Raises UserError and ProfileError."""
    try:
        slos = parse_slos(args.slo or DEFAULT_SLO)
    except ValueError as error:
        raise UserError(f"--slo: {error}") from error
    nodes = args.nodes
    if nodes is not None and not 2 <= nodes <= MAX_NODES:
        raise UserError(f"--nodes is {nodes}; allowed is 2 to {MAX_NODES}")
    if args.out is not None:
        check_ending(args.out)
    given = {"model.id": args.model, "model.dtype": args.dtype}
    profile = load_profile(args.profile, {key: value for key, value in given.items() if value is not None})
    link = link or PlanLink(
        f"{profile.link.bandwidth} (profile {profile.name})", profile.link_bits_per_s, profile.link.delay_ms
    )
    if link.bits_per_s <= 0:
        link = PlanLink("unlimited", math.inf, link.delay_ms)
    model_id, model, dtype = _model(profile)
    trace = load_trace(args, model)
    validation = importlib.import_module("console.plan_validate") if args.validate else None
    if validation is not None:
        validation.check(args, trace)
    subject = settle(args, profile, model_id, model, dtype)
    spec = sim_spec(
        subject.profile,
        engine_config(subject.profile),
        model,
        dtype,
        subject.num_blocks,
        subject.costs,
        link,
        slos,
        trace,
    )
    learned = dict(_learned(name, subject, spec) for name in args.like or ())
    if validation is not None:
        return int(validation.run(args, subject, spec, learned, trace, link))
    origin = "; corrected by ".join(
        [subject.costs_from, *(str(each.correction) for each in learned.values())]
    )
    began = time.monotonic()
    simulated = partial(_simulated, spec, learned, trace)
    found = smallest_enough(slos, simulated) if nodes is None else sweep(nodes, slos, simulated)
    document = sweep_document(
        found,
        spec,
        trace,
        link.name,
        {"id": model_id, "dtype": dtype, "kv_bytes_per_token": spec.kv_bytes_per_token},
        origin,
        time.monotonic() - began,
    )
    print(json.dumps(document, indent=2) if args.json else plan_trace_text(document), flush=True)
    if args.out is not None:
        charts = importlib.import_module("console.plan_trace_chart")  # matplotlib takes its time to import
        try:
            charts.save_plan_chart(document, args.out)
        except OSError as error:
            raise UserError(f"--out: {args.out} cannot be written: {error.strerror}", 1) from error
    return 0


def load_trace(args: argparse.Namespace, model: ModelConfig) -> ScaledTrace:
    """Raises UserError."""
    for option, value in (("speed", args.speed), ("lengths", args.lengths), ("requests", args.requests)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{option} is {value:g}; allowed is above 0")
    scaling = Scaling(args.speed or 1.0, args.lengths or 1.0, args.requests or 0)
    try:
        return scale_trace(read_trace(args.trace), scaling, model.max_model_len)
    except TraceError as error:
        raise UserError(str(error)) from error


def settle(
    args: argparse.Namespace, profile: Profile, model_id: str, model: ModelConfig, dtype: str
) -> Subject:
    """Size the KV pool and know the engine's steps: from --engine, else by measuring for some seconds."""
    try:
        settled = with_kv_cache(profile, model, free_memory_bytes())
        engine = engine_config(settled)
        num_blocks = num_kv_blocks(engine, model, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
    if args.engine is not None:
        document = _saved(args.engine, model_id, dtype)
        origin = f"{args.engine}"
    else:
        document = _measured(settled, model, dtype)
        origin = "a short benchmark of this machine just now"
    try:
        costs = costs_from_document(document, engine.max_num_seqs)
    except NotMeasured as error:
        raise UserError(f"{args.engine or 'the benchmark'}: {error}") from error
    return Subject(settled, model_id, model, dtype, num_blocks, costs, origin)


def in_mode(spec: SimSpec, learned: Mapping[str, Learned], prefill: int, decode: int) -> SimSpec:
    """The simulation of a split (``prefill`` 0: co-located), corrected by what is known of its mode."""
    known = known_of(learned, prefill)
    spec = spec if known is None else known.applied(spec)
    return dataclasses.replace(spec, prefill=prefill, decode=decode)


def known_of(learned: Mapping[str, Learned], prefill: int) -> Learned | None:
    """What was learned of a split's mode, else of the other one; None where nothing was."""
    return learned.get(mode_of(prefill)) or next(iter(learned.values()), None)


def this_machine(profile: Profile) -> SimMachine:
    """The cores here, used as the profile says."""
    return SimMachine(available_cpus(), profile.cluster.pin, profile.cluster.cores_per_worker)


def learn(run_dir: Path, served: Profile, spec: SimSpec) -> Learned:
    """From the log of a run of that profile. Raises NothingToLearn, RunLogError and OSError."""
    prefill, decode = served.cluster.prefill, served.cluster.decode
    if served.cluster.mode == "colocated":
        prefill, decode = 0, prefill + decode
    spec = dataclasses.replace(spec, prefill=prefill, decode=decode, machine=this_machine(served))
    return calibrated(spec, run_dir.name, read_events(run_dir / EVENTS_FILE))


def _simulated(
    spec: SimSpec, learned: Mapping[str, Learned], trace: ScaledTrace, prefill: int, decode: int
) -> SimFigures:
    if sys.stderr.isatty():
        what = f"{prefill}:{decode}" if prefill else f"{decode} co-located"
        print(f"\r\x1b[Ksimulating {what}", end="", file=sys.stderr, flush=True)
    try:
        return simulate(in_mode(spec, learned, prefill, decode), trace.requests)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _learned(name: str, subject: Subject, spec: SimSpec) -> tuple[str, Learned]:
    """The mode of a run of the same model, whatever its load and split were, and what it teaches."""
    try:
        record = find_run(name)
        if record.info is None:
            raise UserError(f"--like: run {name} died before it was ready")
        served = record.info.profile
        if served.model.id != subject.profile.model.id:
            raise UserError(
                f"--like: run {name} served {served.model.id}, the plan is for {subject.model_id}"
            )
        return served.cluster.mode, learn(record.path, served, spec)
    except (RunDirError, RunLogError, NothingToLearn) as error:
        raise UserError(f"--like: {error}") from error
    except OSError as error:
        raise UserError(f"--like: the log of run {name} cannot be read: {error.strerror}") from error


def _model(profile: Profile) -> tuple[str, ModelConfig, str]:
    try:
        source = resolve_model(profile.model.id)
        return source.model_id, source.config, resolve_dtype(profile.model.dtype)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error


def _saved(path: Path, model_id: str, dtype: str) -> dict[str, Any]:
    """A document of ``bench engine --json``, of this model and dtype."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--engine: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--engine: {path} is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("benchmark") != "engine":
        raise UserError(f"--engine: {path} is no document of bench engine --json")
    found = (document.get("model", {}).get("id"), document.get("dtype"))
    if found != (model_id, dtype):
        raise UserError(
            f"--engine: {path} measured {found[0]} in {found[1]}, the plan is for {model_id} in {dtype}"
        )
    return document


def _measured(profile: Profile, model: ModelConfig, dtype: str) -> dict[str, Any]:
    core, machine = choose_core(None), machine_facts()
    longest = model.max_model_len - 1
    spec = benchmark_spec(
        profile,
        model,
        dtype,
        prefill_tokens=sorted({min(tokens, longest) for tokens in _PREFILL_TOKENS}),
        batches=sorted({min(batch, profile.engine.max_num_seqs) for batch in _BATCHES}),
        contexts=_CONTEXTS,
        repeats=_REPEATS,
        where=False,
        size_pool=True,
    )
    result = with_progress(lambda report: run_benchmark(spec, core, report))
    return engine_bench_document(spec, model, core, machine, result)
