"""Does moving a prompt's KV beat computing it again? A table for prompt lengths and links, and one sentence.

Links are profiles (1gbe, 10gbe, ...) or rates (40gbit). The prefill rate is --prefill-tps, or the one that the
youngest run of this model measured on this machine; with --target it is a GPU system's, from published figures.
With --trace the question is another one: how many prefill and how many decode workers for these requests and limits.
"""

import argparse
import dataclasses
import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.planner import PlanLink, kv_bytes_per_token, plan_table, plan_verdict
from cluster.profile import builtin_profiles, load_profile
from cluster.run_dir import list_runs
from cluster.targets import all_links
from cluster.units import format_bits_per_s, parse_bits_per_s
from console import plan_target
from console.errors import UserError
from console.plan_text import plan_text
from console.summary_text import MIN_SERVED_TOKENS, prefill_figure, read_summary
from console.up import DEFAULT_PROFILE
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, resolve_model

DEFAULT_MODEL: Final = "tiny"
DEFAULT_TOKENS: Final = "100,1000,8000"
DEFAULT_LINKS: Final = "1gbe,10gbe,100gbe"
DEFAULT_ROUNDS: Final = 3

_TRACE_ONLY: Final = (
    "slo",
    "nodes",
    "profile",
    "engine",
    "like",
    "speed",
    "lengths",
    "requests",
    "out",
    "validate",
    "rounds",
)


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Prompt tokens one worker computes per second, and where the figure comes from."""

    tokens_per_s: float
    origin: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="ID|DIR", help=f"default: {DEFAULT_MODEL}")
    parser.add_argument(
        "--tokens",
        default=DEFAULT_TOKENS,
        metavar="N,...",
        help=f"prompt lengths (default: {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--link",
        metavar="NAME,...",
        help=f"profiles or rates (default: {DEFAULT_LINKS}; with --target: the links that such a system may have)",
    )
    parser.add_argument(
        "--prefill-tps", type=float, metavar="N", help="prompt tokens per second of one prefill worker"
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="auto (what this machine computes in, default), float32 or bfloat16",
    )
    parser.add_argument(
        "--target", metavar="NAME[@LINK]", help="a GPU system by name: its model, prefill rate and links"
    )
    parser.add_argument("--list-targets", action="store_true", help="list the GPU systems and their links")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    sizing = parser.add_argument_group("how many workers of each role", "simulates the requests of a trace")
    sizing.add_argument("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSON lines")
    sizing.add_argument("--slo", metavar="LIMITS", help="default: ttft=2s,itl=50ms; also tpot, e2el")
    sizing.add_argument(
        "--nodes", type=int, metavar="N", help="workers in all (default: as many as are needed)"
    )
    sizing.add_argument("--profile", metavar="NAME|FILE", help="the workers' engine, link and router")
    sizing.add_argument(
        "--engine",
        type=Path,
        metavar="FILE",
        help="engine.json of bench engine --out (default: measure for some seconds)",
    )
    sizing.add_argument(
        "--like",
        metavar="RUN",
        action="append",
        help="correct the forecast by what the requests of this run took, whatever its load and split were; "
        "may be given for a disaggregated and for a co-located one",
    )
    sizing.add_argument("--speed", type=float, metavar="X", help="X times as fast")
    sizing.add_argument("--lengths", type=float, metavar="X", help="prompts and answers X times as long")
    sizing.add_argument("--requests", type=int, metavar="N", help="only the first N")
    sizing.add_argument("--out", type=Path, metavar="FILE", help="also draw it; .png or .svg")
    sizing.add_argument(
        "--validate",
        nargs="?",
        const="1:1",
        metavar="P:D,...",
        help="run the trace on real clusters too, and print forecast beside measured; 0:D is co-located (default: 1:1)",
    )
    sizing.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"--validate: each split so often, in turns (default: {DEFAULT_ROUNDS})",
    )


def run(args: argparse.Namespace) -> int:
    if args.trace is not None:
        return _run_trace(args)
    for option in _TRACE_ONLY:
        if vars(args)[option] is not None:
            raise UserError(f"--{option} needs --trace FILE")
    if args.list_targets:
        return plan_target.list_targets(as_json=args.json)
    if args.target is not None:
        return _run_target(args)
    return plan(
        args.model or DEFAULT_MODEL,
        args.tokens,
        args.link or DEFAULT_LINKS,
        args.prefill_tps,
        args.dtype or "auto",
        as_json=args.json,
    )


def _run_trace(args: argparse.Namespace) -> int:
    refused: dict[str, Any] = {
        "prefill-tps": args.prefill_tps,
        "target": args.target,
        "list-targets": args.list_targets or None,
        "tokens": None if args.tokens == DEFAULT_TOKENS else args.tokens,
    }
    for option, value in refused.items():
        if value is not None:
            raise UserError(f"--{option} does not go with --trace")
    link = None if args.link is None else _parse_link(args.link)
    if args.rounds is not None and not args.validate:
        raise UserError("--rounds needs --validate")
    args.profile = args.profile or DEFAULT_PROFILE
    args.rounds = DEFAULT_ROUNDS if args.rounds is None else args.rounds
    return int(importlib.import_module("console.plan_trace").run(args, link))


def _run_target(args: argparse.Namespace) -> int:
    for option in ("model", "prefill_tps", "dtype"):
        if vars(args)[option] is not None:
            raise UserError(
                f"--{option.replace('_', '-')} is given beside --target {args.target}, which says it; "
                "allowed is one of the two"
            )
    target, names = plan_target.resolve(args.target, args.link)
    links = [_parse_link(name) for name in names]
    lengths = _parse_tokens(args.tokens)
    return plan_target.plan(target, links, lengths, plan_target.measured_here(), as_json=args.json)


def plan(model: str, tokens: str, links: str, prefill_tps: float | None, dtype: str, *, as_json: bool) -> int:
    """Print the table. Exit code 0 whatever the verdict. Raises UserError and ProfileError for what cannot be read."""
    try:
        source = resolve_model(model)
        dtype = resolve_dtype(dtype)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    lengths = _parse_tokens(tokens)
    chosen_links = [_parse_link(name) for name in links.split(",")]
    rate = _prefill_rate(source.model_id, dtype, prefill_tps)
    bytes_per_token = kv_bytes_per_token(source.config, dtype)
    rows = plan_table(bytes_per_token, lengths, chosen_links, rate.tokens_per_s if rate else None)
    if as_json:
        document = {
            "model": source.model_id,
            "dtype": dtype,
            "kv_bytes_per_token": bytes_per_token,
            "prefill_tokens_per_s": rate.tokens_per_s if rate else None,
            "prefill_rate_from": rate.origin if rate else None,
            "b_star_bytes_per_s": rate.tokens_per_s * bytes_per_token if rate else None,
            "max_model_len": source.config.max_model_len,
            "rows": [dataclasses.asdict(row) for row in rows],
            "verdict": plan_verdict(rows),
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"model {source.model_id}, {dtype}: {bytes_per_token:,} bytes of KV per token")
    if rate:
        b_star = format_bits_per_s(rate.tokens_per_s * bytes_per_token * 8)
        print(
            f"prefill {rate.tokens_per_s:,.0f} tokens/s ({rate.origin}); B* = {b_star}: a slower link loses"
        )
    else:
        print(
            f"no prefill rate: no run of this model answered {MIN_SERVED_TOKENS:,} prompt tokens here; "
            "give --prefill-tps N, or run\n"
            f"  pdconsole up --model {model} --headless --duration 20 --load steady"
        )
    print()
    print(plan_text(rows))
    if max(lengths) > source.config.max_model_len:
        print(f"(this model's context ends at {source.config.max_model_len:,} tokens)")
    print()
    print(plan_verdict(rows))
    return 0


def _parse_tokens(text: str) -> list[int]:
    lengths = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise UserError(
                f"--tokens has {part.strip()!r}; allowed are whole numbers from 1 on, e.g. {DEFAULT_TOKENS}"
            )
        lengths.append(int(part))
    return lengths


def _parse_link(text: str) -> PlanLink:
    name = text.strip()
    if name in builtin_profiles():
        profile = load_profile(name)
        link = PlanLink(name, profile.link_bits_per_s, profile.link.delay_ms)
    elif name in all_links():
        link = PlanLink(name, all_links()[name].bits_per_s)
    else:
        try:
            link = PlanLink(name, parse_bits_per_s(name))
        except ValueError as error:
            known = ", ".join(dict.fromkeys([*builtin_profiles(), *all_links()]))
            allowed = f"{known}, or a rate such as 40gbit"
            raise UserError(f"--link has {name!r}; allowed: {allowed}") from error
    if link.bits_per_s <= 0:
        raise UserError(
            f"--link {name}: an unlimited link has no speed to plan with; allowed is one with a rate"
        )
    return link


def _prefill_rate(model: str, dtype: str, given: float | None) -> PrefillRate | None:
    if given is not None:
        if not (math.isfinite(given) and given > 0):
            raise UserError(f"--prefill-tps is {given:g}; allowed is a number above 0")
        return PrefillRate(given, "given")
    for record in reversed(list_runs()):
        summary = read_summary(record.path) or {}
        measured = prefill_figure(summary, "prefill_tokens_per_s")
        if measured and summary.get("model") == model and summary.get("dtype") == dtype:
            return PrefillRate(measured, f"measured in run {record.run}")
    return None
