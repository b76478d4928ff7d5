"""How fast one engine is on one core, beside what that core can do.

Prefill: prompts of random tokens, each computed alone, from its arrival to its first token. Decode: steps of a batch
of sequences that have a context already. The share of the limit compares a prefill with the fastest matrix product of
this core and a decode step with its rate of reading memory, both measured between the cases. Prefix caching is off.
"""

import argparse
from typing import Final

from cluster.engine_bench import benchmark_spec, run_benchmark
from cluster.engine_bench_report import engine_bench_document
from cluster.machine_facts import machine_facts
from console.bench_engine_text import engine_bench_text
from console.bench_options import (
    add_engine_options,
    add_output_options,
    choose_core,
    engine_profile,
    engine_settings,
)
from console.bench_output import EXIT_FAILED, check_out_dir, print_result, with_progress
from console.errors import UserError
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

DEFAULT_PREFILL: Final = "128,1024,4096,8000"
DEFAULT_BATCHES: Final = "1,4,16"
DEFAULT_CONTEXTS: Final = "128,4096"
DEFAULT_REPEATS: Final = 5

_POOL_KEYS: Final = "engine.kv_cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        metavar="N",
        help=f"samples of every case (default: {DEFAULT_REPEATS})",
    )
    for option, default, what in (
        ("--prefill", DEFAULT_PREFILL, "prompt lengths in tokens"),
        ("--batch", DEFAULT_BATCHES, "sequences in a decode step"),
        ("--context", DEFAULT_CONTEXTS, "tokens of KV of each of them"),
    ):
        parser.add_argument(option, default=default, metavar="N,...", help=f"{what} (default: {default})")
    parser.add_argument(
        "--where",
        action="store_true",
        help="also say where the time of the longest prefill and of the largest batches goes",
    )
    add_output_options(parser, "engine")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when not one case could be measured. Raises UserError and ProfileError."""
    settings = engine_settings(args.set)
    profile = engine_profile(args, settings)
    core = choose_core(args.core)
    numbers = {
        option: _numbers(f"--{option}", vars(args)[option]) for option in ("prefill", "batch", "context")
    }
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}; allowed is 1 or more")
    try:
        source = resolve_model(profile.model.id)
        spec = benchmark_spec(
            profile,
            source.config,
            resolve_dtype(profile.model.dtype),
            prefill_tokens=numbers["prefill"],
            batches=numbers["batch"],
            contexts=numbers["context"],
            repeats=args.repeats,
            where=args.where,
            size_pool=not any(key.startswith(_POOL_KEYS) for key in settings),
        )
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    check_out_dir(args.out)
    machine = machine_facts()  # before this process adds to the load
    result = with_progress(lambda report: run_benchmark(spec, core, report))
    document = engine_bench_document(spec, source.config, core, machine, result)
    print_result("engine", document, engine_bench_text(document), as_json=args.json, out_dir=args.out)
    problems = [case["problem"] for case in (*document["prefill"], *document["decode"])]
    return EXIT_FAILED if all(problems) else 0


def _numbers(option: str, text: str) -> list[int]:
    numbers: dict[int, None] = {}  # in order, each once
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise UserError(
                f"{option} has {part.strip()!r}; allowed are whole numbers from 1 on, e.g. 1,4,16"
            )
        numbers[int(part)] = None
    return list(numbers)
