"""What each KV codec costs and saves on one core, on KV that the model computed, and what it does to the output.

Speed: all KV of one prompt, frame by frame as a transfer would send it, encoded and decoded into other blocks. Quality:
prompts decoded greedily from KV that went through the codec, against the same KV sent raw; and how far the KV itself
is from what was encoded, layer by layer. Prompts are text in the model's own tokens.
"""

import argparse
from typing import Final

from cluster.codec_bench import codec_bench_spec, run_codec_bench
from cluster.codec_bench_report import codec_bench_document
from cluster.machine_facts import machine_facts
from console.bench_codec_text import codec_bench_text
from console.bench_options import (
    add_engine_options,
    add_output_options,
    choose_core,
    engine_profile,
    engine_settings,
)
from console.bench_output import check_out_dir, print_result, with_progress
from console.errors import UserError
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

_NUMBERS: Final = (
    ("--tokens", 2048, 1, "tokens of the prompt whose KV is measured"),
    ("--prompts", 50, 1, "prompts whose output is compared"),
    ("--prompt-tokens", 256, 1, "tokens of each of them"),
    ("--output-tokens", 64, 2, "tokens of each output"),
    ("--repeats", 9, 1, "samples of every codec"),
)
"""Option, default, least, what it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    for option, default, _, what in _NUMBERS:
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    add_output_options(parser, "codec")


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises UserError and ProfileError."""
    profile = engine_profile(args, engine_settings(args.set))
    core = choose_core(args.core)
    for option, _, least, _ in _NUMBERS:
        given = vars(args)[option.removeprefix("--").replace("-", "_")]
        if given < least:
            raise UserError(f"{option} is {given}; allowed is {least} or more")
    try:
        source = resolve_model(profile.model.id)
        spec = codec_bench_spec(
            profile,
            source.config,
            resolve_dtype(profile.model.dtype),
            kv_tokens=args.tokens,
            prompts=args.prompts,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            repeats=args.repeats,
        )
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    check_out_dir(args.out)
    machine = machine_facts()  # before this process adds to the load
    result = with_progress(lambda report: run_codec_bench(spec, core, report))
    document = codec_bench_document(spec, source.config, core, machine, result)
    print_result("codec", document, codec_bench_text(document), as_json=args.json, out_dir=args.out)
    return 0
