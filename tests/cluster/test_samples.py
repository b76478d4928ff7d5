import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.samples import Reservoir, Samples, percentile, percentiles


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], q: int) -> None:
    samples = Samples()
    samples.extend(values)
    assert samples.percentile(q) == float(np.percentile(values, q))
    assert samples.max == max(values)
    assert samples.mean == pytest.approx(math.fsum(values) / len(values))


def test_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None
    assert Samples().mean is None


def test_pool_beyond_its_capacity_stays_a_fair_sample() -> None:
    samples = Samples(capacity=2_000)
    samples.extend(float(value) for value in range(100_000))

    assert samples.count == 100_000
    assert samples.max == 99_999.0
    assert samples.mean == pytest.approx(49_999.5)
    for q in (10, 50, 90):
        found = samples.percentile(q)
        assert found is not None
        assert found == pytest.approx(q * 1000, abs=5_000)


def test_reservoir_fills_then_replaces_within_bounds() -> None:
    reservoir = Reservoir(3)
    places = [reservoir.place() for _ in range(200)]
    assert places[:3] == [0, 1, 2]
    assert set(places[3:]) <= {None, 0, 1, 2}
    assert None in places
    assert {0, 1, 2} & set(places[3:])


def test_several_percentiles_at_once_are_the_single_ones() -> None:
    values = [5.0, 1.0, 4.0, 2.5]
    assert percentiles(values, 50, 99) == (percentile(values, 50), percentile(values, 99))
    assert percentiles([], 50, 99) == (None, None)
