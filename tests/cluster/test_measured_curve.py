"""What a few measurements say of sizes that were never measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.measured_curve import ENOUGH, RECENT, MeasuredCurve


def curve(**points: float) -> MeasuredCurve:
    """``n64=0.01``: 64 units take 10 ms."""
    made = MeasuredCurve()
    for name, time_s in points.items():
        made.learn(int(name[1:]), time_s)
    return made


def test_nothing_measured_is_nothing_said() -> None:
    assert MeasuredCurve().at(100) is None
    assert MeasuredCurve().near(100) is None


def test_one_measurement_is_taken_in_proportion() -> None:
    assert curve(n1000=0.2).at(500) == pytest.approx(0.1)
    assert curve(n1000=0.2).at(4000) == pytest.approx(0.8)


def test_between_two_sizes_runs_a_straight_line() -> None:
    assert curve(n64=0.010, n512=0.066).at(288) == pytest.approx(0.038)


def test_a_prefill_is_foreseen_beyond_the_lengths_that_were_measured() -> None:
    """a n + b n^2 is met exactly by two lengths."""

    def prefill_s(tokens: int) -> float:
        return 1e-4 * tokens + 2e-8 * tokens**2

    made = curve(n512=prefill_s(512), n2048=prefill_s(2048))
    assert made.at(8000) == pytest.approx(prefill_s(8000))


def test_a_fixed_cost_does_not_make_long_prompts_free() -> None:
    assert curve(n2=0.002, n64=0.004).at(640) == pytest.approx(0.04)


def test_two_sizes_close_together_do_not_decide_what_long_ones_take() -> None:
    """2,000 and 2,048 lie in two doublings: the noise between them must not be taken for a slope."""
    made = curve(n512=0.1, n2000=0.4, n2048=0.5)
    assert made.at(8000) < 4.0  # type: ignore[operator]


def test_one_disturbed_measurement_is_forgotten_and_a_lasting_change_followed() -> None:
    made = MeasuredCurve()
    for time_s in (0.1, 0.1, 5.0, 0.1):
        made.learn(100, time_s)
    assert made.at(100) == pytest.approx(0.1)
    for _ in range(RECENT):
        made.learn(100, 0.3)
    assert made.at(100) == pytest.approx(0.3)


def test_a_workers_own_measurements_count_once_there_are_enough() -> None:
    base = curve(n100=0.1)
    own = MeasuredCurve(base)
    assert own.at(100) == pytest.approx(0.1)
    for number in range(ENOUGH):
        assert own.at(100) == pytest.approx(0.1), number
        own.learn(100, 0.2)
    assert own.at(100) == pytest.approx(0.2)
    assert base.at(100) == pytest.approx(0.1)


def test_near_takes_the_closest_size_as_it_is() -> None:
    made = curve(n2=0.001, n1000=0.003)
    assert made.near(4) == pytest.approx(0.001)
    assert made.near(100_000) == pytest.approx(0.003)


@given(
    st.dictionaries(st.integers(1, 10_000), st.floats(1e-6, 10.0), min_size=1, max_size=20),
    st.integers(1, 20_000),
)
def test_a_forecast_is_never_negative(points: dict[int, float], size: int) -> None:
    made = MeasuredCurve()
    for measured, time_s in points.items():
        made.learn(measured, time_s)
    found = made.at(size)
    assert found is not None
    assert found >= 0
