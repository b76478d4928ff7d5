"""Drive a running cluster with a load of a profile, or with one burst, and print what the client saw.

NAME is a load of the profile (steady is in every one), burst, or the file of a public trace: Azure's CSV or Mooncake's
JSON lines, told by the ending .csv or .jsonl. A trace is sent once, by its own times and lengths unless --speed and
--lengths bend them, and what had to be cut to fit the model's context is said. Without --url the load goes to the
youngest cluster that is up on this machine, under the profile it runs with. The figures are this client's own: TTFT
from sending the request, ITL between the chunks that arrive.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from cluster.control import InjectBurst
from cluster.events import Event
from cluster.load import LoadError, LoadGenerator
from cluster.load_client import RequestResult, ServedModel, ServerUnreachable, served_model
from cluster.profile import Profile, load_profile
from cluster.run_dir import find_run, latest_run
from cluster.samples import Samples
from cluster.trace import (
    ScaledTrace,
    Scaling,
    TraceError,
    TraceRequest,
    is_trace,
    planned_requests,
    read_trace,
    scale_trace,
)
from console.errors import EXIT_ENVIRONMENT, UserError
from console.signals import Signals
from console.text_format import clean
from console.up import DEFAULT_PROFILE
from engine.model_ids import ModelError

BURST: Final = "burst"
DRAIN_S: Final = 30.0
MAX_TRACE_IN_FLIGHT: Final = 512
"""Requests of a trace open at once; those beyond it are skipped and counted."""

MAX_COMPLAINT_CHARS: Final = 400

_PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes and which profile's loads can be named."""

    url: str
    profile: Profile


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as their file tells them, and how they are to be bent."""

    requests: list[TraceRequest]
    scaling: Scaling


@dataclass(slots=True)
class ClientSamples:
    """Latencies of the requests that finished, in ms; of the others, what the server said to the first of a kind."""

    ttft_ms: Samples = field(default_factory=Samples)
    itl_ms: Samples = field(default_factory=Samples)
    e2el_ms: Samples = field(default_factory=Samples)
    complaints: dict[str, str] = field(default_factory=dict)  # failure -> message

    def add(self, result: RequestResult) -> None:
        if not result.failure:
            self.ttft_ms.add(result.ttft_s * 1000.0)
            self.itl_ms.extend(gap * 1000.0 for gap in result.itl_s)
            self.e2el_ms.add(result.e2el_s * 1000.0)
        elif result.complaint:
            self.complaints.setdefault(result.failure, result.complaint)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME|FILE",
        help="a load of the profile, e.g. steady; or burst; or a trace: FILE.csv, FILE.jsonl",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run", metavar="RUN", help="the running cluster (default: the youngest)")
    where.add_argument("--url", metavar="URL", help="a router's address, e.g. http://127.0.0.1:8765")
    parser.add_argument("--profile", metavar="NAME|FILE", help="take the load from this profile")
    parser.add_argument(
        "--duration", type=float, metavar="S", help="stop after S seconds (default: on Ctrl+C)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second")
    parser.add_argument("--prompts", type=int, metavar="N", help="burst: number of prompts")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens in each prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate for each")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed gives other arrivals and prompts")
    parser.add_argument("--speed", type=float, metavar="X", help="trace: X times as fast")
    parser.add_argument(
        "--lengths", type=float, metavar="X", help="trace: prompts and answers X times as long"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="trace: only the first N")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.duration is not None and not 0 < args.duration < math.inf:
        raise UserError(f"--duration is {args.duration:g}; allowed is above 0")
    trace = _trace(args)
    target = _target(args)
    profile = target.profile if trace is not None else _with_options(target.profile, args)
    return asyncio.run(_drive(args, Target(target.url, profile), trace))


def _trace(args: argparse.Namespace) -> Trace | None:
    """The trace that NAME is a file of. Raises UserError for a bad one, and for options that do not go with it."""
    bends = {"--speed": args.speed, "--lengths": args.lengths, "--requests": args.requests}
    shapes = {
        "--rate": args.rate, "--prompts": args.prompts, "--prompt-tokens": args.prompt_tokens,
        "--max-tokens": args.max_tokens,
    }  # fmt: skip
    is_file = is_trace(args.name)
    for option, value in (shapes if is_file else bends).items():
        if value is not None:
            raise UserError(f"{option} {value:g} does not go with load {args.name}")
    if not is_file:
        return None
    for option, value in bends.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{option} is {value:g}; allowed is above 0")
    scaling = Scaling(args.speed or 1.0, args.lengths or 1.0, args.requests or 0)
    try:
        return Trace(read_trace(Path(args.name)), scaling)
    except TraceError as error:
        raise UserError(str(error)) from error


def _target(args: argparse.Namespace) -> Target:
    if args.url is not None:
        _check_url(args.url)
        return Target(args.url, load_profile(args.profile or DEFAULT_PROFILE))
    record = find_run(args.run) if args.run else latest_run(alive_only=True)
    if record is None or record.info is None or not record.is_alive:
        which = f"run {args.run} is not up" if args.run else "no cluster of this data directory is up"
        raise UserError(
            f"{which}; start one with pdconsole up, or name it with --run DIR or --url", EXIT_ENVIRONMENT
        )
    return Target(record.info.url, load_profile(args.profile) if args.profile else record.info.profile)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        is_one = False
    if not is_one:
        raise UserError(f"--url is {url!r}; allowed is a URL like http://127.0.0.1:8765")


def _with_options(profile: Profile, args: argparse.Namespace) -> Profile:
    """``profile`` with the chosen load or burst changed as the options say. Raises UserError."""
    shape = {"prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
    steady_only = {"rate_per_s": args.rate, "seed": args.seed}
    is_burst = args.name == BURST
    wrong = {"--prompts": None if is_burst else args.prompts} | (
        {"--rate": args.rate, "--seed": args.seed, "--duration": args.duration} if is_burst else {}
    )
    for option, value in wrong.items():
        if value is not None:
            raise UserError(f"{option} {value:g} does not go with load {args.name}")
    options = shape | ({"prompts": args.prompts} if is_burst else steady_only)
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if not (0 < value < math.inf) and key != "seed":
            raise UserError(
                f"--{key.removesuffix('_per_s').replace('_', '-')} is {value:g}; allowed is above 0"
            )
    if is_burst:
        return msgspec.structs.replace(profile, burst=msgspec.structs.replace(profile.burst, **given))
    if args.name not in profile.load:
        raise UserError(f"load {args.name!r} is unknown; allowed: {', '.join((*profile.load, BURST))}")
    load = msgspec.structs.replace(profile.load[args.name], **given)
    return msgspec.structs.replace(profile, load={**profile.load, args.name: load})


async def _drive(args: argparse.Namespace, target: Target, trace: Trace | None) -> int:
    signals = Signals()
    try:
        model = await served_model(target.url)
    except ServerUnreachable as error:
        raise UserError(str(error), EXIT_ENVIRONMENT) from error
    samples = ClientSamples()
    generator = LoadGenerator(target.url, target.profile, _to_nobody, model.id, on_result=samples.add)
    scaled = None if trace is None else _fitted(trace, model)
    began_at = time.monotonic()
    try:
        if scaled is not None:
            await _send_trace(args, scaled, generator, signals)
        else:
            await _send(args, target.profile, generator, signals)
    except (LoadError, ModelError) as error:
        raise UserError(str(error)) from error
    finally:
        await generator.close()
    report = _report(args.name, target.url, generator, samples, time.monotonic() - began_at)
    if scaled is not None:
        report["trace"] = {
            "sent_from": scaled.in_file, "requests": len(scaled.requests), "prompts_cut": scaled.cut_prompts,
            "answers_cut": scaled.cut_outputs, "detail": scaled.detail,
        }  # fmt: skip
    print(json.dumps(report, indent=2) if args.json else _text(report))
    if signals.count and args.duration is not None:
        return 130
    return 0 if generator.counts.finished or not generator.counts.sent else 1


def _fitted(trace: Trace, model: ServedModel) -> ScaledTrace:
    if not model.max_model_len:
        raise UserError(
            f"the server does not say how long a context model {model.id} takes", EXIT_ENVIRONMENT
        )
    return scale_trace(trace.requests, trace.scaling, model.max_model_len)


async def _send_trace(
    args: argparse.Namespace, trace: ScaledTrace, generator: LoadGenerator, signals: Signals
) -> None:
    print(f"{args.name}: {trace.detail}", file=sys.stderr)
    sending = generator.follow(
        Path(args.name).name,
        trace.detail,
        lambda corpus: planned_requests(trace, corpus, args.seed or 0),
        "pdconsole load",
        MAX_TRACE_IN_FLIGHT,
    )
    await signals.race(sending, args.duration)
    await generator.stop("pdconsole load")
    await signals.race(generator.drain(DRAIN_S))


async def _send(
    args: argparse.Namespace, profile: Profile, generator: LoadGenerator, signals: Signals
) -> None:
    if args.name == BURST:
        burst = profile.burst
        command = InjectBurst(
            prompts=burst.prompts, prompt_tokens=burst.prompt_tokens, max_tokens=burst.max_tokens
        )
        await generator.burst(command)
        await signals.race(generator.drain(float("inf")))
        return
    await generator.start(args.name, "pdconsole load")
    await signals.race(asyncio.Event().wait(), args.duration)
    await generator.stop("pdconsole load")
    await signals.race(generator.drain(DRAIN_S))


def _report(
    name: str, url: str, generator: LoadGenerator, samples: ClientSamples, duration_s: float
) -> dict[str, Any]:
    counts = generator.counts
    return {
        "load": name,
        "url": url,
        "duration_s": round(duration_s, 3),
        "requests": {
            "sent": counts.sent,
            "finished": counts.finished,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "skipped": counts.skipped,
            "failures": dict(counts.failures),
            "complaints": samples.complaints,
        },
        "ttft_ms": _percentiles(samples.ttft_ms),
        "itl_ms": _percentiles(samples.itl_ms),
        "e2el_ms": _percentiles(samples.e2el_ms),
        "schedule_lag_ms": {"p99": round(generator.lag_p99_s * 1000.0, 3)},
    }


def _percentiles(samples: Samples) -> dict[str, float | None]:
    figures = {f"p{q}": samples.percentile(q) for q in _PERCENTILES} | {"max": samples.max}
    return {name: None if value is None else round(value, 3) for name, value in figures.items()}


def _text(report: dict[str, Any]) -> str:
    requests = report["requests"]
    counts = ", ".join(
        f"{requests[key]} {key}" for key in ("sent", "finished", "failed", "cancelled", "skipped")
    )
    lines = [f"load {report['load']} on {report['url']}: {report['duration_s']:.1f} s", f"requests  {counts}"]
    if requests["failures"]:
        lines.append(
            "failures  " + ", ".join(f"{count} {kind}" for kind, count in requests["failures"].items())
        )
    for kind, said in requests["complaints"].items():
        lines.append(f"first {kind}  {clean(said)[:MAX_COMPLAINT_CHARS]}")
    names = ("p50", "p90", "p99", "max")
    lines.append("".join(f"{name:>10}" for name in ("client ms", *names)))
    for label, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2EL", "e2el_ms")):
        values = [report[key][name] for name in names]
        lines.append(
            f"{label:>10}" + "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in values)
        )
    if "trace" in report:
        sent = f"{requests['sent']} of {report['trace']['requests']} requests sent"
        lines.insert(1, f"trace     {report['trace']['detail']}; {sent}")
    lines.append(f"schedule lag p99 {report['schedule_lag_ms']['p99']:.2f} ms (lateness of this client)")
    return "\n".join(lines)


def _to_nobody(_: Event) -> None:
    """A client outside the cluster does not write its log; its requests show there by themselves."""
