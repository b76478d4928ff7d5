"""Options that benchmarks share: which model, which engine, which core, where the result goes."""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.cpu_plan import available_cpus
from cluster.profile import Profile, ProfileError, load_profile, parse_setting
from console.errors import UserError
from console.up import DEFAULT_PROFILE

_SECTIONS: Final = ("engine.", "model.")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Of those that measure on one core."""
    add_model_options(parser)
    parser.add_argument(
        "--core", type=int, metavar="N", help="the core to measure on (default: the last one)"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"takes model and engine from it (default: {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--model", metavar="ID|DIR", help="a model id (see: pdconsole model list) or a directory"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="auto, float32 or bfloat16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the profile's engine or model section; may be repeated",
    )


def add_output_options(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every sample")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"also write {name}.json and {name}.txt into this directory"
    )


def engine_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The values of ``--set``. Raises UserError and ProfileError."""
    return dict(_setting(text) for text in texts)


def settings_but(texts: Sequence[str], decided: Collection[str]) -> dict[str, Any]:
    """The values of ``--set`` where any key may be set but those that the benchmark has ``decided``.

    Raises UserError and ProfileError.
    """
    settings = dict(parse_setting(text) for text in texts)
    for key in settings:
        if key in decided:
            raise UserError(f"--set {key} is given; the benchmark decides that itself")
    return settings


def _setting(text: str) -> tuple[str, Any]:
    key, value = parse_setting(text)
    if not key.startswith(_SECTIONS):
        raise UserError(f"--set {key} does not change an engine; allowed are engine.KEY and model.KEY")
    if key == "engine.prefix_caching" and value is not False:
        raise UserError(f"--set {text}: every token is computed here; allowed is false")
    return key, value


def engine_profile(args: argparse.Namespace, settings: dict[str, Any]) -> Profile:
    """Raises ProfileError."""
    given = {"model.id": args.model, "model.dtype": args.dtype}
    overrides = {key: value for key, value in given.items() if value is not None}
    profile = load_profile(args.profile, overrides | settings)
    if profile.model.device != "cpu":
        raise ProfileError(f"model.device is {profile.model.device!r}; one core is measured: allowed is cpu")
    return profile


def choose_core(core: int | None) -> int:
    """The last one by default: the first one serves most of a machine's interrupts. Raises UserError."""
    cores = available_cpus()
    if core is None:
        return cores[-1]
    if core not in cores:
        raise UserError(f"--core is {core}; allowed: {', '.join(map(str, cores))}")
    return core
