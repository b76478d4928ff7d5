"""When faults happen: events and a clock in, faults out."""

from typing import Any

from cluster.drill import Drill
from cluster.drill_file import drill_from_tree
from cluster.drill_triggers import Triggers
from cluster.events import (
    Event,
    FirstToken,
    PrefillProgressed,
    RequestArrived,
    RequestDispatched,
    TokensDelivered,
    WorkerReady,
)

WORKERS = ("prefill-0", "prefill-1", "decode-0")
BEGAN = 100.0


def drill(*faults: dict[str, Any]) -> Drill:
    tree = {
        "title": "t",
        "promise": "p",
        "requests": {"long": {"count": 4}, "short": {"count": 4}},
        "faults": list(faults),
    }
    return drill_from_tree(tree, "d", "d")


def triggers(*faults: dict[str, Any]) -> Triggers:
    return Triggers(drill(*faults), WORKERS, BEGAN)


def arrived(name: str, number: int, *, round_: str = "disturbed") -> list[Event]:
    request_id = f"{round_}-{name}-{number}"
    return [
        RequestArrived(
            at=101.0,
            request_id=request_id,
            prompt_tokens=9,
            max_tokens=9,
            client_id=f"{round_}/{name}/{number}",
        ),
        RequestDispatched(
            at=101.0,
            request_id=request_id,
            attempt=1,
            mode="disagg",
            codec="raw",
            decode_worker="decode-0",
            decode_reason="",
            prefill_worker=f"prefill-{number % 2}",
        ),
    ]


def progressed(name: str, number: int, at: float = 102.0, *, round_: str = "disturbed") -> Event:
    return PrefillProgressed(
        at=at, request_id=f"{round_}-{name}-{number}", attempt=1, worker_id="prefill-0", computed_tokens=1
    )


def take(found: Triggers, *events: Event) -> None:
    for event in events:
        found.take(event)


def due(found: Triggers, now: float, *, is_healed: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    return [(fault.fault.fault, fault.targets) for fault in found.due(now, is_healed=is_healed)]


ON_PROGRESS = {"fault": "kill", "target": "prefill", "on": "prefill_progressed", "of": "long"}


def test_a_fault_at_a_time_happens_once() -> None:
    found = triggers({"fault": "kill", "target": "router", "at_s": 2.0})
    assert due(found, 101.9) == []
    assert due(found, 102.0) == [("kill", ("router",))]
    assert due(found, 103.0) == []
    assert found.is_done


def test_a_fault_hits_the_worker_that_the_request_is_on() -> None:
    found = triggers(ON_PROGRESS)
    take(found, *arrived("long", 1), progressed("long", 1))
    assert due(found, 102.0) == [("kill", ("prefill-1",))]


def test_other_groups_and_other_rounds_do_not_count() -> None:
    found = triggers(ON_PROGRESS)
    take(found, *arrived("short", 0), progressed("short", 0))
    take(found, *arrived("long", 0, round_="undisturbed"), progressed("long", 0, round_="undisturbed"))
    assert due(found, 200.0) == []
    assert not found.is_done
    assert found.missed() == [
        "faults[0] (kill prefill) happened 0 of 1 times: on prefill_progressed of long, seen for 0"
    ]


def test_the_fault_waits_for_so_many_requests_and_counts_each_once() -> None:
    found = triggers(ON_PROGRESS | {"requests": 2})
    take(found, *arrived("long", 0), *arrived("long", 1), progressed("long", 0), progressed("long", 0))
    assert due(found, 102.0) == []
    take(found, progressed("long", 1))
    assert due(found, 102.0) == [("kill", ("prefill-1",))]


def test_after_s_counts_from_the_event() -> None:
    found = triggers(ON_PROGRESS | {"after_s": 3.0})
    take(found, *arrived("long", 0), progressed("long", 0, at=102.0))
    assert due(found, 104.9) == []
    assert due(found, 105.0) == [("kill", ("prefill-0",))]


def test_times_happen_on_each_further_request() -> None:
    found = triggers(ON_PROGRESS | {"times": 2})
    for number in range(3):
        take(found, *arrived("long", number), progressed("long", number))
    assert due(found, 102.0) == [("kill", ("prefill-0",)), ("kill", ("prefill-1",))]
    assert due(found, 103.0) == []
    assert found.is_done


def test_an_event_that_is_logged_before_the_arrival_counts_when_the_worker_is_known() -> None:
    found = triggers(ON_PROGRESS)
    arrival, dispatch = arrived("long", 0)
    take(found, progressed("long", 0), arrival)
    assert due(found, 102.0) == []
    take(found, dispatch)
    assert due(found, 102.0) == [("kill", ("prefill-0",))]


def test_position_is_of_the_tokens_delivered() -> None:
    found = triggers(
        {"fault": "kill", "target": "decode", "on": "tokens_delivered", "of": "long", "position": 20}
    )
    take(found, *arrived("long", 0))
    take(
        found,
        TokensDelivered(at=102.0, request_id="disturbed-long-0", first_position=0, token_at=(1.0,) * 20),
    )
    assert due(found, 102.0) == []
    take(found, TokensDelivered(at=102.5, request_id="disturbed-long-0", first_position=20, token_at=(1.0,)))
    assert due(found, 102.5) == [("kill", ("decode-0",))]


def test_a_process_event_before_the_round_does_not_count() -> None:
    found = triggers(
        {"fault": "kill", "target": "prefill-0", "on": "worker_ready", "worker": "prefill-0", "times": 2}
    )

    def ready(at: float, worker_id: str) -> Event:
        return WorkerReady(at=at, worker_id=worker_id, role="prefill", pid=1, after_s=1.0, index=int(at))

    take(found, ready(99.0, "prefill-0"), ready(101.0, "prefill-1"))
    assert due(found, 102.0) == []
    take(found, ready(103.0, "prefill-0"), ready(104.0, "prefill-0"), ready(105.0, "prefill-0"))
    assert due(found, 105.0) == [("kill", ("prefill-0",))] * 2
    assert found.is_done


def test_every_worker_of_a_role() -> None:
    found = triggers({"fault": "kill", "target": "every-prefill", "at_s": 0.0})
    assert due(found, BEGAN) == [("kill", ("prefill-0", "prefill-1"))]


def test_healed_waits_for_the_rules_before_and_their_end() -> None:
    healed = {"fault": "kill", "target": "router", "on": "healed", "after_s": 1.0}
    found = triggers({"fault": "kill", "target": "decode-0", "at_s": 1.0}, healed, healed)
    assert due(found, 100.5) == []
    assert due(found, 101.0) == [("kill", ("decode-0",))]
    assert due(found, 102.0, is_healed=False) == []
    assert due(found, 103.0) == []
    assert due(found, 103.9, is_healed=False) == []
    assert due(found, 104.0) == [("kill", ("router",))]
    assert due(found, 105.0, is_healed=False) == []
    assert due(found, 106.0) == []
    assert due(found, 107.0) == [("kill", ("router",))]
    assert found.is_done


def test_a_client_that_had_its_answer_is_not_the_one_that_leaves() -> None:
    found = triggers({"fault": "leave", "on": "first_token", "of": "long"})
    take(found, *arrived("long", 0), FirstToken(at=102.0, request_id="disturbed-long-0", ttft_ms=1.0))
    (first,) = found.due(102.0, is_healed=True)
    assert (first.client_id, first.targets) == ("disturbed/long/0", ())
    found.again(first)
    assert not found.is_done
    take(found, *arrived("long", 1), FirstToken(at=103.0, request_id="disturbed-long-1", ttft_ms=1.0))
    assert [fault.client_id for fault in found.due(103.0, is_healed=True)] == ["disturbed/long/1"]
    assert found.is_done


def test_a_rule_whose_requests_were_answered_without_its_event_is_stuck() -> None:
    """As when every prompt was in the prefix cache; so are those that wait for it to be over, and nothing else is."""
    on_prefill = {"fault": "kill", "target": "prefill", "on": "prefill_progressed", "of": "long"}
    healed = {"fault": "kill", "target": "router", "on": "healed"}
    ready = {"fault": "kill", "target": "router", "on": "worker_ready", "worker": "decode-0"}
    at = {"fault": "kill", "target": "decode-0", "at_s": 9.0}
    assert triggers(on_prefill, healed).is_stuck
    assert not triggers(on_prefill, ready).is_stuck
    assert not triggers(on_prefill, at).is_stuck
    assert not triggers(healed, on_prefill).is_stuck
    seen = triggers(on_prefill | {"after_s": 5.0})
    take(seen, *arrived("long", 0), progressed("long", 0))
    assert not seen.is_stuck
    assert not triggers().is_stuck
