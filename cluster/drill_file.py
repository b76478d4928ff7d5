"""Reads a drill from its TOML file (``profiles/drills``):

    title, promise      what happens, and what the cluster promises
    [profile.SECTION]   what it changes of the profile
    [requests.NAME]     a group of requests; as often as needed
    [[faults]]          what is broken, at a time or on events
    [expect]            figures of ``drill_figures`` and what they have to be

An unknown key or value is one line that names file, key, value and the nearest valid one.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cluster.drill import (
    ANY_OF_ROLE,
    DEFAULT_TIMEOUT_S,
    DRILL_PROFILE,
    LINK_TARGET,
    ROLES,
    ROUTER,
    Drill,
    DrillPart,
    FaultRule,
    RequestGroup,
)
from cluster.drill_checks import nearest, problem_in
from cluster.drill_expectation import parse_expectation
from cluster.drill_figures import FIGURES
from cluster.profile import ProfileError, given_on, load_profile

_SOME_PROFILE: Final = "loopback"

S = TypeVar("S", bound=msgspec.Struct)

DRILL_DIR: Final = Path(__file__).resolve().parent.parent / "profiles" / "drills"


class DrillError(Exception):
    """A drill cannot be used; the message is one line for the user (exit code 2)."""


class _File(DrillPart, frozen=True, kw_only=True):
    title: str
    promise: str
    requests: dict[str, RequestGroup]
    faults: list[FaultRule] = msgspec.field(default_factory=list)
    expect: dict[str, Any] = msgspec.field(default_factory=dict)
    profile: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S


def builtin_drills() -> dict[str, Path]:
    """Name -> file of every drill that ships."""
    return {path.stem: path for path in sorted(DRILL_DIR.glob("*.toml"))}


def load_drill(name_or_file: str) -> Drill:
    """Read a shipped drill by name or a TOML file by path. Raises DrillError: file, key, value, what is allowed."""
    shipped = builtin_drills()
    path = shipped.get(name_or_file)
    if path is None:
        path = Path(name_or_file)
        if path.suffix != ".toml" and not path.is_file():
            raise DrillError(
                f"drill {name_or_file!r} is unknown; allowed: {', '.join(shipped)}, or a .toml file"
                + nearest(name_or_file, shipped)
            )
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DrillError(f"drill {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DrillError(f"drill {path}: not valid TOML: {error}") from error
    return drill_from_tree(tree, path.stem, f"drill {path}")


def drill_from_tree(tree: dict[str, Any], name: str, where: str) -> Drill:
    """Check keys, types and values. Raises DrillError beginning with ``where``."""
    _check_keys(tree, _File, where, "")
    for part, struct in (("requests", RequestGroup), ("profile", None)):
        tables = tree.get(part, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise DrillError(f"{where}: {part} is {tables!r}; allowed are tables [{part}.NAME]")
        for key, table in tables.items():
            if struct is not None:
                _check_keys(table, struct, where, f"{part}.{key}.")
                _converted(table, struct, where, f"{part}.{key}.")  # msgspec does not name the table
    faults = tree.get("faults", [])
    if not isinstance(faults, list) or not all(isinstance(fault, dict) for fault in faults):
        raise DrillError(f"{where}: faults is {faults!r}; allowed are tables [[faults]]")
    for number, fault in enumerate(faults):
        _check_keys(fault, FaultRule, where, f"faults[{number}].")
    file = _converted(tree, _File, where, "")
    expect = []
    for key, value in file.expect.items():
        try:
            expect.append(parse_expectation(key, value, FIGURES))
        except ValueError as error:
            raise DrillError(f"{where}: expect.{error}") from error
    drill = Drill(
        name=name,
        title=file.title,
        promise=file.promise,
        requests=file.requests,
        faults=tuple(file.faults),
        expect=tuple(expect),
        settings={
            f"{section}.{key}": value for section, keys in file.profile.items() for key, value in keys.items()
        },
        timeout_s=file.timeout_s,
    )
    problem = problem_in(drill) or _settings_problem(drill)
    if problem:
        raise DrillError(f"{where}: {problem}")
    return drill


def check_targets(drill: Drill, worker_ids: Iterable[str]) -> None:
    """Every process that the drill names is in the cluster. Raises DrillError with the nearest valid name."""
    ids = [*worker_ids, ROUTER]
    generic = [*ROLES, *(ANY_OF_ROLE + role for role in ROLES), LINK_TARGET]
    for number, rule in enumerate(drill.faults):
        for key, value in (("target", rule.target), ("worker", rule.worker)):
            allowed = [*ids, *generic] if key == "target" else ids
            if value and value not in allowed:
                raise DrillError(
                    f"drill {drill.name}: faults[{number}].{key} is {value!r}; allowed: {', '.join(allowed)}"
                    + nearest(value, allowed)
                )


def _settings_problem(drill: Drill) -> str:
    """What a profile does not take of the drill's settings."""
    try:
        load_profile(_SOME_PROFILE, DRILL_PROFILE | drill.settings)
    except ProfileError as error:
        return "[profile] " + str(error).removeprefix("--set ").removeprefix(f"{given_on(_SOME_PROFILE)}: ")
    return ""


def _converted(tree: dict[str, Any], struct: type[S], where: str, prefix: str) -> S:
    try:
        return msgspec.convert(tree, struct)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        key = f"{prefix}{at.rstrip('`')}" if at else prefix.rstrip(".")
        raise DrillError(f"{where}: {key + ': ' if key else ''}{what}") from error


def _check_keys(tree: dict[str, Any], struct: type[msgspec.Struct], where: str, prefix: str) -> None:
    allowed = [field.name for field in msgspec.structs.fields(struct)]
    for key in tree:
        if key not in allowed:
            raise DrillError(
                f"{where}: unknown key {prefix}{key}; allowed here: {', '.join(allowed)}{nearest(key, allowed)}"
            )
