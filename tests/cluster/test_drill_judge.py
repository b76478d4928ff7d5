"""No drill that cannot fail: for each of its expectations there is a history in which just that promise is broken."""

import pytest

from cluster.drill import Drill
from cluster.drill_expectation import Expectation
from cluster.drill_figures import FIGURES
from cluster.drill_file import builtin_drills, load_drill
from cluster.drill_judge import expectations_of, judge
from tests.cluster.drill_histories import BREAK, MAKE, broken, kept

DRILLS = {name: load_drill(name) for name in builtin_drills()}
PROMISES = [(drill, expectation) for drill in DRILLS.values() for expectation in expectations_of(drill)]


def test_every_drill_that_is_promised_ships() -> None:
    assert set(DRILLS) >= {
        "burst", "kill-prefill", "kill-decode", "kill-router", "kill-all-prefill", "hang-prefill", "hang-decode",
        "cut-link", "slow-link", "corrupt-frame", "decode-full", "client-gone", "flap", "overload", "rolling-restart",
    }  # fmt: skip


@pytest.mark.parametrize("drill", DRILLS.values(), ids=DRILLS)
def test_verdict_is_pass_where_every_promise_is_kept(drill: Drill) -> None:
    verdict = judge(kept(drill).story())
    assert [(judged.name, judged.text) for judged in verdict.failures] == []
    assert verdict.is_pass


@pytest.mark.parametrize(
    ("drill", "expectation"), PROMISES, ids=[f"{drill.name}-{promise.name}" for drill, promise in PROMISES]
)
def test_verdict_is_fail_where_this_promise_is_broken(drill: Drill, expectation: Expectation) -> None:
    verdict = judge(broken(drill, expectation).story())
    assert not verdict.is_pass
    failed = {judged.name: judged for judged in verdict.failures}
    assert expectation.name in failed
    assert failed[expectation.name].look_at, "a failed expectation names what to look at"


def test_every_figure_has_a_way_to_be_broken() -> None:
    assert set(BREAK) | set(MAKE) == set(FIGURES)
