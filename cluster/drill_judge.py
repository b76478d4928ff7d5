"""The verdict of a drill: each expectation beside its figure. Pure: a story in, a verdict out."""

from dataclasses import dataclass
from typing import Any, Final

from cluster.drill import Drill
from cluster.drill_expectation import Expectation
from cluster.drill_figure import look_at_requests
from cluster.drill_figures import FIGURES
from cluster.drill_story import DrillStory

ALWAYS: Final = (
    Expectation(figure="faults", bound=0),
    Expectation(figure="undisturbed_failed", bound=0),
    Expectation(figure="unfinished", bound=0),
    Expectation(figure="unaccounted", bound=0),
    Expectation(figure="tokens_differ", bound=0),
    Expectation(figure="position_errors", bound=0),
    Expectation(figure="after_failed", bound=0),
    Expectation(figure="given_up", bound=0),
    Expectation(figure="stranded_blocks", bound=0),
    Expectation(figure="orphans", bound=0),
)
"""What every drill expects, whatever its file says."""

_HEADLINE: Final = (
    "finished", "failed", "rejected", "left", "retried", "migrated", "fallbacks", "tokens_differ",
    "worst_ttft_added_s", "recovered_s", "stranded_blocks", "orphans",
)  # fmt: skip
_ALWAYS_SAID: Final = ("finished", "tokens_differ", "stranded_blocks", "orphans")


@dataclass(frozen=True, slots=True)
class Judged:
    """One expectation. ``actual`` None: it never happened, or nothing was measured. ``look_at`` is for one not met."""

    name: str
    expected: str
    actual: float | None
    ok: bool
    text: str
    look_at: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        plain = {
            "name": self.name,
            "expected": self.expected,
            "actual": None if self.actual is None else round(self.actual, 6),
            "ok": self.ok,
            "text": self.text,
        }
        return plain if self.ok else plain | {"look_at": list(self.look_at)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``headline``: "6/6 finished, 2 retried on prefill-1, 0 tokens differ, worst TTFT +1.20 s" and so on."""

    expectations: tuple[Judged, ...]
    headline: str

    @property
    def is_pass(self) -> bool:
        return all(judged.ok for judged in self.expectations)

    @property
    def failures(self) -> list[Judged]:
        return [judged for judged in self.expectations if not judged.ok]


def expectations_of(drill: Drill) -> list[Expectation]:
    """The drill's own, then those that every drill has."""
    own = {expectation.name for expectation in drill.expect}
    return [*drill.expect, *(expectation for expectation in ALWAYS if expectation.name not in own)]


def judge(story: DrillStory) -> Verdict:
    """Every expectation of the story's drill."""
    return Verdict(
        tuple(_judged(story, expectation) for expectation in expectations_of(story.drill)), _headline(story)
    )


def _judged(story: DrillStory, expectation: Expectation) -> Judged:
    figure = FIGURES[expectation.figure](story, expectation.key)
    groups = [r for r in story.sent() if expectation.key in ("", r.group)]
    ok = expectation.is_met_by(figure.value, len(groups))
    look_at = () if ok else figure.look_at or _everything(story)
    return Judged(expectation.name, expectation.text, figure.value, ok, figure.text, look_at)


def _everything(story: DrillStory) -> tuple[str, ...]:
    """Where to look when something did not happen at all."""
    faults = [f"{fault.fault} {fault.target}; logs/{fault.target}.log" for fault in story.facts.faults[:2]]
    return (*faults, *look_at_requests(story, story.sent()[:2]), "events.jsonl")


def _headline(story: DrillStory) -> str:
    """The same figures for every drill, those of nothing left out."""
    told = []
    for name in _HEADLINE:
        figure = FIGURES[name](story, "")
        if figure.value or (name in _ALWAYS_SAID):
            told.append(figure.text)
    return ", ".join(told)
