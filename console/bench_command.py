"""Measure one part of the system on this machine."""

import argparse
from types import ModuleType
from typing import Final

from console import bench_breakeven, bench_codec, bench_engine, bench_interference, bench_transport

BENCHMARKS: Final[dict[str, tuple[ModuleType, str]]] = {
    "breakeven": (
        bench_breakeven,
        "from which link on moving KV beats computing it again, measured and forecast",
    ),
    "codec": (bench_codec, "what each KV codec costs and saves on real KV, and what it does to the output"),
    "engine": (bench_engine, "prefill and decode of one engine on one core, beside what the core can do"),
    "interference": (
        bench_interference,
        "running streams beside long prompts: co-located, chunked prefill, disaggregated",
    ),
    "transport": (bench_transport, "KV between two processes over TCP, beside iperf3 and torch.distributed"),
}
"""Name -> its module, which has ``add_arguments`` and ``run`` as a command's has, and its help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="|".join(BENCHMARKS), required=True)
    for name, (module, help_text) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(
            name, help=help_text, description=module.__doc__, allow_abbrev=False
        )
        module.add_arguments(benchmark)


def run(args: argparse.Namespace) -> int:
    exit_code: int = BENCHMARKS[args.benchmark][0].run(args)
    return exit_code
