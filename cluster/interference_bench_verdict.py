"""What an interference benchmark says in sentences: what disaggregation gave, and what it cost. Pure.

A difference counts only where the rounds of the two arms do not overlap and their medians differ by a tenth or more.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

LEAST_RATIO: Final = 1.1
ITL: Final = ("bursts", "burst_itl_ms", "p99")
OWN_ITL: Final = ("alone", "itl_ms", "p99")

_GAINS: Final = ((ITL, "p99"), (("bursts", "burst_itl_ms", "max"), "longest"))
_COSTS: Final = (
    (("bursts", "prompt_ttft_ms", "p50"), "TTFT of burst prompts", "ms", True),
    (("bursts", "burst_ttft_ms", "p50"), "TTFT of short prompts in bursts", "ms", True),
    (("alone", "ttft_ms", "p50"), "and without bursts", "ms", True),
    (("bursts", "tokens_per_s_per_core"), "all tokens beside bursts", "tok/s a core", False),
    (("alone", "tokens_per_s_per_core"), "and without bursts", "tok/s a core", False),
)
"""Figure, its words, its unit, and whether less of it is better."""

Arm = Mapping[str, Any]
Spread = Mapping[str, float]


def figure(arm: Arm, path: Sequence[str]) -> Spread | None:
    """``{"median", "min", "max"}`` of an arm's summary; None: not measured."""
    found: Any = arm["summary"]
    for key in path:
        found = None if found is None else found.get(key)
    return found  # type: ignore[no-any-return]


def verdict(arms: Sequence[Arm]) -> list[str]:
    """One sentence for each disaggregated arm: the streams' ITL in bursts, p99 and the longest gap, against whole
    prompts, the best chunked arm, and its own without bursts. WINS: one of the two is better than in every such arm
    and none is worse; LOSES: the other way round. The longest counts too, because one stall of seconds is a single
    gap among hundreds, below any percentile."""
    return [_verdict(arm, [each for each in arms if each["mode"] == "colocated"]) for arm in _disagg(arms)]


def cost(arms: Sequence[Arm]) -> list[str]:
    """One sentence for each disaggregated arm: each figure against the co-located arm that is best in it."""
    return [_cost(arm, [each for each in arms if each["mode"] == "colocated"]) for arm in _disagg(arms)]


def _disagg(arms: Sequence[Arm]) -> list[Arm]:
    return [arm for arm in arms if arm["mode"] == "disagg"]


def _verdict(arm: Arm, colocated: Sequence[Arm]) -> str:
    rivals = _rivals(colocated)
    if figure(arm, ITL) is None or not rivals:
        return f"{arm['name']}: too few gaps between tokens fell into bursts; nothing can be said"
    if void := [each["name"] for each in (arm, *colocated) if not each["valid"]]:
        return (
            f"{arm['name']}: nothing can be said; the load generator was the bottleneck in every round of "
            f"{' and of '.join(void)}"
        )
    pairs = [(words, _known(arm, path)) for path, words in _GAINS]
    said = [
        ", ".join(
            f"{words} {_against(_known(arm, path), _known(rival, path), 'ms', less=True)}"
            for path, words in _GAINS
        )
        + f" of {rival['name']}"
        for rival in rivals
    ]
    signs = {
        _sign(_known(arm, path), _least([_known(rival, path) for rival in rivals])) for path, _ in _GAINS
    } - {0}
    word = {(): "IS NO BETTER", (-1,): "LOSES", (1,): "WINS"}.get(tuple(signs), "IS MIXED")
    once = "" if arm["valid"] > 1 else " (one round: no spread is known)"
    alone = figure(arm, OWN_ITL)
    itself = (
        f"; p99 is {_known(arm, ITL)['median'] / alone['median']:.2f}x its own without bursts"
        if alone
        else ""
    )
    own = ", ".join(f"{words} {_value(spread, 'ms')}" for words, spread in pairs)
    return f"{arm['name']} {word}{once}: streams' ITL in bursts {own}; {'; '.join(said)}{itself}"


def _rivals(colocated: Sequence[Arm]) -> list[Arm]:
    """The arm of whole prompts, and of the others the one with the lowest ITL p99 in bursts."""
    known = [arm for arm in colocated if figure(arm, ITL) is not None]
    chunked = [arm for arm in known if not arm["whole_prompt"]]
    best = [min(chunked, key=lambda arm: _known(arm, ITL)["median"])] if chunked else []
    return [*(arm for arm in known if arm["whole_prompt"]), *best]


def _known(arm: Arm, path: Sequence[str]) -> Spread:
    found = figure(arm, path)
    assert found is not None, f"{arm['name']} has gaps in bursts"
    return found


def _least(spreads: Sequence[Spread]) -> Spread:
    return min(spreads, key=lambda spread: spread["median"])


def _sign(own: Spread, other: Spread) -> int:
    """1: shorter is ``own``; -1: ``other``; 0: neither clearly."""
    return 0 if _is_alike(own, other) else 1 if own["median"] < other["median"] else -1


def _cost(arm: Arm, colocated: Sequence[Arm]) -> str:
    parts = []
    for path, words, unit, less in _COSTS:
        own = figure(arm, path)
        others = [
            (spread["median"], other["name"], spread)
            for other in colocated
            if (spread := figure(other, path))
        ]
        if own is None or not others:
            parts.append(f"{words} not measured")
            continue
        _, name, spread = min(others) if less else max(others)
        parts.append(f"{words} {_value(own, unit)} ({_against(own, spread, unit, less=less)} of {name})")
    return f"{arm['name']}, each against the best co-located arm in it: {', '.join(parts)}"


def _against(own: Spread, other: Spread, unit: str, *, less: bool) -> str:
    """ "3.1x better than 210 ms" where ``less`` says which way is better."""
    value = _value(other, unit)
    if _is_alike(own, other):
        return f"no clear difference from {value}"
    is_better = (own["median"] < other["median"]) is less
    low, high = sorted((own["median"], other["median"]))
    ratio = f"{high / low:.{1 if high < 9.95 * low else 0}f}x" if low > 0 else "much"
    return f"{ratio} {'better' if is_better else 'worse'} than {value}"


def _is_alike(one: Spread, other: Spread) -> bool:
    low, high = sorted((one["median"], other["median"]))
    return (one["min"] <= other["max"] and other["min"] <= one["max"]) or high < LEAST_RATIO * low


def _value(spread: Spread, unit: str) -> str:
    value = spread["median"]
    if unit == "ms" and value >= 999.5:
        return f"{value / 1000:.3g} s"
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
