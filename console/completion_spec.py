"""What can follow what on the command line, read from the commands' own parsers."""

import argparse
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.export import FORMATS
from cluster.profile import builtin_profiles
from cluster.profile_checks import CHOICES
from console.cli import COMMANDS
from engine.downloadable import DOWNLOADABLE

FILES: Final = "files"
RUNS: Final = "runs"
NOTHING: Final = ""


@dataclass(frozen=True, slots=True)
class Value:
    """What an option or a place takes: ``words`` known beforehand, and FILES, RUNS or NOTHING else."""

    words: tuple[str, ...] = ()
    more: str = NOTHING


@dataclass(frozen=True, slots=True)
class Option:
    """``value`` None: it takes none."""

    names: tuple[str, ...]
    help: str
    value: Value | None


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """``path``: ("up",) or ("runs", "show"). ``place``: what stands where no option does."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    place: Value


def command_specs() -> list[CommandSpec]:
    """Every command and command of a command, the outer before the inner."""
    specs: list[CommandSpec] = []
    for command in COMMANDS:
        parser = argparse.ArgumentParser(prog=command.name)
        importlib.import_module(command.module).add_arguments(parser)
        specs += _specs((command.name,), command.help, parser)
    return specs


def _specs(path: tuple[str, ...], text: str, parser: argparse.ArgumentParser) -> Iterator[CommandSpec]:
    options, places = [], list[Value]()
    inner: list[CommandSpec] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            places.append(Value(tuple(action.choices)))
            for name, below in action.choices.items():
                inner += _specs((*path, name), helps.get(name, ""), below)
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            value = None if action.nargs == 0 else _value(action)
            options.append(Option(tuple(action.option_strings), _one_line(action.help), value))
        else:
            places.append(_value(action))
    words = tuple(dict.fromkeys(word for place in places for word in place.words))
    more = next((place.more for place in places if place.more), NOTHING)
    yield CommandSpec(path, text, tuple(options), Value(words, more))
    yield from inner


def _value(action: argparse.Action) -> Value:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        return Value(tuple(map(str, action.choices)))
    if "RUN" in metavar.split("|"):
        return Value(("latest",) if "URL" not in metavar else (), RUNS)
    if action.dest in _WORDS:
        return Value(
            tuple(_WORDS[action.dest]), FILES if {"FILE", "DIR"} & set(metavar.split("|")) else NOTHING
        )
    if {"FILE", "DIR"} & set(metavar.split("|")):
        return Value(more=FILES)
    if "|" in metavar and metavar.islower():
        return Value(tuple(metavar.split("|")))
    return Value()


_WORDS: Final[dict[str, Sequence[str]]] = {
    "profile": tuple(builtin_profiles()),
    "model": ("tiny", *DOWNLOADABLE),
    "mode": CHOICES["cluster.mode"],
    "codec": CHOICES["kv.codec"],
    "handoff": CHOICES["cluster.handoff"],
    "link_backend": CHOICES["link.backend"],
    "format": FORMATS,
}
"""Values that a parser does not know as its choices because the profile checks them."""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split())
