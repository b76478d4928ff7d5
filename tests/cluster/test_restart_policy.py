import signal

import pytest

from cluster.profile import SupervisorSection
from cluster.restart_policy import (
    ExitStatus,
    GiveUp,
    ObservedExit,
    ObservedProcess,
    StartLater,
    StartNow,
    backoff_s,
    counts_against,
    plan_starts,
)

LIMITS = SupervisorSection()
CRASH = ExitStatus(exit_code=1)
KILLED = ExitStatus(signal=signal.SIGKILL)


def ended(
    at: float, up_s: float = 1.0, status: ExitStatus = CRASH, cause: str = "crash", refused: bool = False
):
    return ObservedExit(at, up_s, status, cause, refused)


def plan_one(*exits: ObservedExit, now: float, running: bool = False):
    actions = plan_starts([ObservedProcess("w", running, exits)], now, LIMITS)
    assert len(actions) <= 1
    return actions[0] if actions else None


def test_process_that_never_ran_starts_now() -> None:
    assert plan_one(now=5.0) == StartNow("w")


def test_running_process_is_left_alone() -> None:
    assert plan_one(ended(1.0), now=5.0, running=True) is None


def test_first_crash_waits_the_first_backoff() -> None:
    assert plan_one(ended(10.0), now=10.0) == StartLater("w", 10.1, 0.1)
    assert plan_one(ended(10.0), now=10.1) == StartNow("w", 0.1)


@pytest.mark.parametrize(
    ("crashes", "expected_s"), [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (9, 25.6), (10, 30.0)]
)
def test_backoff_doubles_up_to_its_maximum(crashes: int, expected_s: float) -> None:
    exits = [ended(100.0 * number) for number in range(crashes)]
    assert backoff_s(exits, LIMITS) == pytest.approx(expected_s)


def test_backoff_of_very_many_crashes_is_the_maximum() -> None:
    assert backoff_s([ended(100.0 * number) for number in range(5000)], LIMITS) == 30.0


def test_long_life_resets_the_backoff() -> None:
    exits = [ended(1.0), ended(2.0), ended(3.0), ended(20.0, up_s=15.0)]
    assert backoff_s(exits, LIMITS) == pytest.approx(0.1)
    assert backoff_s([*exits, ended(21.0, up_s=0.5)], LIMITS) == pytest.approx(0.2)


def test_five_exits_within_thirty_seconds_are_a_crash_loop() -> None:
    exits = [ended(float(at)) for at in (1, 8, 15, 22, 30)]
    action = plan_one(*exits, now=30.0)
    assert action == GiveUp("w", "crash loop: 5 exits within 30 s, the last by exit code 1")


def test_five_exits_over_a_longer_time_are_not() -> None:
    assert isinstance(plan_one(*[ended(float(at)) for at in (1, 10, 20, 30, 40)], now=40.0), StartLater)


def test_process_that_is_never_ready_is_given_up_however_slow_it_is() -> None:
    exits = [ended(100.0 * number, up_s=0.0) for number in range(1, 6)]
    action = plan_one(*exits, now=500.0)
    assert isinstance(action, GiveUp)
    assert "never became ready in 5 starts" in action.reason
    assert isinstance(plan_one(*exits[:4], now=400.0), StartLater)


@pytest.mark.parametrize("cause", ["crash", "operator"])
def test_kill_from_outside_neither_counts_nor_waits_longer(cause: str) -> None:
    exits = [ended(float(at), status=KILLED, cause=cause) for at in range(1, 11)]
    assert plan_one(*exits, now=10.0) == StartLater("w", 10.1, 0.1)


def test_kill_before_ready_counts() -> None:
    assert counts_against(ended(1.0, up_s=0.0, status=KILLED))


def test_hang_counts_though_it_ends_by_a_kill() -> None:
    exits = [ended(float(at), status=KILLED, cause="hang") for at in range(1, 6)]
    assert isinstance(plan_one(*exits, now=5.0), GiveUp)


def test_refused_start_is_not_repeated() -> None:
    action = plan_one(ended(1.0, up_s=0.0, status=ExitStatus(exit_code=2), refused=True), now=100.0)
    assert action == GiveUp("w", "it refused to start (exit code 2)")


def test_signal_is_named_in_words() -> None:
    assert str(ExitStatus(signal=11)) == "signal SIGSEGV"


def test_each_process_is_planned_for_itself() -> None:
    processes = [
        ObservedProcess("a", False),
        ObservedProcess("b", True),
        ObservedProcess("c", False, (ended(9.95),)),
    ]
    assert plan_starts(processes, 10.0, LIMITS) == [StartNow("a"), StartLater("c", 9.95 + 0.1, 0.1)]
