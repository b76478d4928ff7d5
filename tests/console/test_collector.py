"""Collections of garbage by a clock."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from console.collector import COLLECTIONS_PER_WHOLE_ONE, Collector


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    collector.start()
    yield collector
    collector.stop()


def test_new_cycles_are_collected_and_what_stays_is_left_alone(collector: Collector) -> None:
    kept = Cycle()
    lost = weakref.ref(Cycle())
    collector.collect()
    assert lost() is None
    assert not any(item is kept for item in gc.get_objects())  # frozen


def test_what_was_kept_and_lost_later_goes_with_the_next_whole_collection(collector: Collector) -> None:
    kept = Cycle()
    lost = weakref.ref(kept)
    collector.collect()
    del kept
    collector.collect()
    assert lost() is not None
    for _ in range(COLLECTIONS_PER_WHOLE_ONE - 1):
        collector.collect()
    assert lost() is None


def test_python_collects_as_before_once_it_has_stopped() -> None:
    before = gc.get_threshold()
    collector = Collector()
    collector.start()
    collector.collect()
    assert gc.get_threshold() != before
    collector.stop()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
