from cluster.heartbeat import Heartbeats


def test_answering_children_are_alive() -> None:
    heartbeats = Heartbeats(2.0)
    for tick in range(20):
        now = 100 + tick * 0.5
        assert heartbeats.silent({"a": now - 0.4, "b": now - 1.9}, now) == {}


def test_silence_beyond_the_limit_is_named_with_its_length() -> None:
    heartbeats = Heartbeats(2.0)
    silent = {}
    for tick in range(6):
        silent = heartbeats.silent({"a": 100.0, "b": 100 + tick * 0.5}, 100 + tick * 0.5)
    assert silent == {"a": 2.5}


def test_own_pause_is_not_the_childrens_silence() -> None:
    heartbeats = Heartbeats(2.0)
    assert heartbeats.silent({"a": 100.0}, 100.0) == {}
    assert heartbeats.silent({"a": 100.0}, 160.0) == {}, "this process slept; the answers are unread"
    assert heartbeats.silent({"a": 100.0}, 160.5) == {}
    for tick in range(2, 5):
        assert heartbeats.silent({"a": 100.0}, 160 + tick * 0.5) == {}
    assert heartbeats.silent({"a": 100.0}, 162.5) == {"a": 2.5}, "a minute later it still says nothing"
