"""One line of a drill's [expect]: a figure and what it has to be. Knows no figure.

finished = "all"                    every request that was sent
failed = 0                          exactly
retried = ">= 1"                    at least; "<= 2.5": at most
"fallbacks.prefill_died" = 2        of one reason
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

import msgspec

ALL: Final = "all"
_BOUND: Final = re.compile(r"(<=|>=)\s*(\d+(?:\.\d+)?)")


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """``key`` is the reason or the process behind the dot, "" = all of them. ``bound`` None: all that was sent."""

    figure: str
    key: str = ""
    sense: str = "=="  # == | <= | >=
    bound: float | None = None

    @property
    def name(self) -> str:
        return f"{self.figure}.{self.key}" if self.key else self.figure

    @property
    def text(self) -> str:
        """ "all", "0", "at least 1", "at most 2.5" """
        if self.bound is None:
            return ALL
        words = {"==": "", "<=": "at most ", ">=": "at least "}
        return f"{words[self.sense]}{self.bound:g}"

    def is_met_by(self, value: float | None, num_sent: int) -> bool:
        """``value`` None: it never happened, or nothing was measured; no bound is met."""
        if value is None:
            return False
        bound = num_sent if self.bound is None else self.bound
        if self.sense == "<=":
            return value <= bound
        return value >= bound if self.sense == ">=" else value == bound


def parse_expectation(name: str, value: float | str, figures: Iterable[str]) -> Expectation:
    """Raises ValueError "NAME ...: what is allowed" for an unknown figure, with the nearest one, or a wrong value."""
    figure, dot, key = name.partition(".")
    known = list(figures)
    if figure not in known or (dot and not key):
        near = difflib.get_close_matches(figure, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} is no figure; allowed: {', '.join(known)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; allowed is 0 or more")
        return Expectation(figure=figure, key=key, bound=float(value))
    if value == ALL:
        return Expectation(figure=figure, key=key)
    found = _BOUND.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f'{name} is {value!r}; allowed: a number, "<= number", ">= number" or "{ALL}"')
    return Expectation(figure=figure, key=key, sense=found[1], bound=float(found[2]))
