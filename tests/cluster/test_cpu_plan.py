import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cpu_plan import available_cpus, cpus_for_another, plan_cpus


def names(prefill: int, decode: int) -> tuple[list[str], list[str]]:
    return [f"prefill-{n}" for n in range(prefill)], [f"decode-{n}" for n in range(decode)]


def test_two_cores_two_workers() -> None:
    assert plan_cpus(*names(1, 1), (0, 1)) == {"prefill-0": (0,), "decode-0": (1,)}


def test_enough_cores_give_each_worker_its_own() -> None:
    plan = plan_cpus(*names(2, 2), (3, 5, 7, 9, 11))
    assert plan == {"prefill-0": (3,), "prefill-1": (5,), "decode-0": (7,), "decode-1": (9,)}


def test_roles_do_not_share_where_cores_are_few() -> None:
    assert plan_cpus(*names(2, 1), (0, 1)) == {"prefill-0": (0,), "prefill-1": (0,), "decode-0": (1,)}
    assert plan_cpus(*names(1, 3), (0, 1)) == {
        "prefill-0": (0,),
        "decode-0": (1,),
        "decode-1": (1,),
        "decode-2": (1,),
    }


def test_one_core_pins_nobody() -> None:
    assert plan_cpus(*names(1, 1), (4,)) == {"prefill-0": (), "decode-0": ()}


def test_pinning_can_be_off() -> None:
    assert plan_cpus(*names(1, 1), (0, 1), pin=False) == {"prefill-0": (), "decode-0": ()}


def test_no_prefill_workers_share_all_cores() -> None:
    assert plan_cpus(*names(0, 3), (0, 1)) == {"decode-0": (0,), "decode-1": (1,), "decode-2": (0,)}


def test_a_worker_may_have_several_cores_of_its_own() -> None:
    assert plan_cpus(*names(1, 2), (2, 3, 5, 7, 11, 13, 17), cores_per_worker=2) == {
        "prefill-0": (2, 3),
        "decode-0": (5, 7),
        "decode-1": (11, 13),
    }
    assert plan_cpus(*names(0, 1), (0, 1), cores_per_worker=2) == {"decode-0": (0, 1)}
    assert plan_cpus(*names(1, 1), (0, 1), pin=False, cores_per_worker=2) == {"prefill-0": (), "decode-0": ()}


def test_more_cores_than_there_are_is_an_error_that_says_what_is_allowed() -> None:
    with pytest.raises(
        ValueError, match="is 3: 2 workers need 6 cores, 4 are usable; allowed is 2 or less here"
    ):
        plan_cpus(*names(1, 1), range(4), cores_per_worker=3)
    with pytest.raises(ValueError, match="2 workers need 4 cores, 2 are usable; allowed is 1 here"):
        plan_cpus(*names(1, 1), range(2), cores_per_worker=2)
    with pytest.raises(ValueError, match="is 3: that is 3 cores, 2 are usable; allowed is 2 or less here"):
        plan_cpus(*names(1, 1), range(2), pin=False, cores_per_worker=3)


def test_no_cores_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cores"):
        plan_cpus(*names(1, 1), ())


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 99), st.integers(2, 5))
def test_several_cores_are_a_workers_own_or_refused(prefill: int, decode: int, cores: int, each: int) -> None:
    prefill_ids, decode_ids = names(prefill, decode)
    if (prefill + decode) * each > cores:
        with pytest.raises(ValueError, match="cores_per_worker"):
            plan_cpus(prefill_ids, decode_ids, range(cores), cores_per_worker=each)
        return
    plan = plan_cpus(prefill_ids, decode_ids, range(cores), cores_per_worker=each)
    assert all(len(cpus) == each for cpus in plan.values())
    assert len({cpu for cpus in plan.values() for cpu in cpus}) == (prefill + decode) * each


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 16))
def test_every_worker_has_one_core_and_roles_never_meet(prefill: int, decode: int, cores: int) -> None:
    prefill_ids, decode_ids = names(prefill, decode)
    plan = plan_cpus(prefill_ids, decode_ids, range(cores))
    assert list(plan) == prefill_ids + decode_ids
    assert all(len(cpus) == 1 and cpus[0] < cores for cpus in plan.values())
    prefill_cores = {plan[worker_id] for worker_id in prefill_ids}
    assert prefill_cores.isdisjoint({plan[worker_id] for worker_id in decode_ids})
    if prefill + decode <= cores:
        assert len(set(plan.values())) == prefill + decode


def test_another_worker_gets_the_least_used_cores() -> None:
    assert cpus_for_another([(0,), (1,)], (0, 1, 2)) == (2,)
    assert cpus_for_another([(0,), (1,), (0,)], (0, 1)) == (1,)
    assert cpus_for_another([(0, 1)], range(4), cores_per_worker=2) == (2, 3)
    assert cpus_for_another([(0,)], (0, 1), pin=False) == ()
    assert cpus_for_another([()], (5,)) == ()


def test_available_cpus_are_those_this_process_may_use() -> None:
    assert set(available_cpus()) == os.sched_getaffinity(0)
