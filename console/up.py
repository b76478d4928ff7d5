"""Start a cluster: router, prefill and decode workers as real processes on this machine.

In a terminal the console opens; with --headless, --json, TERM=dumb, or when stdin, stdout or stderr is not a
terminal, the cluster runs without it.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cluster.control import SupervisorSpec
from cluster.profile import Profile, ProfileError, builtin_profiles, load_profile, parse_setting
from cluster.run_dir import make_run_dir
from console.console_options import add_console_arguments, console_options, with_config
from console.errors import UserError
from console.tty import why_no_screen
from console.up_plan import UpPlan
from engine.model_ids import ModelError, resolve_model

DEFAULT_PROFILE: Final = "10gbe"

_OPTION_KEYS: Final = {
    "model": "model.id",
    "mode": "cluster.mode",
    "prefill": "cluster.prefill",
    "decode": "cluster.decode",
    "codec": "kv.codec",
    "handoff": "cluster.handoff",
    "fallback": "cluster.fallback",
    "target": "link.target",
    "link_backend": "link.backend",
    "port": "router.port",
}
"""Options that are short for ``--set KEY=...``. The profile checks their values and says what is allowed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="this run's directory (default: a new one among the runs)"
    )
    run.add_argument(
        "--headless", action="store_true", help="no console: progress on stderr, summary on stdout"
    )
    run.add_argument(
        "--duration", type=_seconds, metavar="S", help="headless: stop S seconds after the cluster is ready"
    )
    run.add_argument(
        "--load",
        default="none",
        metavar="NAME",
        help="start this load of the profile when ready; none: no load (default)",
    )
    run.add_argument(
        "--detach", action="store_true", help="no console: leave the cluster running (see: attach, stop)"
    )
    run.add_argument("--json", action="store_true", help="headless; print the summary as one JSON document")
    run.add_argument("--quiet", action="store_true", help="headless: only errors on stderr")
    add_console_arguments(parser)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose and change a profile; every command that brings a cluster up has them."""
    group = parser.add_argument_group("cluster")
    names = ", ".join(builtin_profiles())
    group.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"{names}, or a .toml file (default: {DEFAULT_PROFILE})",
    )
    group.add_argument(
        "--model", metavar="ID|DIR", help="a model id (see: pdconsole model list) or a directory"
    )
    group.add_argument("--mode", metavar="MODE", help="disagg or colocated")
    group.add_argument("--prefill", type=int, metavar="N", help="number of prefill workers")
    group.add_argument("--decode", type=int, metavar="N", help="number of decode workers")
    group.add_argument("--codec", metavar="CODEC", help="KV on the wire: raw, int8, lossless or auto")
    group.add_argument(
        "--handoff", metavar="WHEN", help="always, auto or never: does a prompt go to a prefill worker"
    )
    group.add_argument("--fallback", metavar="on|off", help="off: failures reach the client")
    group.add_argument(
        "--target",
        metavar="NAME[@LINK]",
        help="give the link the ratio this system has (see: pdconsole plan --list-targets)",
    )
    group.add_argument("--link-backend", metavar="BACKEND", help="auto, netns, pacing or none")
    group.add_argument("--port", type=int, metavar="N", help="the router's HTTP port; 0: any free one")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key of the profile; may be repeated",
    )


def profile_from_args(args: argparse.Namespace, base: Mapping[str, Any] | None = None) -> Profile:
    """The profile that the options name, over it ``base`` (dotted key -> value), over that what the options change.

    Raises ProfileError.
    """
    options = vars(args)
    overrides: dict[str, Any] = {
        key: options[option] for option, key in _OPTION_KEYS.items() if options[option] is not None
    }
    overrides.update(parse_setting(setting) for setting in args.set)
    return load_profile(args.profile, {**(base or {}), **overrides})


def run(args: argparse.Namespace) -> int:
    profile = profile_from_args(args)
    load = "" if args.load == "none" else args.load
    if load and load not in profile.load:
        raise ProfileError(f"--load {load!r} is unknown; allowed: none, {', '.join(profile.load)}")
    try:
        resolve_model(profile.model.id)
    except ModelError as error:
        raise UserError(f"--model: {error}") from error
    why_headless = why_no_screen()
    headless = bool(args.headless or args.json or why_headless)
    if args.duration is not None and not headless and not args.detach:
        raise UserError("--duration needs --headless; the console runs until you quit it")
    if args.detach and (args.headless or args.json or args.duration is not None):
        raise UserError("--detach goes without --headless, --json and --duration: nobody is there for them")
    options = console_options(args)
    if why_headless and not (args.headless or args.json or args.detach) and sys.stderr.isatty():
        print(f"pdconsole: no screen, {why_headless}; headless", file=sys.stderr)
    kind = "detached" if args.detach else "headless" if headless else "interactive"
    if kind == "interactive":
        options = with_config(options)
    name, run_dir = make_run_dir(args.run_dir)
    plan = UpPlan(
        spec=SupervisorSpec(run=name, run_dir=str(run_dir), profile=profile, load=load),
        duration_s=args.duration,
        json=args.json,
        quiet=args.quiet,
        console=options,
    )
    # Textual takes 0.4 s to import, and a headless run must not depend on it.
    module = importlib.import_module(f"console.{kind}")
    exit_code: int = module.run(plan)
    return exit_code


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed is a number of seconds above 0")
    return seconds
