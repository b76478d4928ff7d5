"""A flood of unproven peers is one line a second."""

from cluster.events import Event, PeerRefused
from cluster.refusal_log import RefusalLog
from transport.errors import AuthError


def test_flood_is_counted_into_the_next_event() -> None:
    now = [10.0]
    events: list[Event] = []
    log = RefusalLog("decode-0", events.append, lambda: now[0])
    log.add("kv", "a:1", AuthError("garbage"))
    for _ in range(5):
        log.add("kv", "a:2", AuthError("garbage"))
    log.add("request", "a:3", AuthError("silent"))
    now[0] += 1.0
    log.add("kv", "a:4", AuthError("wrong"))
    told = [(e.port, e.peer, e.reason, e.count) for e in events if isinstance(e, PeerRefused)]
    assert told == [("kv", "a:1", "garbage", 1), ("request", "a:3", "silent", 1), ("kv", "a:4", "wrong", 6)]
