"""What do long prompts do to running streams: co-located, co-located with chunked prefill, and disaggregated?

Each arm serves the same load with the same workers on the same cores: streams of short requests, first alone, then
beside bursts of long prompts (the load mixed and the burst of the profile, which --set can change). Arms take turns,
each round on a cluster of its own. The streams' ITL in bursts is the gain; TTFT and throughput, which may be the cost,
stand beside it. --out also writes the chart, interference.png and interference.svg.

Exit code 1 when an arm has no round in which the load generator kept up.
"""

import argparse
import importlib
import math
from typing import Any, Final

from cluster.interference_bench import LOAD, InterferenceSpec, make_arms
from cluster.interference_bench_report import interference_document
from cluster.load import MAX_BURST_IN_FLIGHT
from cluster.machine_facts import machine_facts
from cluster.profile import Profile, ProfileError, load_profile
from cluster.slo import parse_slos
from console.bench_interference_run import measure_interference
from console.bench_interference_text import interference_text
from console.bench_options import add_output_options, settings_but
from console.bench_output import EXIT_FAILED, check_out_dir, print_result, with_progress
from console.errors import UserError
from console.up import DEFAULT_PROFILE
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

DEFAULT_BUDGETS: Final = "512,128"
DEFAULT_SECONDS: Final = 10.0
DEFAULT_REPEATS: Final = 3
QUICK_BUDGETS: Final = "512"
QUICK_SECONDS: Final = 5.0
QUICK_REPEATS: Final = 1
DEFAULT_SLO: Final = "ttft=2s,itl=50ms"
HANDOFFS: Final = ("always", "auto")

_FIXED: Final[dict[str, Any]] = {
    "cluster.mode": "disagg",
    "engine.prefix_caching": False,
    "router.port": 0,
}
_VARIED: Final = ("cluster.handoff", "engine.prefill_chunk_tokens")
"""What the comparison needs, and what it changes, whatever the profile says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"workers, model, engine, link and loads (default: {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--model", metavar="ID|DIR", help="a model id (see: pdconsole model list) or a directory"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="auto, float32 or bfloat16")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="of each phase; that with bursts lasts until the last is answered "
        f"(default: {DEFAULT_SECONDS:g}; with --quick: {QUICK_SECONDS:g})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"rounds of every arm (default: {DEFAULT_REPEATS}; with --quick: {QUICK_REPEATS})",
    )
    parser.add_argument(
        "--streams", type=int, metavar="N", help="requests open at a time (default: the load's)"
    )
    parser.add_argument(
        "--burst-tokens", type=int, metavar="N", help="tokens of a burst's prompts (default: the profile's)"
    )
    parser.add_argument(
        "--budgets",
        metavar="N,...",
        help="tokens of a step, an arm of chunked prefill for each "
        f"(default: {DEFAULT_BUDGETS}; with --quick: {QUICK_BUDGETS})",
    )
    parser.add_argument(
        "--handoffs",
        default=",".join(HANDOFFS),
        metavar="WAY,...",
        help=f"a disaggregated arm for each (default: {','.join(HANDOFFS)})",
    )
    parser.add_argument(
        "--slo", default=DEFAULT_SLO, metavar="NAME=TIME,...", help=f"of goodput (default: {DEFAULT_SLO})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer budgets, shorter phases, one round")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key of the profile but what is compared; may be repeated",
    )
    add_output_options(parser, "interference")


def run(args: argparse.Namespace) -> int:
    """Exit code. Raises UserError and ProfileError."""
    profile = _profile(args)
    spec = _spec(args, profile)
    try:
        source = resolve_model(profile.model.id)
        dtype = resolve_dtype(profile.model.dtype, profile.model.device)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    _check_lengths(profile, source.model_id, source.config.max_model_len)
    check_out_dir(args.out)
    machine = machine_facts()  # before this process adds to the load
    result = with_progress(lambda report: measure_interference(profile, spec, report))
    document = interference_document(spec, profile, source.config, dtype, machine, result)
    print_result("interference", document, interference_text(document), as_json=args.json, out_dir=args.out)
    if args.out is not None:
        charts = importlib.import_module(
            "console.bench_interference_chart"
        )  # matplotlib takes a second to import
        try:
            charts.save_interference_charts(document, args.out)
        except OSError as error:
            raise UserError(
                f"--out: {error.filename or args.out} cannot be written: {error.strerror}", EXIT_FAILED
            ) from error
    return 0 if all(arm["valid"] for arm in document["arms"]) else EXIT_FAILED


def _profile(args: argparse.Namespace) -> Profile:
    """Raises ProfileError and UserError."""
    given = {
        "model.id": args.model,
        "model.dtype": args.dtype,
        f"load.{LOAD}.streams": args.streams,
        "burst.prompt_tokens": args.burst_tokens,
    }
    for option, value in (("--streams", args.streams), ("--burst-tokens", args.burst_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}; allowed is 1 or more")
    overrides = {key: value for key, value in given.items() if value is not None}
    overrides |= settings_but(args.set, {*_FIXED, *_VARIED})
    profile = load_profile(args.profile, overrides | _FIXED)
    load = profile.load[LOAD]
    if not load.streams or not load.burst_every_s:
        raise ProfileError(
            f"load.{LOAD} has streams {load.streams} and burst_every_s {load.burst_every_s:g}; both are needed: "
            "allowed is above 0"
        )
    for key, count in (("burst.prompts", profile.burst.prompts), (f"load.{LOAD}.streams", load.streams)):
        if count > MAX_BURST_IN_FLIGHT:
            raise ProfileError(f"{key} is {count:,}; allowed is up to {MAX_BURST_IN_FLIGHT}")
    return profile


def _spec(args: argparse.Namespace, profile: Profile) -> InterferenceSpec:
    """Raises UserError."""
    seconds, repeats = args.seconds, args.repeats
    if seconds is None:
        seconds = QUICK_SECONDS if args.quick else DEFAULT_SECONDS
    if repeats is None:
        repeats = QUICK_REPEATS if args.quick else DEFAULT_REPEATS
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; allowed is 1 or more")
    first_burst_s = profile.load[LOAD].burst_every_s / 2
    if not first_burst_s < seconds < math.inf:
        raise UserError(
            f"--seconds is {seconds:g}; the first burst comes after {first_burst_s:g} s: allowed is more than that"
        )
    budgets = args.budgets or (QUICK_BUDGETS if args.quick else DEFAULT_BUDGETS)
    handoffs = [part.strip() for part in args.handoffs.split(",")]
    for handoff in handoffs:
        if handoff not in HANDOFFS:
            raise UserError(f"--handoffs has {handoff!r}; allowed: {', '.join(HANDOFFS)}")
    try:
        slos = parse_slos(args.slo)
    except ValueError as error:
        raise UserError(f"--slo has {error}") from error
    arms = make_arms(
        profile,
        list(dict.fromkeys(_budget(part.strip(), profile) for part in budgets.split(","))),
        list(dict.fromkeys(handoffs)),
    )
    return InterferenceSpec(arms, seconds, repeats, slos)


def _budget(text: str, profile: Profile) -> int:
    low, high = profile.engine.max_num_seqs, profile.burst.prompt_tokens - 1
    if not text.isdecimal() or not low <= int(text) <= high:
        raise UserError(
            f"--budgets has {text!r}; a step takes every running request and less than a burst's prompt: "
            f"allowed are whole numbers from {low:,} to {high:,}"
        )
    return int(text)


def _check_lengths(profile: Profile, model_id: str, context: int) -> None:
    """Raises UserError when a request cannot be served whole."""
    load, burst = profile.load[LOAD], profile.burst
    for what, prompt, output in (
        ("--burst-tokens (burst.prompt_tokens)", burst.prompt_tokens, burst.max_tokens),
        (f"load.{LOAD}.prompt_tokens", load.prompt_tokens, load.max_tokens),
    ):
        if prompt + output > context:
            raise UserError(
                f"{what} is {prompt:,} with {output:,} tokens of output; the context of {model_id} is {context:,} "
                f"tokens: allowed is up to {context - output:,}"
            )
