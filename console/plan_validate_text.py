"""Forecasts beside measurements as text."""

from collections.abc import Mapping
from typing import Any

from console.run_page import number


def plan_validate_text(document: Mapping[str, Any]) -> str:
    """Of what `plan --validate --json` prints."""
    rounds, goal = document["rounds"], document["goal"]
    lines = [
        f"{document['model']['id']}, {document['model']['dtype']}; trace: {document['trace']}",
        f"link {document['link']}; limits {document['slo']}; {rounds} round{'s' if rounds > 1 else ''}, medians",
    ]
    for split in document["splits"]:
        lines += ["", *_split(split, goal)]
    return "\n".join(lines)


def _split(split: Mapping[str, Any], goal: float) -> list[str]:
    finished = split["finished"]
    lines = [
        f"{split['split']}: run{'s' if len(split['runs']) > 1 else ''} {', '.join(split['runs'])}",
        f"engine steps from {split['costs_from'][-1]}, in the last round corrected by",
        f"  {split['corrected_by'][-1]}",
        f"answered: forecast {min(finished['forecast'])}, measured {min(finished['measured'])}; "
        f"client late by {split['client']['schedule_lag_p99_ms']:.1f} ms (p99) at worst",
        "",
        f"{'':14}{'forecast':>10}{'measured':>10}{'lowest':>10}{'highest':>10}{'error':>8}{'benchmark alone':>18}",
    ]
    for row in split["rows"]:
        name = f"{row['figure'].removesuffix('_ms').upper()} {row['q']} ms" if row["q"] else "goodput /s"
        measured = row["measurements"]
        cells = [row["forecast"], row["measured"], min(measured, default=None), max(measured, default=None)]
        lines.append(
            f"{name:14}{''.join(f'{number(cell):>10}' for cell in cells)}{_percent(row['error']):>8}"
            f"{_percent(row['alone_error']):>18}"
        )
    for who, parts in split["ttft_parts_ms"].items():
        lines.append(f"TTFT parts {who}: " + ", ".join(f"{name} {number(ms)}" for name, ms in parts.items()))
    worst = split["worst_error"]
    named = f"the goal is {goal:.0%} on p50, p90 and goodput"
    lines.append(
        f"nothing to compare; {named}"
        if worst is None
        else f"{'met' if split['goal_met'] else 'missed'}: off by {worst:.0%} at worst; {named}"
    )
    return lines


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"
