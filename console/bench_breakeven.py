"""From which link on is moving a prompt's KV faster than computing it again? Measured, and beside it the forecast.

A cluster of one prefill and one decode worker is brought up for each way of delivery (all KV after the prompt, or
streamed while it is computed). On each link every prompt is handed off by each codec and computed again by the decode
worker; requests run alone, prefix caching is off. The planner's forecast is made from inputs measured apart: links by
their probes, prefill and codecs by their own benchmarks. --out also writes the chart, breakeven.png and breakeven.svg.
"""

import argparse
import importlib
from typing import Any, Final

from cluster.breakeven_bench import OUTPUT_TOKENS, BreakevenResult, BreakevenSpec, Calibration, calibrate
from cluster.breakeven_bench_forecast import DELIVERIES
from cluster.breakeven_bench_report import breakeven_document
from cluster.cpu_plan import available_cpus
from cluster.link_tuner import LOWEST_BITS_PER_S
from cluster.machine_facts import machine_facts
from cluster.profile import Profile, ProfileError, load_profile
from cluster.units import format_bits_per_s, parse_bits_per_s
from console.bench_breakeven_run import measure_breakeven
from console.bench_breakeven_text import breakeven_text
from console.bench_options import add_output_options, settings_but
from console.bench_output import EXIT_FAILED, check_out_dir, print_result, with_progress
from console.errors import UserError
from console.up import DEFAULT_PROFILE
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

DEFAULT_TOKENS: Final = "100,1000,2000,4000,8000"
DEFAULT_LINKS: Final = "50mbit,100mbit,200mbit,500mbit,1gbit,10gbit,unlimited"
DEFAULT_REPEATS: Final = 3
QUICK_TOKENS: Final = "100,1000,4000"
QUICK_LINKS: Final = "100mbit,300mbit,1gbit,unlimited"
QUICK_REPEATS: Final = 1

_CODECS: Final = ("raw", "int8")
_FIXED: Final[dict[str, Any]] = {
    "cluster.mode": "disagg",
    "cluster.prefill": 1,
    "cluster.decode": 1,
    "cluster.handoff": "always",
    "cluster.fallback": "off",
    "cluster.cores_per_worker": 1,
    "engine.prefix_caching": False,
    "kv.codec": "raw",
    "kv.path": "v2",
    "link.probe": True,
    "link.target": "",
    "link.rho": 0.0,
    "router.port": 0,
}
"""What the comparison needs, whatever the profile says."""

_VARIED: Final = ("kv.delivery", "link.bandwidth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"takes model, engine and the link's delay from it (default: {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--model", metavar="ID|DIR", help="a model id (see: pdconsole model list) or a directory"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="auto, float32 or bfloat16")
    parser.add_argument("--link-backend", metavar="BACKEND", help="auto, netns or pacing")
    for option, default, quick, what in (
        ("--tokens", DEFAULT_TOKENS, QUICK_TOKENS, "prompt lengths"),
        ("--links", DEFAULT_LINKS, QUICK_LINKS, "bandwidths; unlimited: what this host reaches"),
    ):
        parser.add_argument(
            option, metavar="N,...", help=f"{what} (default: {default}; with --quick: {quick})"
        )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"samples of every case (default: {DEFAULT_REPEATS}; with --quick: {QUICK_REPEATS})",
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, links and repeats")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key of the profile but what is compared; may be repeated",
    )
    add_output_options(parser, "breakeven")


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises UserError and ProfileError."""
    profile = _profile(args)
    spec = _spec(args)
    if profile.link.backend == "none":
        raise UserError("--link-backend none shapes no link; allowed: auto, netns, pacing")
    try:
        source = resolve_model(profile.model.id)
        dtype = resolve_dtype(profile.model.dtype)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    longest, context = max(spec.tokens) + OUTPUT_TOKENS, source.config.max_model_len
    if longest > context:
        raise UserError(
            f"--tokens has {max(spec.tokens):,}; the context of {source.model_id} is {context:,} tokens: "
            f"allowed is up to {context - OUTPUT_TOKENS:,}"
        )
    check_out_dir(args.out)
    machine = machine_facts()  # before this process adds to the load
    core = available_cpus()[-1]

    def measure(report: Any) -> tuple[Calibration, BreakevenResult]:
        calibration = calibrate(profile, source.config, dtype, spec, core, report)
        return calibration, measure_breakeven(profile, spec, report)

    try:
        calibration, result = with_progress(measure)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    document = breakeven_document(spec, profile, source.config, machine, calibration, result)
    print_result("breakeven", document, breakeven_text(document), as_json=args.json, out_dir=args.out)
    if args.out is not None:
        charts = importlib.import_module(
            "console.bench_breakeven_chart"
        )  # matplotlib takes a second to import
        try:
            charts.save_breakeven_charts(document, args.out)
        except OSError as error:
            raise UserError(
                f"--out: {error.filename or args.out} cannot be written: {error.strerror}", EXIT_FAILED
            ) from error
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    """Raises ProfileError and UserError."""
    given = {"model.id": args.model, "model.dtype": args.dtype, "link.backend": args.link_backend}
    overrides = {key: value for key, value in given.items() if value is not None}
    overrides |= settings_but(args.set, {*_FIXED, *_VARIED})
    profile = load_profile(args.profile, overrides | _FIXED)
    if profile.model.device != "cpu":
        raise ProfileError(
            f"model.device is {profile.model.device!r}; KV is moved between CPUs: allowed is cpu"
        )
    return profile


def _spec(args: argparse.Namespace) -> BreakevenSpec:
    """Raises UserError."""
    tokens = args.tokens or (QUICK_TOKENS if args.quick else DEFAULT_TOKENS)
    links = args.links or (QUICK_LINKS if args.quick else DEFAULT_LINKS)
    repeats = args.repeats
    if repeats is None:
        repeats = QUICK_REPEATS if args.quick else DEFAULT_REPEATS
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; allowed is 1 or more")
    return BreakevenSpec(
        tokens=tuple(sorted({_length(part.strip()) for part in tokens.split(",")})),
        links=tuple(
            sorted({_rate(part.strip()) for part in links.split(",")}, key=lambda rate: rate or float("inf"))
        ),
        codecs=_CODECS,
        deliveries=DELIVERIES,
        repeats=repeats,
    )


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--tokens has {text!r}; allowed are whole numbers from 1 on, e.g. {DEFAULT_TOKENS}")
    return int(text)


def _rate(text: str) -> float:
    try:
        bits_per_s = parse_bits_per_s(text)
    except ValueError as error:
        raise UserError(f"--links has {error}") from error
    if 0 < bits_per_s < LOWEST_BITS_PER_S:
        lowest = format_bits_per_s(LOWEST_BITS_PER_S)
        raise UserError(f"--links has {text}; allowed is {lowest} or more: a slower link cannot be probed")
    return bits_per_s
