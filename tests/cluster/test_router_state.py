"""The router's rules: facts in, instructions out. No process, socket or clock takes part."""

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest

from cluster.attempts import DEATH_NOTICE_S
from cluster.control import (
    AbortRequest,
    AbsentWorker,
    DecodeAdopted,
    HandoffFailed,
    PrefillDone,
    StartDecode,
    StartLocal,
    StartPrefill,
    TokenProduced,
    Tokens,
    WorkerAddress,
)
from cluster.dispatch import RouterLimits
from cluster.events import (
    FellBack,
    FirstToken,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RequestMigrated,
    RequestRejected,
    RequestRetried,
    TokensDelivered,
    WorkerDrained,
)
from cluster.handoff_forecast import HandoffForecast
from cluster.router_messages import (
    ClientLeft,
    CodecSet,
    Deliver,
    Emit,
    Fail,
    Instruction,
    ModeSet,
    RequestSubmitted,
    Send,
    Stimulus,
    StopMatched,
    Ticked,
    TokensWritten,
    WorkerConnected,
    WorkerLost,
    WorkerSaid,
    WorkersListed,
)
from cluster.router_state import RouterState
from engine.request import SamplingParams

LIMITS = RouterLimits(
    max_queue=4, queue_timeout_s=10.0, max_attempts=5, fallback=True, handoff="always", kv_path="v2"
)


def address(worker_id: str, total_blocks: int = 100, port: int = 1) -> WorkerAddress:
    return WorkerAddress(
        worker_id=worker_id,
        role=worker_id.split("-")[0],
        control_host="127.0.0.1",
        control_port=port,
        kv_host="127.0.0.1",
        kv_port=port,
        total_blocks=total_blocks,
        block_size=16,
        max_num_seqs=8,
        max_model_len=8192,
        kv_bytes_per_token=1024,
        fingerprint="f",
    )


def coming(worker_id: str, is_coming: bool = True) -> AbsentWorker:
    return AbsentWorker(worker_id=worker_id, role=worker_id.split("-")[0], is_coming=is_coming)


def forecast() -> HandoffForecast:
    return HandoffForecast(max_num_batched_tokens=512, allow_lossy=False)


class Cluster:
    """A RouterState whose clock the test moves."""

    def __init__(
        self,
        *workers: WorkerAddress,
        limits: RouterLimits = LIMITS,
        mode: str = "disagg",
        absent: Sequence[AbsentWorker] = (),
    ) -> None:
        self.now = 100.0
        self.state = RouterState(limits, mode, "raw", forecast())
        self.do(WorkersListed(workers, tuple(absent)))
        for worker in workers:
            self.do(WorkerConnected(worker.worker_id))

    def do(self, stimulus: Stimulus, after_s: float = 0.0) -> list[Instruction]:
        self.now += after_s
        return self.state.handle(stimulus, self.now)

    def submit(
        self, request_id: str = "r1", num_prompt_tokens: int = 32, max_tokens: int = 4
    ) -> list[Instruction]:
        return self.do(
            RequestSubmitted(
                request_id,
                tuple(range(num_prompt_tokens)),
                SamplingParams(max_tokens=max_tokens),
                self.now - 0.001,
            )
        )

    def token(
        self, worker_id: str, position: int, attempt: int = 1, finish: str = "", request_id: str = "r1"
    ) -> list[Instruction]:
        token = TokenProduced(
            request_id=request_id,
            attempt=attempt,
            position=position,
            token_id=7 + position,
            at=self.now,
            finish_reason=finish,
        )
        return self.do(WorkerSaid(worker_id, Tokens(tokens=(token,))))

    def adopted(self, attempt: int = 1) -> None:
        now = self.now
        done = PrefillDone(request_id="r1", attempt=attempt, started_at=now + 0.01, done_at=now + 0.03)
        self.do(WorkerSaid("prefill-0", done))
        self.now = now + 0.06
        self.do(
            WorkerSaid(
                "decode-0",
                DecodeAdopted(
                    request_id="r1",
                    attempt=attempt,
                    verified_at=now + 0.04,
                    admitted_at=now + 0.05,
                    prefill_started_at=now + 0.01,
                    prefill_done_at=now + 0.03,
                ),
            )
        )

    def failed(self, reason: str, attempt: int = 1, worker_id: str = "decode-0") -> list[Instruction]:
        return self.do(WorkerSaid(worker_id, HandoffFailed(request_id="r1", attempt=attempt, reason=reason)))


def sent(instructions: list[Instruction]) -> list[tuple[str, str]]:
    return [(i.worker_id, type(i.message).__name__) for i in instructions if isinstance(i, Send)]


def message_to(instructions: list[Instruction], worker_id: str, kind: type) -> object:
    (found,) = [
        i.message
        for i in instructions
        if isinstance(i, Send) and i.worker_id == worker_id and isinstance(i.message, kind)
    ]
    return found


def events(instructions: list[Instruction], kind: type) -> list[object]:
    return [i.event for i in instructions if isinstance(i, Emit) and isinstance(i.event, kind)]


def pair() -> Cluster:
    return Cluster(address("prefill-0"), address("decode-0"))


def no_promises(cluster: Cluster) -> bool:
    return all(not w.assigned_blocks and not w.queued_prompt_tokens for w in cluster.state.workers.values())


def test_disagg_request_goes_to_both_roles_decode_told_first() -> None:
    out = pair().submit()
    assert sent(out) == [("decode-0", "StartDecode"), ("prefill-0", "StartPrefill")]
    (dispatched,) = events(out, RequestDispatched)
    assert isinstance(dispatched, RequestDispatched)
    assert dispatched.decode_reason
    assert dispatched.prefill_reason


def test_whole_life_emits_parts_that_sum_and_frees_promises() -> None:
    cluster = pair()
    cluster.submit(max_tokens=2)
    cluster.adopted()
    out = cluster.token("decode-0", 0)
    assert out == [Deliver("r1", 7)]
    (first,) = events(cluster.do(TokensWritten("r1", 1), after_s=0.001), FirstToken)
    assert isinstance(first, FirstToken)
    parts = first.queue_ms + first.prefill_ms + first.transfer_exposed_ms + first.admit_wait_ms
    parts += first.first_decode_ms + first.router_ms
    assert first.ttft_ms == pytest.approx(parts)
    assert first.prefill_ms == pytest.approx(20.0)
    assert first.transfer_exposed_ms == pytest.approx(10.0)
    assert first.residual_ms == pytest.approx(0.0, abs=1e-6)
    assert cluster.token("decode-0", 1, finish="length") == [Deliver("r1", 8, "length")]
    out = cluster.do(TokensWritten("r1", 1), after_s=0.002)
    (finished,) = events(out, RequestFinished)
    assert isinstance(finished, RequestFinished)
    assert finished.output_tokens == 2
    assert finished.tpot_ms == pytest.approx(2.0)
    (delivered,) = events(out, TokensDelivered)
    assert isinstance(delivered, TokensDelivered)
    assert len(delivered.token_at) == 2
    assert not cluster.state.requests
    assert no_promises(cluster)


def test_least_queued_prefill_and_freest_decode_are_picked() -> None:
    cluster = Cluster(*(address(w) for w in ("prefill-0", "prefill-1", "decode-0", "decode-1")))
    assert sent(cluster.submit("r1", num_prompt_tokens=500)) == [
        ("decode-0", "StartDecode"),
        ("prefill-0", "StartPrefill"),
    ]
    assert sent(cluster.submit("r2")) == [("decode-1", "StartDecode"), ("prefill-1", "StartPrefill")]
    assert sent(cluster.submit("r3"))[1] == ("prefill-1", "StartPrefill")


def test_prefill_death_retries_on_another_prefill_worker() -> None:
    cluster = Cluster(address("prefill-0"), address("prefill-1"), address("decode-0"))
    cluster.submit()
    out = cluster.do(WorkerLost("prefill-0", "connection closed"))
    assert sent(out) == [
        ("decode-0", "AbortRequest"),
        ("decode-0", "StartDecode"),
        ("prefill-1", "StartPrefill"),
    ]
    start = message_to(out, "prefill-1", StartPrefill)
    assert isinstance(start, StartPrefill)
    assert start.attempt == 2
    (retried,) = events(out, RequestRetried)
    assert isinstance(retried, RequestRetried)
    assert retried.reason == "prefill_died"
    assert not events(out, FellBack)


def test_last_prefill_death_falls_back_on_the_same_decode_worker() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0", total_blocks=101), address("decode-1"))
    assert sent(cluster.submit("r1", num_prompt_tokens=800))[0] == (
        "decode-0",
        "StartDecode",
    )  # decode-1 is freer now
    out = cluster.do(WorkerLost("prefill-0", "connection closed"))
    local = message_to(out, "decode-0", StartLocal)
    assert isinstance(local, StartLocal)
    assert local.attempt == 2
    assert [e.reason for e in events(out, FellBack) if isinstance(e, FellBack)] == ["prefill_died"]


def test_prefill_death_after_adoption_disturbs_nothing() -> None:
    cluster = pair()
    cluster.submit()
    cluster.adopted()
    cluster.token("decode-0", 0)
    assert cluster.do(WorkerLost("prefill-0", "gone")) == []


@pytest.mark.parametrize("reason", ["checksum", "timeout", "mismatch", "protocol"])
def test_failed_transfer_falls_back_with_its_reason(reason: str) -> None:
    cluster = pair()
    cluster.submit()
    out = cluster.failed(reason)
    assert sent(out) == [
        ("prefill-0", "AbortRequest"),
        ("decode-0", "AbortRequest"),
        ("decode-0", "StartLocal"),
    ]
    (fell,) = events(out, FellBack)
    assert isinstance(fell, FellBack)
    assert fell.reason == f"transfer_{reason}"


@pytest.mark.parametrize("reason", ["peer_closed", "truncated"])
def test_ended_stream_waits_for_news_of_a_death(reason: str) -> None:
    cluster = Cluster(address("prefill-0"), address("prefill-1"), address("decode-0"))
    cluster.submit()
    assert cluster.failed(reason) == []
    out = cluster.do(WorkerLost("prefill-0", "gone"), after_s=DEATH_NOTICE_S / 2)
    assert ("prefill-1", "StartPrefill") in sent(out)


def test_closed_connection_without_a_death_is_a_failed_transfer() -> None:
    cluster = pair()
    cluster.submit()
    cluster.failed("peer_closed")
    assert cluster.do(Ticked(), after_s=DEATH_NOTICE_S / 2) == []
    out = cluster.do(Ticked(), after_s=DEATH_NOTICE_S)
    (fell,) = events(out, FellBack)
    assert isinstance(fell, FellBack)
    assert fell.reason == "transfer_peer_closed"


def test_second_report_of_the_same_failure_is_old_news() -> None:
    cluster = pair()
    cluster.submit()
    cluster.failed("checksum")
    assert cluster.failed("checksum", worker_id="prefill-0") == []


def test_full_decode_worker_means_another_one() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"), address("decode-1", total_blocks=90))
    assert sent(cluster.submit())[0] == ("decode-0", "StartDecode")
    out = cluster.failed("decode_full")
    assert sent(out) == [("prefill-0", "AbortRequest"), ("decode-0", "AbortRequest")]
    out = cluster.do(Ticked(), after_s=0.1)
    assert ("decode-1", "StartDecode") in sent(out)


def test_no_room_waits_and_then_goes() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0", total_blocks=5))
    cluster.submit("r1", num_prompt_tokens=60)
    assert sent(cluster.submit("r2", num_prompt_tokens=60)) == []
    out = cluster.do(ClientLeft("r1"))
    assert ("decode-0", "StartDecode") in sent(out)


def test_full_queue_answers_429_with_retry_after() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0", total_blocks=5))
    for number in range(LIMITS.max_queue + 1):
        cluster.submit(f"r{number}", num_prompt_tokens=60)
    out = cluster.submit("late", num_prompt_tokens=60)
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert (fail.status, fail.retry_after_s) == (429, 1)
    assert events(out, RequestRejected)
    assert "late" not in cluster.state.requests


@pytest.mark.parametrize(("waited_s", "retry_after_s"), [(0.2, 1), (7.3, 8), (500.0, 60)])
def test_retry_after_is_what_the_queues_first_request_has_waited(waited_s: float, retry_after_s: int) -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0", total_blocks=5))
    for number in range(LIMITS.max_queue + 1):
        cluster.submit(f"r{number}", num_prompt_tokens=60)
    cluster.now += waited_s
    (fail,) = [i for i in cluster.submit("late", num_prompt_tokens=60) if isinstance(i, Fail)]
    assert (fail.status, fail.retry_after_s) == (429, retry_after_s)


def test_request_larger_than_any_worker_is_refused_with_numbers() -> None:
    (fail,) = [i for i in pair().submit(num_prompt_tokens=1700) if isinstance(i, Fail)]
    assert fail.status == 400
    assert "1704" in fail.message
    assert "1600" in fail.message


def test_waiting_too_long_answers_503() -> None:
    cluster = Cluster(address("prefill-0"), absent=[coming("decode-0")])
    cluster.submit()
    assert cluster.do(Ticked(), after_s=LIMITS.queue_timeout_s - 1) == []
    out = cluster.do(Ticked(), after_s=2.0)
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert fail.status == 503
    assert not cluster.state.queue


def test_decode_death_goes_on_after_the_delivered_tokens() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"), address("decode-1", total_blocks=90))
    cluster.submit()
    cluster.adopted()
    cluster.token("decode-0", 0)
    cluster.token("decode-0", 1)
    out = cluster.do(WorkerLost("decode-0", "gone"))
    (migrated,) = events(out, RequestMigrated)
    assert isinstance(migrated, RequestMigrated)
    assert migrated.delivered_tokens == 2
    local = message_to(out, "decode-1", StartLocal)
    assert isinstance(local, StartLocal)
    assert local.output_token_ids == (7, 8)
    assert cluster.token("decode-1", 1, attempt=2) == []  # delivered before
    assert cluster.token("decode-1", 2, attempt=2) == [Deliver("r1", 9)]


def test_tokens_of_an_old_attempt_are_dropped() -> None:
    cluster = pair()
    cluster.submit()
    cluster.failed("checksum")
    assert cluster.token("decode-0", 0, attempt=1) == []
    assert cluster.token("decode-0", 0, attempt=2) == [Deliver("r1", 7)]


def test_client_gone_aborts_on_both_workers() -> None:
    cluster = pair()
    cluster.submit()
    out = cluster.do(ClientLeft("r1"))
    assert sent(out) == [("prefill-0", "AbortRequest"), ("decode-0", "AbortRequest")]
    (cancelled,) = events(out, RequestCancelled)
    assert isinstance(cancelled, RequestCancelled)
    assert cancelled.phase == "prefill"
    assert no_promises(cluster)


def test_stop_string_ends_the_request_as_finished() -> None:
    cluster = pair()
    cluster.submit()
    cluster.adopted()
    cluster.token("decode-0", 0)
    cluster.do(TokensWritten("r1", 1))
    out = cluster.do(StopMatched("r1"))
    assert isinstance(message_to(out, "decode-0", AbortRequest), AbortRequest)
    (finished,) = events(out, RequestFinished)
    assert isinstance(finished, RequestFinished)
    assert (finished.finish_reason, finished.output_tokens) == ("stop", 1)


def test_fallback_off_lets_the_failure_through() -> None:
    limits = RouterLimits(4, 10.0, 5, fallback=False, handoff="always", kv_path="v2")
    cluster = Cluster(address("prefill-0"), address("decode-0"), limits=limits)
    cluster.submit()
    out = cluster.failed("checksum")
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert fail.status == 502
    assert events(out, RequestFailed)
    assert no_promises(cluster)


def test_attempts_are_bounded() -> None:
    cluster = pair()
    cluster.submit()
    for attempt in range(1, LIMITS.max_attempts + 1):
        out = cluster.failed("checksum", attempt=attempt)
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert fail.status == 500
    assert str(LIMITS.max_attempts) in fail.message


def test_a_request_that_goes_on_may_move_as_often_as_workers_die() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"))
    cluster.submit(max_tokens=50)
    cluster.adopted()
    for position in range(3 * LIMITS.max_attempts):
        assert cluster.token("decode-0", position, attempt=position + 1) != []
        cluster.do(WorkerLost("decode-0", "gone"))
        out = cluster.do(WorkerConnected("decode-0"))
        assert isinstance(message_to(out, "decode-0", StartLocal), StartLocal)


def test_colocated_uses_every_worker_and_a_switch_spares_those_in_flight() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"))
    cluster.submit("r1")
    cluster.do(ModeSet("colocated", "test"))
    assert sent(cluster.submit("r2")) == [("decode-0", "StartLocal")]
    assert sent(cluster.submit("r3")) == [("prefill-0", "StartLocal")]  # decode-0 has two sequences already
    out = cluster.failed("checksum")
    assert cluster.state.requests["r1"].mode == "disagg"
    assert isinstance(message_to(out, "decode-0", StartLocal), StartLocal)


def test_codec_switch_applies_to_the_next_request() -> None:
    cluster = pair()
    cluster.submit("r1")
    cluster.do(CodecSet("int8", "test"))
    start = message_to(cluster.submit("r2"), "prefill-0", StartPrefill)
    assert isinstance(start, StartPrefill)
    assert start.codec == "int8"
    assert cluster.state.requests["r1"].codec == "raw"


def test_a_worker_with_a_new_address_is_a_new_worker() -> None:
    cluster = pair()
    cluster.submit()
    out = cluster.do(WorkersListed((address("prefill-0", port=2), address("decode-0"))))
    assert ("decode-0", "StartLocal") in sent(out)
    assert not cluster.state.workers["prefill-0"].connected
    assert isinstance(message_to(out, "decode-0", AbortRequest), AbortRequest)
    assert not [i for i in out if isinstance(i, Send) and isinstance(i.message, StartDecode)]


def test_a_request_waits_for_a_decode_worker_that_is_coming_back() -> None:
    cluster = Cluster(address("prefill-0"), absent=[coming("decode-0")])
    assert sent(cluster.submit()) == []
    back = address("decode-0", port=9)
    cluster.do(WorkersListed((address("prefill-0"), back)))
    assert ("decode-0", "StartDecode") in sent(cluster.do(WorkerConnected("decode-0")))


def test_nobody_waits_for_a_worker_that_was_given_up() -> None:
    cluster = Cluster(address("prefill-0"), absent=[coming("decode-0")])
    cluster.submit()
    out = cluster.do(WorkersListed((address("prefill-0"),), (coming("decode-0", False),)))
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert (fail.status, fail.retry_after_s) == (503, 1)
    assert [type(e) for e in events(out, RequestFailed)] == [RequestFailed]
    (fail,) = [i for i in cluster.submit("r2") if isinstance(i, Fail)]
    assert (fail.status, fail.retry_after_s) == (503, 1)
    assert events(cluster.submit("r3"), RequestRejected)
    assert not cluster.state.queue


def test_a_router_that_knows_of_no_worker_yet_lets_requests_wait() -> None:
    state = RouterState(LIMITS, "disagg", "raw", forecast())
    asked = RequestSubmitted("r1", (1, 2), SamplingParams(max_tokens=2), 1.0)
    assert not [i for i in state.handle(asked, 1.0) if isinstance(i, Fail)]
    assert list(state.queue) == ["r1"]


def test_a_waiting_request_that_fits_no_worker_that_came_does_not_hold_the_others() -> None:
    cluster = Cluster(address("prefill-0"), absent=[coming("decode-0")])
    cluster.submit("large", num_prompt_tokens=1700)
    cluster.submit("small")
    out = cluster.do(WorkersListed((address("prefill-0"), address("decode-0"))))
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert (fail.request_id, fail.status) == ("large", 400)
    out = cluster.do(WorkerConnected("decode-0"))
    assert ("decode-0", "StartDecode") in sent(out)


def test_fallback_off_waits_for_a_prefill_worker_that_is_coming_back() -> None:
    limits = RouterLimits(4, 10.0, 5, fallback=False, handoff="always", kv_path="v2")
    cluster = Cluster(address("decode-0"), limits=limits, absent=[coming("prefill-0")])
    assert sent(cluster.submit()) == []
    out = cluster.do(WorkersListed((address("decode-0"),), (coming("prefill-0", False),)))
    (fail,) = [i for i in out if isinstance(i, Fail)]
    assert fail.status == 503


def drain(cluster: Cluster, *worker_ids: str) -> list[Instruction]:
    listed = tuple(view.address for view in cluster.state.workers.values())
    return cluster.do(WorkersListed(listed, draining=worker_ids))


def drained(out: list[Instruction]) -> list[str]:
    return [event.worker_id for event in events(out, WorkerDrained) if isinstance(event, WorkerDrained)]


def test_fallback_off_waits_while_the_only_prefill_worker_drains_for_a_restart() -> None:
    limits = dataclasses.replace(LIMITS, fallback=False)
    cluster = Cluster(address("prefill-0"), address("decode-0"), limits=limits)
    drain(cluster, "prefill-0")
    assert [i for i in cluster.submit() if isinstance(i, (Fail, Send))] == []
    assert ("prefill-0", "StartPrefill") in sent(drain(cluster))


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"), address("decode-1", total_blocks=90))
    cluster.submit("r1", max_tokens=1)
    assert drained(drain(cluster, "decode-0")) == []
    out = cluster.submit("r2")
    assert sent(out)[0] == ("decode-1", "StartDecode")
    (dispatched,) = events(out, RequestDispatched)
    assert isinstance(dispatched, RequestDispatched)
    assert dispatched.decode_reason.endswith("; draining: decode-0")
    cluster.adopted()
    out = cluster.token("decode-0", 0, finish="length")
    assert Deliver("r1", 7, "length") in out
    assert drained(out) == ["decode-0"]
    assert drained(cluster.submit("r3")) == []  # told once
    drain(cluster)
    assert drained(drain(cluster, "decode-0")) == ["decode-0"]  # another drain


def test_a_draining_prefill_worker_is_drained_when_its_transfers_are() -> None:
    cluster = Cluster(address("prefill-0"), address("prefill-1"), address("decode-0"))
    cluster.submit("r1")
    assert drained(drain(cluster, "prefill-0")) == []
    assert sent(cluster.submit("r2"))[1] == ("prefill-1", "StartPrefill")
    done = PrefillDone(request_id="r1", attempt=1, started_at=1.0, done_at=2.0)
    assert drained(cluster.do(WorkerSaid("prefill-0", done))) == []
    assert drained(cluster.token("decode-0", 0)) == ["prefill-0"]


def test_requests_wait_while_every_decode_worker_drains() -> None:
    cluster = pair()
    drain(cluster, "decode-0")
    assert sent(cluster.submit()) == []
    assert ("decode-0", "StartDecode") in sent(drain(cluster))


def test_a_failed_transfer_does_not_fall_back_to_a_draining_worker() -> None:
    cluster = Cluster(address("prefill-0"), address("decode-0"), address("decode-1", total_blocks=90))
    cluster.submit()
    drain(cluster, "decode-0")
    out = cluster.failed("checksum")
    assert ("decode-1", "StartLocal") in sent(out)
    assert drained(out) == ["decode-0"]


def test_a_role_changes_new_requests_only() -> None:
    cluster = Cluster(address("prefill-0"), address("prefill-1"), address("decode-0"))
    cluster.submit("r1")
    now_decode = msgspec.structs.replace(address("prefill-1"), role="decode")
    assert sent(cluster.do(WorkersListed((address("prefill-0"), now_decode, address("decode-0"))))) == []
    assert sent(cluster.submit("r2")) == [("prefill-1", "StartDecode"), ("prefill-0", "StartPrefill")]
    assert cluster.state.workers["prefill-1"].connected
