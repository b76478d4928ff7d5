"""How the console keeps its own cost down."""

import asyncio
import time

import pytest

from console.own_cost import LAG_LIMIT_S, SAMPLE_S, LoopLag, RedrawPace


def drawn(pace: RedrawPace, begin: float, seconds: float, *, cpu: float = 5.0, lag_s: float = 0.0) -> int:
    """How many of the ticks of that time, two a second, drew."""
    return sum(pace.due(begin + tick * 0.5, cpu, lag_s) for tick in range(int(seconds * 2)))


def test_it_draws_as_asked_while_that_is_cheap() -> None:
    pace = RedrawPace(2.0)
    assert drawn(pace, 0.0, 10.0) == 20
    assert (pace.redraws_per_s, pace.skipped) == (2.0, 0)


@pytest.mark.parametrize(("cpu", "lag_s"), [(40.0, 0.0), (1.0, 2 * LAG_LIMIT_S)])
def test_it_draws_less_while_it_costs_too_much_down_to_a_quarter(cpu: float, lag_s: float) -> None:
    pace = RedrawPace(2.0)
    first = drawn(pace, 0.0, 4 * SAMPLE_S, cpu=cpu, lag_s=lag_s)
    assert pace.redraws_per_s == 0.5
    assert first < 4 * SAMPLE_S * 2
    assert drawn(pace, 100.0, 16.0, cpu=cpu, lag_s=lag_s) == 8
    assert pace.skipped > 0


def test_without_a_limit_it_draws_as_asked() -> None:
    pace = RedrawPace(2.0, float("inf"))
    assert drawn(pace, 0.0, 10.0, cpu=99.0, lag_s=3.0) == 20


def test_it_comes_back_only_when_twice_the_redraws_would_be_cheap() -> None:
    pace = RedrawPace(2.0, cpu_limit_percent=15.0)
    drawn(pace, 0.0, SAMPLE_S, cpu=20.0)
    assert pace.redraws_per_s == 1.0
    drawn(pace, 10.0, 20.0, cpu=10.0)
    assert pace.redraws_per_s == 1.0  # 20 % at twice the rate
    drawn(pace, 40.0, 20.0, cpu=6.0)
    assert pace.redraws_per_s == 2.0


def test_a_loop_that_was_blocked_is_counted_in_skipped_redraws() -> None:
    pace = RedrawPace(2.0)
    assert pace.due(0.0, 0.0, 0.0)
    assert pace.due(5.0, 0.0, 0.0)
    assert pace.skipped == 9


async def test_the_lag_is_the_worst_of_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lag = LoopLag()
    now = [100.0]
    late = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds + late[0]

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for late[0] in (0.01, 0.3, 0.02):
        await lag.sleep(0.1)
    assert lag.worst_s == pytest.approx(0.3)
    late[0] = 0.0
    for _ in range(60):
        await lag.sleep(0.1)
    assert lag.worst_s == pytest.approx(0.0, abs=1e-9)
