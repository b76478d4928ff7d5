"""The operator's own settings: one TOML file, read when a console opens.

    [console]
    theme = "nord"
    ascii = true
    redraws_per_s = 1.0

    [keys]
    burst = "f5"
    faster = "plus,ctrl+f"      # several keys; "" takes a key away

Whatever it does not say keeps its default; the command line wins over both.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import platformdirs
from textual.theme import BUILTIN_THEMES

from console.actions import ACTIONS, LIVE, REPLAY, actions_of
from console.errors import UserError

CONFIG_FILE: Final = "config.toml"
DEFAULT_THEME: Final = "textual-dark"
DEFAULT_REDRAWS_PER_S: Final = 2.0
MIN_REDRAWS_PER_S: Final = 0.2
MAX_REDRAWS_PER_S: Final = 10.0
NEVER_WITHOUT: Final = ("quit", "interrupt", "help")

_SECTIONS: Final = ("console", "keys")
_CONSOLE_KEYS: Final = ("theme", "ascii", "redraws_per_s")
_KEY: Final = re.compile(r"(?:(?:ctrl|shift|alt)\+)*(?:[a-z0-9]+(?:_[a-z0-9]+)*|[A-Z])")


class ConfigError(UserError):
    """The file says something that is not allowed; the message names it."""


@dataclass(frozen=True, slots=True)
class Config:
    """``said`` names the settings ("theme", "keys.burst") that the file gave."""

    path: Path
    theme: str = DEFAULT_THEME
    ascii_only: bool = False
    redraws_per_s: float = DEFAULT_REDRAWS_PER_S
    keymap: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    said: frozenset[str] = frozenset()

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(setting, value, where it came from) of each, as ``doctor`` shows them."""
        values = {
            "theme": self.theme,
            "ascii": str(self.ascii_only).lower(),
            "redraws_per_s": f"{self.redraws_per_s:g}",
        }
        for name, value in values.items():
            yield name, value, str(self.path) if name in self.said else "default"
        for action_id, keys in sorted(self.keymap.items()):
            yield f"keys.{action_id}", keys or "(no key)", str(self.path)


def config_path() -> Path:
    """``PDCONSOLE_HOME``, else the platform's directory for the user's configuration, plus ``config.toml``."""
    home = os.environ.get("PDCONSOLE_HOME")
    base = (
        Path(home).expanduser() if home else Path(platformdirs.user_config_dir("pdconsole", appauthor=False))
    )
    return base / CONFIG_FILE


def load_config(path: Path | None = None) -> Config:
    """The defaults where there is no file. Raises ConfigError."""
    path = config_path() if path is None else path
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return _checked(path, tree)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _checked(path: Path, tree: dict[str, Any]) -> Config:
    """Raises ValueError."""
    _known(tree, _SECTIONS, "section")
    console, keys = (_table(tree, name) for name in _SECTIONS)
    _known(console, _CONSOLE_KEYS, "console.")
    theme = console.get("theme", DEFAULT_THEME)
    if theme not in BUILTIN_THEMES:
        raise ValueError(f"console.theme is {theme!r}; allowed: {', '.join(sorted(BUILTIN_THEMES))}")
    ascii_only = console.get("ascii", False)
    if not isinstance(ascii_only, bool):
        raise ValueError(f"console.ascii is {ascii_only!r}; allowed: true, false")
    rate = console.get("redraws_per_s", DEFAULT_REDRAWS_PER_S)
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not is_number or not MIN_REDRAWS_PER_S <= rate <= MAX_REDRAWS_PER_S:
        raise ValueError(
            f"console.redraws_per_s is {rate!r}; allowed: {MIN_REDRAWS_PER_S:g} to {MAX_REDRAWS_PER_S:g}"
        )
    return Config(
        path, theme, ascii_only, float(rate), MappingProxyType(_keymap(keys)),
        frozenset(console) | {f"keys.{action_id}" for action_id in keys},
    )  # fmt: skip


def _keymap(keys: dict[str, Any]) -> dict[str, str]:
    _known(keys, [action.id for action in ACTIONS], "keys.")
    keymap = {}
    for action_id, value in keys.items():
        if not isinstance(value, str):
            raise ValueError(f'keys.{action_id} is {value!r}; allowed is text such as "f5" or "ctrl+b,b"')
        names = [name.strip() for name in value.split(",")] if value.strip() else []
        for name in names:
            if not _KEY.fullmatch(name):
                raise ValueError(
                    f"keys.{action_id}: {name!r} is no key; allowed: b, B, f5, ctrl+b, space, question_mark"
                )
        if not names and action_id in NEVER_WITHOUT:
            raise ValueError(
                f"keys.{action_id} is empty; allowed is one key or several: there must be a way to it"
            )
        keymap[action_id] = ",".join(names)
    _no_key_twice(keymap)
    return keymap


def _no_key_twice(keymap: Mapping[str, str]) -> None:
    for where in (LIVE, REPLAY):
        users: dict[tuple[str, str], str] = {}
        for action in actions_of(where, keymap):
            for key in filter(None, action.keys.split(",")):
                other = users.setdefault((action.page, key), action.id)
                if other != action.id:
                    raise ValueError(
                        f"key {key} is that of {other} and of {action.id}; give one of them another in [keys]"
                    )


def _table(tree: dict[str, Any], name: str) -> dict[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} is {table!r}; allowed is a section [{name}]")
    return table


def _known(table: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    for name in table:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            shown = f"{what}{name}" if what.endswith(".") else f"{what} {name}"
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
            raise ValueError(f"{shown} is unknown; {hint}")
