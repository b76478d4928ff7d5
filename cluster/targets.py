"""Named serving systems (a prefill worker of GPUs and a model, on a link) from published figures.

``NAME`` is a prefill worker, ``NAME@LINK`` the worker on a link. The figures, with their sources, are data:
``profiles/targets/*.toml``. What is computed from them is computed here, by the planner's own functions.
"""

import difflib
import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.planner import kv_bytes_per_token, rho
from cluster.units import parse_bits_per_s

TARGET_DIR: Final = Path(__file__).resolve().parent.parent / "profiles" / "targets"
SEPARATOR: Final = "@"
COMMON_LINKS: Final = ("10gbe", "25gbe", "100gbe", "ib-400g")
"""What a target is planned on where no link is named, beside its own."""

FLATTERS_FROM: Final = 1.25
"""A rho this many times the target's is no measuring noise any more: the run shows disaggregation too good."""


class UnknownTarget(ValueError):
    """No target or link has this name; the message is one line for the user, with the nearest valid name."""


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Source(_Row, frozen=True, kw_only=True):
    title: str
    year: int
    url: str


class Measured(_Row, frozen=True, kw_only=True):
    """A first token's latency as published. ``transfer_ms`` of it was spent on moving KV."""

    prompt_tokens: int
    first_token_ms: float
    transfer_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / (self.first_token_ms - self.transfer_ms) * 1000.0


class Derived(_Row, frozen=True, kw_only=True):
    """For what nobody published: peak of one GPU, and the share of it that is reached (``mfu``, 0 to 1)."""

    parameters: float
    peak_flop_per_s: float
    mfu: float


class Target(_Row, frozen=True, kw_only=True):
    """A prefill worker of ``gpus`` GPUs. Exactly one of ``measured`` and ``derived`` is given."""

    name: str
    gpu: str
    gpus: int
    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    own_link: str  # the fastest link such a worker has
    conditions: str
    source: Source
    measured: Measured | None = None
    derived: Derived | None = None

    def __post_init__(self) -> None:
        if (self.measured is None) == (self.derived is None):
            raise ValueError(f"target {self.name} needs either a measured or a derived rate")

    @property
    def basis(self) -> str:
        """published | derived"""
        return "derived" if self.measured is None else "published"

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of the whole worker."""
        if self.measured is not None:
            return self.measured.tokens_per_s
        assert self.derived is not None
        flop_per_s = self.gpus * self.derived.peak_flop_per_s * self.derived.mfu
        return flop_per_s / (2 * self.derived.parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self, self.kv_dtype)

    @property
    def b_star_bytes_per_s(self) -> float:
        return self.kv_bytes_per_token * self.prefill_tokens_per_s

    def rho(self, bits_per_s: float) -> float:
        """On a link of this rate (above 0)."""
        return rho(bits_per_s / 8, self.kv_bytes_per_token, self.prefill_tokens_per_s)


class TargetLink(_Row, frozen=True, kw_only=True):
    name: str
    bandwidth: str
    description: str

    @property
    def bits_per_s(self) -> float:
        return parse_bits_per_s(self.bandwidth)


@dataclass(frozen=True, slots=True)
class LinkGoal:
    """The ratio that an emulated link is to have. ``target`` is ``NAME@LINK``, or "" for a bare number."""

    target: str
    rho: float


@functools.cache
def all_targets() -> dict[str, Target]:
    """Every prefill worker by name."""
    return {name: msgspec.convert(row, Target) for name, row in _rows("gpus.toml")}


@functools.cache
def all_links() -> dict[str, TargetLink]:
    """Every link that a target can be put on, by name."""
    return {name: msgspec.convert(row, TargetLink) for name, row in _rows("links.toml")}


def find_target(text: str) -> tuple[Target, TargetLink | None]:
    """``"h100-7b@10gbe"`` -> both; ``"h100-7b"`` -> the worker and None. Raises UnknownTarget."""
    name, separator, link_name = text.partition(SEPARATOR)
    target = all_targets().get(name)
    if target is None:
        raise UnknownTarget(f"{text!r} is not a target; {_allowed(name, all_targets())}")
    if not separator:
        return target, None
    link = all_links().get(link_name)
    if link is None:
        raise UnknownTarget(f"{text!r} is on no known link; {_allowed(link_name, all_links())}")
    return target, link


def link_goal(target: str, asked_rho: float, bits_per_s: float) -> LinkGoal | None:
    """What a profile's ``link.target`` and ``link.rho`` ask of its link; None when they ask nothing.

    A target without a link stands on the profile's own (``bits_per_s``, 0 = unlimited). Raises UnknownTarget.
    """
    if not target:
        return LinkGoal("", asked_rho) if asked_rho > 0 else None
    worker, link = find_target(target)
    if link is not None:
        return LinkGoal(target, worker.rho(link.bits_per_s))
    if bits_per_s <= 0:
        raise UnknownTarget(
            f"{target!r} names no link and link.bandwidth is unlimited; allowed: "
            + ", ".join(f"{target}{SEPARATOR}{name}" for name in all_links())
        )
    return LinkGoal(target, worker.rho(bits_per_s))


def rho_of_targets(bits_per_s: float) -> tuple[float, float]:
    """The lowest and the highest rho that any target has on a link of this rate (above 0)."""
    ratios = [target.rho(bits_per_s) for target in all_targets().values()]
    return min(ratios), max(ratios)


def _rows(file: str) -> Iterable[tuple[str, dict[str, Any]]]:
    tree = tomllib.loads((TARGET_DIR / file).read_text(encoding="utf-8"))
    return [(name, {"name": name, **row}) for name, row in tree.items()]


def _allowed(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"allowed: {', '.join(known)}{hint}"
