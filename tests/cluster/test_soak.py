"""The soak's faults come from its seed alone, and are a drill like any other."""

from collections import Counter

import pytest

from cluster.drill import DRILL_PROFILE
from cluster.drill_checks import problem_in
from cluster.drill_file import check_targets
from cluster.drill_judge import expectations_of, judge
from cluster.profile import load_profile
from cluster.soak import soak_drill
from tests.cluster.drill_histories import broken, kept

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_the_same_seed_gives_the_same_faults() -> None:
    assert soak_drill(200, 1) == soak_drill(200, 1)
    assert soak_drill(200, 1).faults != soak_drill(200, 2).faults


def test_it_is_a_drill_without_a_mistake() -> None:
    drill = soak_drill(100, 3)
    assert problem_in(drill) == ""
    check_targets(drill, WORKERS)
    profile = load_profile("10gbe", DRILL_PROFILE | drill.settings)
    assert (profile.cluster.prefill, profile.cluster.decode) == (2, 2)


def test_every_kind_of_fault_comes() -> None:
    drill = soak_drill(1000, 0)
    kinds = Counter(rule.fault for rule in drill.faults)
    assert kinds.total() == 1000
    assert {"kill", "terminate", "hang", "corrupt", "cut", "stall", "slow", "restart", "leave"} == set(kinds)
    assert kinds["leave"] == 100


def test_its_verdict_can_fail() -> None:
    drill = soak_drill(6, 1)
    assert judge(kept(drill).story()).is_pass
    for expectation in expectations_of(drill):
        assert not judge(broken(drill, expectation).story()).is_pass, expectation.name


@pytest.mark.parametrize("number", [0, -1, 100_001])
def test_a_number_of_faults_that_is_not_allowed(number: int) -> None:
    with pytest.raises(ValueError, match=f"{number} faults; allowed is 1 to 100000"):
        soak_drill(number, 0)
