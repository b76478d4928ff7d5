"""How fast KV moves between two processes over real TCP, what that costs, and how it compares with what is known.

Two processes as a prefill and a decode worker would be, on their cores, over bare loopback and, for root, between two
network namespaces. The paths v2 and v1 beside iperf3's one stream and torch.distributed's gloo (NCCL where there are
two GPUs), in turns; limited links, asked beside achieved; and an engine's steps beside a transfer.
"""

import argparse
from typing import Final

from cluster.cpu_plan import available_cpus
from cluster.machine_facts import machine_facts
from cluster.transport_bench import run_transport_bench, transport_bench_spec
from cluster.transport_bench_report import transport_bench_document
from cluster.units import parse_bits_per_s, parse_bytes
from console.bench_options import add_model_options, add_output_options, engine_profile, engine_settings
from console.bench_output import check_out_dir, print_result, with_progress
from console.bench_transport_text import transport_bench_text
from console.errors import UserError
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

DEFAULT_SIZES: Final = "1MB,8MB,64MB,256MB"
DEFAULT_RATES: Final = "1gbit,10gbit"
DEFAULT_REPEATS: Final = 7
STEPS_REPEATS_OF_ONE: Final = 3
"""A prompt's steps vary more than a transfer does, and cost less."""

STEPS_BITS_PER_S: Final = 10e9
_QUICK_SIZES: Final = "1MB,8MB,64MB"
_QUICK_REPEATS: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help=f"KV of each transfer (default: {DEFAULT_SIZES}; quick: {_QUICK_SIZES})",
    )
    parser.add_argument(
        "--rates",
        default=DEFAULT_RATES,
        metavar="RATE,...",
        help=f"limited links, or none (default: {DEFAULT_RATES})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"samples of every case (default: {DEFAULT_REPEATS}; quick: {_QUICK_REPEATS})",
    )
    parser.add_argument(
        "--no-steps", action="store_true", help="leave out the engine's steps beside a transfer"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples: some 20 seconds")
    add_output_options(parser, "transport")


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises UserError and ProfileError."""
    profile = engine_profile(args, engine_settings(args.set))
    repeats = args.repeats
    if repeats is None:
        repeats = _QUICK_REPEATS if args.quick else DEFAULT_REPEATS
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; allowed is 1 or more")
    sizes = _sizes(args.sizes or (_QUICK_SIZES if args.quick else DEFAULT_SIZES))
    rates = [] if args.rates == "none" else _rates(args.rates)
    try:
        source = resolve_model(profile.model.id)
        spec = transport_bench_spec(
            profile,
            source.config,
            resolve_dtype(profile.model.dtype),
            sizes_bytes=sizes,
            rates_bits_per_s=rates,
            repeats=repeats,
            steps_repeats=0 if args.no_steps else STEPS_REPEATS_OF_ONE * repeats,
            steps_bits_per_s=STEPS_BITS_PER_S,
        )
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    check_out_dir(args.out)
    machine = machine_facts()  # before this process adds to the load
    result = with_progress(lambda report: run_transport_bench(spec, available_cpus(), report))
    document = transport_bench_document(spec, source.config, machine, result)
    print_result("transport", document, transport_bench_text(document), as_json=args.json, out_dir=args.out)
    return 0


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        try:
            size = parse_bytes(part)
        except ValueError as error:
            raise UserError(f"--sizes: {error}") from error
        if size < 1:
            raise UserError(f"--sizes has {part.strip()!r}; allowed is 1 B or more")
        sizes.append(size)
    return list(dict.fromkeys(sizes))


def _rates(text: str) -> list[float]:
    rates = []
    for part in text.split(","):
        try:
            rate = parse_bits_per_s(part)
        except ValueError as error:
            raise UserError(f"--rates: {error}") from error
        if not rate:
            raise UserError(
                f"--rates has {part.strip()!r}; a limited link is meant, unlimited is always measured"
            )
        rates.append(rate)
    return list(dict.fromkeys(rates))
