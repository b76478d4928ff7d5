"""Every moment belongs to exactly one part, and nothing of the timers stays."""

import pytest

from engine.linear import Linear
from engine.model import LlamaModel
from engine.part_timers import NORMS, OUTSIDE, REST, ROPE, SILU, Stopwatch, part_timers
from engine.weights import load_model
from tests.engine.helpers import drive, make_engine, make_request


def test_time_in_an_inner_part_is_not_the_outer_ones() -> None:
    times = iter([0.0, 0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    stopwatch = Stopwatch(lambda: next(times))
    stopwatch.reset()
    with stopwatch.part("outer"):  # from 1
        with stopwatch.part("inner"):  # from 3
            pass  # to 6
        pass  # to 10
    assert stopwatch.read() == {OUTSIDE: 1.0 + 5.0, "outer": 2.0 + 4.0, "inner": 3.0}


def test_an_error_within_a_part_ends_it() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0])
    stopwatch = Stopwatch(lambda: next(times))
    with pytest.raises(KeyError), stopwatch.part("inner"):
        raise KeyError
    assert stopwatch.read() == {OUTSIDE: 1.0 + 4.0, "inner": 2.0}


def test_parts_of_a_real_engine() -> None:
    before = LlamaModel.forward, Linear.__call__
    loaded = load_model("synthetic:nano", "float32")
    engine = make_engine(loaded)
    plain = drive(engine, [make_request("a", tuple(range(3, 90)), max_tokens=4)])
    with part_timers(loaded.model) as stopwatch:
        driven = drive(engine, [make_request("b", tuple(range(3, 90)), max_tokens=4)])
        parts_s = stopwatch.read()
    assert driven.tokens["b"] == plain.tokens["a"]
    names = {"qkv", "out", "gate_up", "down", "head", "attention", NORMS, ROPE, SILU, REST, OUTSIDE}
    assert set(parts_s) == names
    assert min(parts_s.values()) > 0.0
    assert (LlamaModel.forward, Linear.__call__) == before
