"""``--handoff auto`` in a real cluster: what it decides, by which numbers, and what that took."""

import json
import signal
from collections.abc import Callable

import pytest

from cluster.events import (
    FirstToken,
    HandoffChanged,
    HandoffChosen,
    HandoffMeasured,
    LinkConfigured,
    PrefillFinished,
    RequestArrived,
    RequestDispatched,
    RunReady,
)
from cluster.link_tuner import LENGTHS
from tests.e2e.client import Client
from tests.e2e.conftest import RunningCluster

pytestmark = pytest.mark.slow

Start = Callable[..., RunningCluster]
STREAMS = 3


def prompt(num_tokens: int, number: int = 0) -> list[int]:
    return [(7 * n + 31 * number + 5) % 251 for n in range(num_tokens)]


def parts_add_up(event: HandoffChosen) -> bool:
    remote = (
        event.remote_queue_ms + event.remote_prefill_ms + event.remote_transfer_ms + event.remote_stall_ms
    )
    local = event.local_queue_ms + event.local_prefill_ms + event.local_stall_ms
    return (remote, local) == (pytest.approx(event.remote_ms), pytest.approx(event.local_ms))


def test_auto_weighs_every_request_by_what_it_measured(running_cluster: Start) -> None:
    cluster = running_cluster(
        "--handoff", "auto", "--set", "engine.prefix_caching=false", "--json"
    ).wait_ready()

    # each worker has computed prompts of several lengths before it serves
    ready = cluster.wait_for(RunReady)
    computed = {
        (event.worker_id, event.prompt_tokens)
        for event in cluster.events()
        if isinstance(event, PrefillFinished) and event.index < ready.index
    }
    assert {(worker, LENGTHS[0]) for worker in ("prefill-0", "decode-0")} <= computed

    def arrived(tokens: int) -> str:
        event = cluster.wait_for(RequestArrived, lambda e: e.label == "client" and e.prompt_tokens == tokens)
        return event.request_id

    def chosen(request_id: str) -> HandoffChosen:
        event = cluster.wait_for(HandoffChosen, lambda e: e.request_id == request_id)
        assert parts_add_up(event)
        assert event.link_source == "measured"
        return event

    with Client(cluster) as client:
        # two long prompts are with the only prefill worker: a short one is served before they are
        streams = [client.background(prompt(20 + n, n), max_tokens=1500) for n in range(STREAMS)]
        for number in range(STREAMS):
            request_id = arrived(20 + number)
            cluster.wait_for(FirstToken, lambda e, r=request_id: e.request_id == r)
        longs = [client.background(prompt(8000 - n, n)) for n in range(2)]
        long_ids = [arrived(8000), arrived(7999)]
        for request_id in long_ids:
            event = chosen(request_id)
            assert event.choice == "remote", event.reason
            assert event.streams >= STREAMS
        client.complete(prompt(64))
        short = cluster.wait_for(FirstToken, lambda e: e.request_id == arrived(64))
        assert chosen(short.request_id).reason
        assert not [e for e in cluster.events() if isinstance(e, FirstToken) and e.request_id in long_ids[1:]]
        for answer in (*streams, *longs):
            answer.text()

        # what it took is beside what was foreseen
        measured = cluster.wait_for(HandoffMeasured, lambda e: e.request_id == short.request_id)
        assert measured.actual_ms == pytest.approx(
            measured.queue_ms + measured.prefill_ms + measured.transfer_ms, abs=0.01
        )
        assert measured.forecast_ms > 0

        # the same prompt on a link that takes seconds for it
        before = len(cluster.events())
        client.command({"msg": "change_link", "bits_per_s": 5e6})
        cluster.wait_for(LinkConfigured, lambda e: e.asked_bits_per_s == 5e6)
        client.complete(prompt(4000, 9))
        slow = cluster.wait_for(HandoffChosen, lambda e: e.index >= before)
        assert (slow.choice, slow.streams) == ("local", 0), slow.reason
        assert slow.remote_transfer_ms > 500

        # and never is never
        client.command({"msg": "set_handoff", "handoff": "never"})
        cluster.wait_for(HandoffChanged, lambda e: e.handoff == "never")
        client.complete(prompt(301, 10))
        never = cluster.wait_for(RequestDispatched, lambda e: e.request_id == arrived(301))
        assert (never.prefill_worker, never.prefill_reason) == ("", "handoff is never")
        refused = client.command({"msg": "set_handoff", "handoff": "sometimes"})
        assert "allowed: always, auto, never" in refused.text
        metrics = client.get("/metrics").text
    ended = cluster.end(signal.SIGINT)
    handoff = json.loads(ended.stdout)["handoff"]
    assert handoff["settings"] == ["auto", "never"]
    assert handoff["remote"] + handoff["local"] == STREAMS + 2 + 1 + 1
    assert handoff["unweighed"] == 0
    assert handoff["forecast_error_ms"]["count"] == STREAMS + 2 + 1 + 1
    assert f"pdconsole:handoff_forecast_error_seconds_count {STREAMS + 4}.0" in metrics
