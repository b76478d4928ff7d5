"""How the router weighs handing off against prefilling on the decode worker: facts in, instructions out."""

import pytest

from cluster.control import DecodeAdopted, PrefillDone, TokenProduced, Tokens, WorkerLoad
from cluster.dispatch import RouterLimits
from cluster.events import FellBack, HandoffChanged, HandoffChosen, HandoffMeasured, RequestDispatched
from cluster.handoff_forecast import HandoffForecast, Prompt
from cluster.router_messages import (
    CodecSet,
    Emit,
    HandoffSet,
    Instruction,
    LinkSet,
    TokensWritten,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
    WorkerSaid,
    WorkersListed,
)
from cluster.selection import WorkerView
from tests.cluster.test_router_state import Cluster, address, events, sent
from transport.codec_choice import CodecRate

AUTO = RouterLimits(16, 10.0, 5, fallback=True, handoff="auto", kv_path="v2")
NEVER = RouterLimits(16, 10.0, 5, fallback=True, handoff="never", kv_path="v2")
BYTES_PER_TOKEN = 1024  # of ``address``
TOKEN_S = 0.0002
BURST_TOKENS = 7000


class Weighing(Cluster):
    """A prefill and a decode worker that have been measured: 5,000 tokens/s each, over a link of so many bytes/s."""

    def __init__(
        self,
        bytes_per_s: float = 1.25e9,
        limits: RouterLimits = AUTO,
        *,
        measured: bool = True,
        **load: object,
    ) -> None:
        super().__init__(address("prefill-0", 2000), address("decode-0", 2000), limits=limits)
        self.do(LinkSet(bytes_per_s))
        self.report(**load)
        if measured:
            for tokens in (64, 512, BURST_TOKENS):
                self.state._forecast.prefilled("prefill-0", tokens, tokens * TOKEN_S)

    def report(self, **load: object) -> None:
        for worker_id in ("prefill-0", "decode-0"):
            told = {"worker_id": worker_id, "stream_from_tokens": 256, "decode_step_ms": 2.0} | load
            message = WorkerLoad(waiting_prompt_tokens=0, running=0, free_blocks=0, reserved=0, **told)  # type: ignore[arg-type]
            self.do(WorkerReported(message))

    def asked(self, num_tokens: int = 64, request_id: str = "r1") -> HandoffChosen:
        return self.chosen(self.submit(request_id, num_prompt_tokens=num_tokens, max_tokens=100))

    @staticmethod
    def chosen(out: list[Instruction]) -> HandoffChosen:
        (event,) = events(out, HandoffChosen)
        assert isinstance(event, HandoffChosen)
        return event

    def serve(
        self, request_id: str, took_s: float, tail_s: float = 0.0, compute_s: float = 0.0
    ) -> list[Instruction]:
        """From dispatch to the first token with the client; returns what that led to."""
        request = self.state.requests[request_id]
        began_at, done_at = self.now, self.now + took_s
        done = PrefillDone(
            request_id=request_id,
            attempt=request.attempt,
            started_at=began_at,
            done_at=done_at,
            compute_s=compute_s,
        )
        self.now = done_at
        self.do(WorkerSaid(request.prefill_worker or "decode-0", done))
        self.now += tail_s
        if request.prefill_worker:
            adopted = DecodeAdopted(
                request_id=request_id,
                attempt=request.attempt,
                verified_at=self.now,
                admitted_at=self.now,
                prefill_started_at=began_at,
                prefill_done_at=done_at,
            )
            self.do(WorkerSaid("decode-0", adopted))
        token = TokenProduced(
            request_id=request_id, attempt=request.attempt, position=0, token_id=7, at=self.now
        )
        self.do(WorkerSaid("decode-0", Tokens(tokens=(token,))))
        return self.do(TokensWritten(request_id, 1))

    def decoding(self, count: int) -> None:
        for number in range(count):
            self.submit(f"stream-{number}", num_prompt_tokens=16, max_tokens=100)
            self.serve(f"stream-{number}", 0.001)


def test_nothing_is_weighed_before_a_prefill_was_measured() -> None:
    cluster = Weighing(measured=False)
    chosen = cluster.asked()
    assert chosen.choice == "remote"
    assert "no prefill is measured yet" in chosen.reason
    assert chosen.remote_ms == chosen.local_ms == 0.0


def test_nothing_is_weighed_before_the_link_is_known() -> None:
    assert "the link is not measured yet" in Weighing(0.0).asked().reason  # unlimited, and no probe
    assert Weighing(0.0, links={"127.0.0.1:1": 1e9}).asked().link_source == "measured"


def test_a_slow_link_and_a_fast_one() -> None:
    slow = Weighing(12.5e3).asked(2000)
    assert slow.choice == "local"
    assert slow.remote_transfer_ms == pytest.approx(
        (2000 * BYTES_PER_TOKEN / 12.5e3 - 2000 * TOKEN_S) * 1e3, rel=0.01
    )
    fast = Weighing(1.25e9).asked(2000)
    assert fast.choice == "remote"
    assert (fast.link_bytes_per_s, fast.link_source) == (1.25e9, "asked")


def test_measured_rates_count_but_never_beyond_what_was_asked() -> None:
    assert Weighing(1.25e9, links={"127.0.0.1:1": 5e8}).asked().link_bytes_per_s == 5e8
    assert Weighing(1e6, links={"127.0.0.1:1": 5e8}).asked().link_bytes_per_s == 1e6


def test_a_codec_that_pays_makes_the_transfer_shorter() -> None:
    rates = {"int8": CodecRate(3e9, 3e9, 0.5, is_lossy=True), "lossless": CodecRate(3e9, 3e9, 0.7)}
    forecast = HandoffForecast(max_num_batched_tokens=512, allow_lossy=True)
    forecast.link_set(1e6)
    forecast.prefilled("prefill-0", 512, 0.1)
    forecast.reported(
        WorkerLoad(
            worker_id="prefill-0", waiting_prompt_tokens=0, running=0, free_blocks=0, reserved=0, codecs=rates
        )
    )
    prefill, decode = WorkerView(address("prefill-0")), WorkerView(address("decode-0"))

    def transfer_ms(codec: str) -> float:
        estimate = forecast.remote(Prompt(512, codec), prefill, decode, {}, 0.0)
        assert not isinstance(estimate, str)
        return estimate.transfer_ms

    assert transfer_ms("int8") == pytest.approx(transfer_ms("raw") / 2, rel=0.01)
    assert transfer_ms("auto") == transfer_ms("int8")
    assert transfer_ms("lossless") == pytest.approx(transfer_ms("raw") * 0.7, rel=0.01)


def test_a_short_prompt_is_served_beside_a_burst_by_the_decode_worker() -> None:
    cluster = Weighing()
    cluster.decoding(4)
    for request_id in ("long-1", "long-2"):
        out = cluster.submit(request_id, num_prompt_tokens=BURST_TOKENS, max_tokens=16)
        chosen = cluster.chosen(out)
        assert chosen.choice == "remote"
        assert chosen.local_stall_ms == pytest.approx(4 * BURST_TOKENS * TOKEN_S * 1e3, rel=0.01)
    assert chosen.remote_queue_ms == pytest.approx(BURST_TOKENS * TOKEN_S * 1e3, rel=0.01)  # one before it
    out = cluster.submit("short", num_prompt_tokens=64, max_tokens=100)
    assert sent(out) == [("decode-0", "StartLocal")]
    assert not events(out, FellBack), "it is a choice, not a fallback"
    (dispatched,) = events(out, RequestDispatched)
    assert isinstance(dispatched, RequestDispatched)
    assert dispatched.prefill_reason == cluster.chosen(out).reason
    assert cluster.chosen(out).streams == 4


def test_the_backlog_is_what_is_left_of_it() -> None:
    cluster = Weighing()
    cluster.decoding(4)
    cluster.submit("long-1", num_prompt_tokens=BURST_TOKENS, max_tokens=16)
    cluster.now += 1.0
    chosen = cluster.asked(BURST_TOKENS)
    assert chosen.remote_queue_ms == pytest.approx((BURST_TOKENS * TOKEN_S - 1.0) * 1e3, rel=0.01)


def test_what_it_took_is_logged_beside_the_forecast() -> None:
    cluster = Weighing()
    cluster.decoding(1)
    chosen = cluster.asked(512)
    assert chosen.choice == "remote"
    (measured,) = events(cluster.serve("r1", 0.15, 0.01), HandoffMeasured)
    assert isinstance(measured, HandoffMeasured)
    assert measured.forecast_ms == pytest.approx(chosen.remote_ms)
    assert measured.actual_ms == pytest.approx(160.0)
    assert measured.queue_ms + measured.prefill_ms + measured.transfer_ms == pytest.approx(measured.actual_ms)


def test_forecasts_follow_what_is_measured() -> None:
    cluster = Weighing()
    cluster.decoding(1)
    for number in range(5):
        cluster.asked(512, f"r{number}")
        cluster.serve(f"r{number}", 0.3, 0.05, compute_s=0.3)
    chosen = cluster.asked(512, "next")
    assert chosen.remote_prefill_ms == pytest.approx(300.0, rel=0.01)
    assert chosen.remote_transfer_ms == pytest.approx(50.0, rel=0.01)
    cluster.do(LinkSet(6.25e8))
    assert cluster.asked(512, "after").remote_transfer_ms < 1.0, "another link: what handoffs took is history"


def test_a_slow_decode_worker_is_told_from_the_prefill_worker() -> None:
    cluster = Weighing()
    for _ in range(3):
        cluster.state._forecast.prefilled("decode-0", 512, 0.5)
        cluster.state._forecast.prefilled("prefill-0", 512, 512 * TOKEN_S)
    chosen = cluster.asked(512)
    assert (chosen.local_prefill_ms, chosen.choice) == (pytest.approx(500.0), "remote")
    assert chosen.remote_prefill_ms < 200.0


def test_an_attempt_that_died_is_no_forecast_error() -> None:
    cluster = Weighing()
    cluster.decoding(1)
    assert cluster.asked(512).choice == "remote"
    out = cluster.do(WorkerLost("prefill-0", "gone"))
    assert sent(out) == [("decode-0", "AbortRequest"), ("decode-0", "StartLocal")]
    assert not events(cluster.serve("r1", 0.1), HandoffMeasured)


def test_never_is_always_the_decode_worker_and_always_never() -> None:
    out = Weighing(limits=NEVER).submit(num_prompt_tokens=2000)
    assert sent(out) == [("decode-0", "StartLocal")]
    assert not events(out, HandoffChosen)
    assert not events(out, FellBack)
    cluster = Weighing(12.5e3, NEVER)
    out = cluster.do(HandoffSet("always", "test"))
    assert [i.event.handoff for i in out if isinstance(i, Emit) and isinstance(i.event, HandoffChanged)] == [
        "always"
    ]
    assert sent(cluster.submit(num_prompt_tokens=64)) == [
        ("decode-0", "StartDecode"),
        ("prefill-0", "StartPrefill"),
    ]
    cluster.do(HandoffSet("auto", "test"))
    assert cluster.asked(2000, "r2").choice == "local"


@pytest.mark.parametrize(("codec", "is_held"), [("raw", True), ("lossless", True), ("int8", False)])
def test_a_prompt_that_the_decode_worker_holds_is_computed_there(codec: str, is_held: bool) -> None:
    """KV that came by a lossy codec is never used again."""
    cached = RouterLimits(16, 10.0, 5, fallback=True, handoff="auto", kv_path="v2", prefix_caching=True)
    cluster = Weighing(limits=cached)
    cluster.do(CodecSet(codec, "test"))
    cluster.decoding(1)
    assert cluster.asked(4000, "first").choice == "remote"
    cluster.serve("first", 1.0, compute_s=0.8)
    chosen = cluster.asked(4016, "again")
    rest = 4016 - 4000 // 16 * 16 + 16  # a token of the first prompt was left to compute
    on_prefill_ms = chosen.remote_prefill_ms
    assert on_prefill_ms == pytest.approx(rest * TOKEN_S * 1e3, rel=0.2)
    if is_held:
        assert chosen.local_prefill_ms - 2.0 == pytest.approx(on_prefill_ms)  # and a decode step
    else:
        assert chosen.local_prefill_ms == pytest.approx(4016 * TOKEN_S * 1e3, rel=0.1)
    cluster.do(WorkerLost("prefill-0", "gone"))
    cluster.do(WorkersListed((address("prefill-0", 2000, port=9), address("decode-0", 2000))))
    cluster.do(WorkerConnected("prefill-0"))
    cluster.report()
    assert cluster.asked(4016, "later").remote_prefill_ms > 10 * on_prefill_ms, "a new process holds nothing"


def test_two_at_once_on_a_slow_link_share_it() -> None:
    """The second transfer waits for the first."""
    cluster = Weighing(2e6)
    cluster.decoding(4)
    first = cluster.asked(2000, "r1")
    second = cluster.asked(2000, "r2")
    assert first.choice == "remote"
    wire_ms = 2000 * BYTES_PER_TOKEN / 2e6 * 1e3
    assert second.remote_queue_ms + second.remote_prefill_ms + second.remote_transfer_ms == pytest.approx(
        2 * wire_ms, rel=0.02
    )
