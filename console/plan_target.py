"""``pdconsole plan --target``: the planner's table for a GPU system with published figures, and where this machine
stands beside it."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.planner import PlanLink, break_even_tokens, plan_table, rho, wrong_choice_verdict
from cluster.run_dir import list_runs
from cluster.targets import (
    COMMON_LINKS,
    FLATTERS_FROM,
    SEPARATOR,
    Target,
    UnknownTarget,
    all_links,
    all_targets,
    find_target,
)
from cluster.units import format_bits_per_s
from console.errors import UserError
from console.plan_text import plan_text
from console.summary_text import prefill_figure, read_summary
from console.text_format import clean


@dataclass(frozen=True, slots=True)
class MeasuredHere:
    """What the youngest run on this machine measured of its own B*."""

    run: str
    model: str
    b_star_bytes_per_s: float

    def rho(self, bits_per_s: float) -> float:
        return bits_per_s / 8 / self.b_star_bytes_per_s


def resolve(text: str, links: str | None) -> tuple[Target, list[str]]:
    """The target and the names of the links to plan for: the one in ``text``, else ``links`` (NAME,...), else the
    common ones and the target's own. Raises UserError."""
    try:
        target, link = find_target(text)
    except UnknownTarget as error:
        raise UserError(f"--target: {error}") from error
    if link is None:
        return target, links.split(",") if links else list(dict.fromkeys([*COMMON_LINKS, target.own_link]))
    if links:
        raise UserError(
            f"--link {links} is given beside --target {text}, which names one; allowed is one of the two"
        )
    return target, [link.name]


def measured_here() -> MeasuredHere | None:
    """From the youngest run that served enough to have measured it; None where there is none."""
    for record in reversed(list_runs()):
        summary = read_summary(record.path) or {}
        b_star = prefill_figure(summary, "b_star_bytes_per_s")
        if b_star:
            return MeasuredHere(record.run, str(summary.get("model", "")), b_star)
    return None


def plan(
    target: Target, links: list[PlanLink], tokens: list[int], here: MeasuredHere | None, *, as_json: bool
) -> int:
    """Print the table and one sentence. Exit code 0 whatever it says."""
    rate, kv_bytes = target.prefill_tokens_per_s, target.kv_bytes_per_token
    rows = plan_table(kv_bytes, tokens, links, rate)
    verdict = wrong_choice_verdict(kv_bytes, links, rate)
    if as_json:
        document = {
            **_described(target),
            "links": [_link(target, link, here) for link in links],
            "rows": [dataclasses.asdict(row) for row in rows],
            "here": None
            if here is None
            else {**dataclasses.asdict(here), "flatters": _flatters(target, here)},
            "verdict": verdict,
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"target {target.name}: {target.model} on {target.gpus} x {target.gpu}", end="")
    print(f", KV in {target.kv_dtype}: {kv_bytes:,} bytes per token")
    b_star = format_bits_per_s(target.b_star_bytes_per_s * 8)
    print(f"prefill {rate:,.0f} tokens/s ({target.basis}); B* = {b_star}: a slower link loses")
    print(f"  {target.conditions}")
    print(f"  {target.source.title} ({target.source.year}), {target.source.url}")
    print()
    print(plan_text(rows))
    print()
    print(_here_text(target, links[0], here))
    print(verdict)
    return 0


def list_targets(*, as_json: bool) -> int:
    """Print every target and every link. Exit code 0."""
    if as_json:
        document = {
            "targets": [_described(target) for target in all_targets().values()],
            "links": [
                {"name": link.name, "bits_per_s": link.bits_per_s, "description": link.description}
                for link in all_links().values()
            ],
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{'TARGET':12}{'GPU':10}{'MODEL':15}{'KV B/TOKEN':>11}{'PREFILL tok/s':>15}{'B*':>13}  RATE")
    for target in all_targets().values():
        b_star = format_bits_per_s(target.b_star_bytes_per_s * 8)
        print(
            f"{target.name:12}{f'{target.gpus} x {target.gpu}':10}{target.model:15}{target.kv_bytes_per_token:>11,}"
            f"{target.prefill_tokens_per_s:>15,.0f}{b_star:>13}  {target.basis}"
        )
    print()
    print(f"{'LINK':12}{'RATE':>13}")
    for link in all_links().values():
        print(f"{link.name:12}{format_bits_per_s(link.bits_per_s):>13}  {link.description}")
    print()
    print(f"pdconsole plan --target TARGET; pdconsole up --target TARGET{SEPARATOR}LINK")
    return 0


def _described(target: Target) -> dict[str, Any]:
    return {
        "target": target.name,
        "gpu": target.gpu,
        "gpus": target.gpus,
        "model": target.model,
        "kv_dtype": target.kv_dtype,
        "kv_bytes_per_token": target.kv_bytes_per_token,
        "prefill_tokens_per_s": target.prefill_tokens_per_s,
        "prefill_rate": target.basis,
        "conditions": target.conditions,
        "source": msgspec.to_builtins(target.source),
        "b_star_bytes_per_s": target.b_star_bytes_per_s,
    }


def _link(target: Target, link: PlanLink, here: MeasuredHere | None) -> dict[str, Any]:
    rate, kv_bytes, bytes_per_s = target.prefill_tokens_per_s, target.kv_bytes_per_token, link.bits_per_s / 8
    return {
        "name": link.name,
        "bits_per_s": link.bits_per_s,
        "rho": rho(bytes_per_s, kv_bytes, rate),
        "rho_here": here.rho(link.bits_per_s) if here is not None else None,
        "break_even_tokens": break_even_tokens(kv_bytes, bytes_per_s, rate, link.overhead_s),
    }


def _flatters(target: Target, here: MeasuredHere) -> bool:
    """On any link alike: a link's rate is in both ratios."""
    return target.b_star_bytes_per_s > FLATTERS_FROM * here.b_star_bytes_per_s


def _here_text(target: Target, link: PlanLink, here: MeasuredHere | None) -> str:
    if here is None:
        return "this machine: no run was measured here, so its own rho is not known"
    beside = (
        f"this machine ({clean(here.model)}, run {clean(here.run)}) has rho {here.rho(link.bits_per_s):.3g} on "
        f"{link.name}, the target {target.rho(link.bits_per_s):.3g}"
    )
    if not _flatters(target, here):
        return beside
    name = f"{target.name}{SEPARATOR}{link.name}" if link.name in all_links() else target.name
    return f"{beside}: a run without --target {name} flatters disaggregation"
