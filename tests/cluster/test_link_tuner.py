import asyncio
from collections.abc import Callable

import pytest

from cluster.control import AnyMessage, MeasurePrefill, PrefillMeasured, WorkerAddress
from cluster.events import Event, LinkTuned, PrefillFinished
from cluster.link_backend import LinkBackend
from cluster.link_tuner import (
    LENGTHS,
    LOWEST_BITS_PER_S,
    LinkTuner,
    MeasuringFailed,
    PrefillRateProbe,
    prompt,
    prompt_lengths,
    wanted_shape,
)
from cluster.netns import LinkShape
from cluster.targets import LinkGoal

PAIR = ("prefill-0", "decode-0")


def worker(max_model_len: int = 8192, total_blocks: int = 1000) -> WorkerAddress:
    return WorkerAddress(
        worker_id="decode-0",
        role="decode",
        control_host="127.0.0.1",
        control_port=1,
        kv_host="127.0.0.1",
        kv_port=2,
        total_blocks=total_blocks,
        block_size=16,
        max_num_seqs=4,
        max_model_len=max_model_len,
        kv_bytes_per_token=1000,
        fingerprint="f",
    )


class FakeRouter:
    """Answers each prompt through ``answer``, as soon as the sender waits."""

    def __init__(self) -> None:
        self.sent: list[MeasurePrefill] = []
        self.answer: Callable[[MeasurePrefill, int], None] = lambda asked, number: None

    def send(self, message: AnyMessage) -> None:
        assert isinstance(message, MeasurePrefill)
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self.answer, message, len(self.sent) - 1)


def finished(number: int, tokens: int, compute_s: float, worker_id: str = "prefill-0") -> PrefillFinished:
    return PrefillFinished(
        at=1.0,
        request_id=f"r{number}",
        attempt=0,
        worker_id=worker_id,
        prompt_tokens=tokens,
        compute_s=compute_s,
        cached_tokens=24,
    )


def answering(seconds: list[float], *, worker_first: bool = True) -> tuple[FakeRouter, PrefillRateProbe]:
    router = FakeRouter()
    probe = PrefillRateProbe(router)  # type: ignore[arg-type]

    def answer(asked: MeasurePrefill, number: int) -> None:
        done = finished(number, len(asked.prompt_token_ids), seconds[number])
        if worker_first:
            probe.finished(done)
            probe.answered(PrefillMeasured(request_id=f"r{number}"))
        else:
            probe.answered(PrefillMeasured(request_id=f"r{number}"))
            asyncio.get_running_loop().call_soon(probe.finished, done)

    router.answer = answer
    return router, probe


def test_bandwidth_is_rho_times_b_star_and_the_rest_stays() -> None:
    now = LinkShape(bits_per_s=1e10, delay_ms=2.0, jitter_ms=0.5, loss=0.01)
    shape, problem = wanted_shape(now, 0.65, 4e6)
    assert shape.bits_per_s == pytest.approx(0.65 * 4e6 * 8)
    assert (shape.delay_ms, shape.jitter_ms, shape.loss) == (2.0, 0.5, 0.01)
    assert problem == ""


def test_a_link_slower_than_any_here_is_said() -> None:
    shape, problem = wanted_shape(LinkShape(bits_per_s=1e10), 0.5, 100_000)
    assert shape.bits_per_s == LOWEST_BITS_PER_S
    assert problem == "rho 0.5 would need 400.00 kb/s; the slowest link here is 5.00 Mb/s"


def test_prompts_fit_the_worker() -> None:
    assert prompt_lengths(worker()) == [256, 1024, 1024, 1024]
    assert prompt_lengths(worker(max_model_len=512)) == [256, 510, 510, 510]
    assert prompt_lengths(worker(total_blocks=10)) == [158] * 4


def test_prompts_share_no_beginning() -> None:
    prompts = [prompt(number, 256) for number in range(4)]
    assert len({ids[:16] for ids in prompts}) == 4
    assert all(0 <= token_id < 256 for ids in prompts for token_id in ids)
    assert prompts[1] == prompt(1, 256)


@pytest.mark.parametrize("worker_first", [True, False])
async def test_rate_is_of_all_prompts_but_the_first_without_what_was_cached(worker_first: bool) -> None:
    router, probe = answering([9.0, 0.1, 0.2, 0.2], worker_first=worker_first)
    assert await probe.tokens_per_s(PAIR, worker(), 10.0) == pytest.approx(3 * 1000 / 0.5)
    assert [len(asked.prompt_token_ids) for asked in router.sent] == [256, 1024, 1024, 1024]
    assert {(asked.prefill_worker, asked.decode_worker) for asked in router.sent} == {PAIR}


async def test_a_slow_engine_is_asked_once() -> None:
    router, probe = answering([9.0, 4.0, 4.0, 4.0])
    assert await probe.tokens_per_s(PAIR, worker(), 10.0) == pytest.approx(250.0)
    assert len(router.sent) == 2


async def test_a_prompt_that_fails_is_no_rate() -> None:
    router = FakeRouter()
    probe = PrefillRateProbe(router)  # type: ignore[arg-type]
    router.answer = lambda asked, number: probe.answered(PrefillMeasured(request_id="r0", error="it died"))
    with pytest.raises(MeasuringFailed, match=r"^it died$"):
        await probe.tokens_per_s(PAIR, worker(), 10.0)


async def test_a_prompt_that_went_elsewhere_is_no_rate() -> None:
    router = FakeRouter()
    probe = PrefillRateProbe(router)  # type: ignore[arg-type]

    def fall_back(asked: MeasurePrefill, number: int) -> None:
        probe.finished(finished(number, 256, 1.0, "decode-0"))
        probe.answered(PrefillMeasured(request_id=f"r{number}"))

    router.answer = fall_back
    with pytest.raises(MeasuringFailed, match="prompt for prefill-0 was prefilled by decode-0"):
        await probe.tokens_per_s(PAIR, worker(), 10.0)


async def test_forecasts_are_calibrated_by_prompts_of_several_lengths() -> None:
    router, probe = answering([0.01] * 3)
    await probe.send_lengths(PAIR, worker(), 10.0)
    assert tuple(len(asked.prompt_token_ids) for asked in router.sent) == LENGTHS
    assert len({asked.prompt_token_ids[:16] for asked in router.sent}) == len(LENGTHS), "no cache answers"
    router, probe = answering([0.01] * 3)
    await probe.send_lengths(PAIR, worker(max_model_len=300), 10.0)
    assert [len(asked.prompt_token_ids) for asked in router.sent] == [64, 298]


async def test_silence_has_an_end() -> None:
    probe = PrefillRateProbe(FakeRouter())  # type: ignore[arg-type]
    with pytest.raises(MeasuringFailed, match=r"no prompt was prefilled within 0\.01 s"):
        await probe.tokens_per_s(PAIR, worker(), 0.01)
    with pytest.raises(MeasuringFailed, match=r"no prompt was served within 0\.01 s"):
        await probe.send_lengths(PAIR, worker(), 0.01)
    probe.answered(PrefillMeasured(request_id="r0"))  # too late: nobody waits
    probe.finished(finished(0, 256, 1.0))


async def tuned(link: LinkBackend, *, probed_bits_per_s: float | None) -> tuple[LinkTuned, list[str]]:
    """Tunes for rho 0.5 at 1000 bytes x 5000 tokens per second; the event and the order of what was done.

    ``probed_bits_per_s`` None = no probes in this run, 0 = they fail.
    """
    done: list[str] = []
    events: list[Event] = []

    async def measure() -> None:
        done.append("probed")
        if probed_bits_per_s:
            link.measured(PAIR, probed_bits_per_s, 2 * link.shape.delay_ms + 0.1, carries_kv=True)

    router, probe = answering([9.0, 0.2, 0.2, 0.2])
    tuner = LinkTuner(
        router,  # type: ignore[arg-type]
        link,
        events.append,
        reshaped=lambda: done.append("told"),
        probe=lambda: asyncio.create_task(measure()) if probed_bits_per_s is not None else None,
    )
    tuner.prefill_rate = probe
    await tuner.tune(LinkGoal("a100-7b@10gbe", 0.5), PAIR, worker(), 10.0)
    (event,) = events
    assert isinstance(event, LinkTuned)
    return event, done


async def test_the_link_is_shaped_told_and_measured() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e10, delay_ms=1.0))
    event, done = await tuned(link, probed_bits_per_s=19e6)
    assert done == ["told", "probed"]
    assert link.shape == LinkShape(bits_per_s=pytest.approx(20e6), delay_ms=1.0)
    assert (event.target, event.target_rho, event.limit) == ("a100-7b@10gbe", 0.5, "")
    assert event.b_star_bytes_per_s == pytest.approx(5e6)
    assert (event.asked_bits_per_s, event.achieved_bits_per_s) == (pytest.approx(20e6), 19e6)
    assert event.rho == pytest.approx(0.475)


async def test_without_probes_rho_is_the_asked_one() -> None:
    event, done = await tuned(LinkBackend("pacing", LinkShape(bits_per_s=1e10)), probed_bits_per_s=None)
    assert done == ["told"]
    assert (event.achieved_bits_per_s, event.rho) == (0.0, pytest.approx(0.5))


async def test_a_link_that_could_not_be_measured_says_so() -> None:
    event, done = await tuned(LinkBackend("pacing", LinkShape(bits_per_s=1e10)), probed_bits_per_s=0.0)
    assert done == ["told", "probed"]
    assert (event.rho, event.limit) == (pytest.approx(0.5), "the new link could not be measured")


async def test_a_host_that_does_not_reach_it_says_so() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e10))
    event, _ = await tuned(link, probed_bits_per_s=10e6)
    assert event.rho == pytest.approx(0.25)
    assert event.limit == "asked 20.00 Mb/s; this host reached 10.00 Mb/s (prefill-0 to decode-0)"


async def test_a_link_that_cannot_be_shaped_stays_and_says_so() -> None:
    link = LinkBackend("none", LinkShape(bits_per_s=1e10), warning="no way to shape links here")
    link.measured(PAIR, 2e10, 0.1, carries_kv=True)
    event, done = await tuned(link, probed_bits_per_s=1.0)
    assert done == []
    assert event.rho == pytest.approx(500.0)
    assert event.limit.startswith("the link could not be shaped: link backend none does not shape")
    assert "no way to shape links here" in event.limit
