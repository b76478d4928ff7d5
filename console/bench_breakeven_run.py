"""Measures break-even on real clusters: one prefill and one decode worker, one request at a time, everything else hot.

For each delivery a cluster is brought up; on each link, slowest first, every prompt is computed by the decode worker
and handed off by each codec. What is measured is read from the run's own log.
"""

import asyncio
import functools
import random
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.breakeven_bench import (
    OUTPUT_TOKENS,
    BreakevenResult,
    BreakevenSpec,
    MeasuredLink,
    MeasuredRequest,
    RecomputeSample,
    TransferSample,
)
from cluster.control import ChangeLink, SetCodec, SetMode
from cluster.events import CodecChanged, Event, LinkConfigured, LinkProbed, ModeChanged
from cluster.load import model_corpus
from cluster.load_client import LoadClient
from cluster.measuring_process import BenchmarkFailed
from cluster.profile import Profile
from cluster.units import format_bits_per_s
from cluster.workload import PlannedRequest, PromptCorpus
from console.bench_cluster import BenchCluster, new_run, run_on_cluster
from console.signals import Signals
from engine.benchmark_result import Progress

PREFILL, DECODE = "prefill-0", "decode-0"
_CAUSE: Final = "bench breakeven"


def measure_breakeven(
    profile: Profile, spec: BreakevenSpec, report: Callable[[Progress], None]
) -> BreakevenResult:
    """Run the whole comparison. Nothing that it started is alive when this returns or raises.

    ``profile`` has one worker of each role and no prefix cache. Raises LaunchError when a cluster does not come up or
    breaks, BenchmarkFailed when a request does not go as it should, KeyboardInterrupt after a signal.
    """
    return asyncio.run(_measure(profile, spec, report))


async def _measure(
    profile: Profile, spec: BreakevenSpec, report: Callable[[Progress], None]
) -> BreakevenResult:
    signals = Signals()
    result = BreakevenResult()
    corpus = model_corpus(profile.model.id)
    steps = _Steps(spec, report)
    for delivery in spec.deliveries:
        kv = msgspec.structs.replace(profile.kv, delivery=delivery)
        run = new_run(msgspec.structs.replace(profile, kv=kv))
        result.runs[delivery] = run.run
        steps.next(f"{delivery}: cluster {run.run}", "start")
        await run_on_cluster(
            run,
            signals,
            functools.partial(
                _measure_delivery,
                profile=profile,
                delivery=delivery,
                spec=spec,
                corpus=corpus,
                steps=steps,
                result=result,
            ),
        )
    return result


async def _measure_delivery(
    bench: BenchCluster,
    *,
    profile: Profile,
    delivery: str,
    spec: BreakevenSpec,
    corpus: PromptCorpus,
    steps: "_Steps",
    result: BreakevenResult,
) -> None:
    sending = LoadClient(bench.up.url, profile.model.id)
    cluster = _Cluster(bench, sending, profile)
    try:
        steps.stage = f"{delivery}: warm-up"
        for mode in ("colocated", "disagg"):
            await cluster.set_mode(mode)
            for codec in spec.codecs if mode == "disagg" else spec.codecs[:1]:
                await cluster.set_codec(codec)
                for tokens in spec.tokens:
                    steps.next(steps.stage, f"{mode}, {codec}, {tokens:,} tokens")
                    await cluster.measure(_prompt(corpus, 0, tokens), handed_off=mode == "disagg")
        for bits_per_s in spec.links:
            steps.stage = f"{delivery}: link {format_bits_per_s(bits_per_s)}"
            steps.next(steps.stage, "probe")
            result.links.append(await cluster.set_link(delivery, bits_per_s))
            for repeat in range(1, spec.repeats + 1):
                await cluster.set_mode("colocated")
                for tokens in spec.tokens:
                    steps.next(steps.stage, f"{tokens:,} tokens computed again")
                    done = await cluster.measure(_prompt(corpus, repeat, tokens), handed_off=False)
                    result.recomputes.append(_recompute(done, delivery, bits_per_s, tokens))
                await cluster.set_mode("disagg")
                for codec in spec.codecs:
                    await cluster.set_codec(codec)
                    for tokens in spec.tokens:
                        steps.next(steps.stage, f"{codec}, {tokens:,} tokens moved")
                        done = await cluster.measure(_prompt(corpus, repeat, tokens), handed_off=True)
                        result.transfers.append(_transfer(done, delivery, bits_per_s, codec, tokens))
    finally:
        await sending.close()


class _Steps:
    """Counts what is measured, for the progress line."""

    def __init__(self, spec: BreakevenSpec, report: Callable[[Progress], None]) -> None:
        lengths, codecs = len(spec.tokens), len(spec.codecs)
        warm_up = 1 + lengths * (1 + codecs)
        link = 1 + spec.repeats * lengths * (1 + codecs)
        self.stage = ""
        self._total = len(spec.deliveries) * (warm_up + len(spec.links) * link)
        self._done = -1
        self._report = report

    def next(self, stage: str, what: str) -> None:
        self._done += 1
        self._report(Progress(stage, what, self._done, self._total))


class _Cluster:
    """A running cluster as the comparison uses it: change mode, codec or link, send one request."""

    def __init__(self, bench: BenchCluster, sending: LoadClient, profile: Profile) -> None:
        self._bench = bench
        self._sending = sending
        self._profile = profile
        self._mode = profile.cluster.mode
        self._codec = profile.kv.codec

    async def set_mode(self, mode: str) -> None:
        if mode != self._mode:
            await self._bench.command(
                SetMode(mode=mode, cause=_CAUSE),
                lambda event: isinstance(event, ModeChanged) and event.mode == mode,
            )
            self._mode = mode

    async def set_codec(self, codec: str) -> None:
        if codec != self._codec:
            await self._bench.command(
                SetCodec(codec=codec, cause=_CAUSE),
                lambda event: isinstance(event, CodecChanged) and event.codec == codec,
            )
            self._codec = codec

    async def set_link(self, delivery: str, bits_per_s: float) -> MeasuredLink:
        """Shape the link, and wait until it is probed both ways."""
        link = self._profile.link
        configured: list[LinkConfigured] = []
        probed: dict[tuple[str, str], LinkProbed] = {}

        def take(event: Event) -> bool:
            if isinstance(event, LinkConfigured) and event.asked_bits_per_s == bits_per_s:
                configured.append(event)
            elif isinstance(event, LinkProbed) and configured:
                probed[event.from_worker, event.to_worker] = event
            return {(PREFILL, DECODE), (DECODE, PREFILL)} <= probed.keys()

        change = ChangeLink(
            bits_per_s=bits_per_s, delay_ms=link.delay_ms, jitter_ms=link.jitter_ms, cause=_CAUSE
        )
        await self._bench.command(change, take)
        there, back = probed[PREFILL, DECODE], probed[DECODE, PREFILL]
        return MeasuredLink(
            delivery=delivery,
            asked_bits_per_s=bits_per_s,
            achieved_bits_per_s=there.achieved_bits_per_s,
            back_bits_per_s=back.achieved_bits_per_s,
            rtt_ms=there.rtt_ms,
            backend=configured[-1].backend,
            limit=configured[-1].limit,
        )

    async def measure(self, prompt: tuple[int, ...], *, handed_off: bool) -> MeasuredRequest:
        """Send one prompt and wait until the log has told all of it."""
        request = MeasuredRequest(handed_off)

        def take(event: Event) -> bool:
            request.fold(event)
            return request.is_complete or bool(request.problem)

        planned = PlannedRequest(at_s=0.0, prompt_token_ids=prompt, max_tokens=OUTPUT_TOKENS)
        what = f"a prompt of {len(prompt):,} tokens, {self._mode}, {self._codec}"
        answer = await self._bench.unless_gone(self._sending.send(planned, "client"))
        await self._bench.read_until(take, f"{what}: the log does not tell how it ended")
        if problem := request.problem or answer.failure:
            raise BenchmarkFailed(f"{what}: {problem}")
        if request.transfer is not None and request.transfer.codec != self._codec:
            raise BenchmarkFailed(f"{what}: its KV was moved by codec {request.transfer.codec}")
        return request


def _prompt(corpus: PromptCorpus, repeat: int, tokens: int) -> tuple[int, ...]:
    """The same for every link, codec and delivery; another for each repeat."""
    return corpus.cut(random.Random(f"{_CAUSE} {repeat} {tokens}"), tokens)


def _recompute(done: MeasuredRequest, delivery: str, bits_per_s: float, tokens: int) -> RecomputeSample:
    assert done.compute_s is not None
    assert done.ttft_ms is not None
    return RecomputeSample(delivery, bits_per_s, tokens, done.compute_s, done.ttft_ms)


def _transfer(
    done: MeasuredRequest, delivery: str, bits_per_s: float, codec: str, tokens: int
) -> TransferSample:
    assert done.transfer is not None
    assert done.compute_s is not None
    assert done.ttft_ms is not None
    return TransferSample(
        delivery=delivery,
        asked_bits_per_s=bits_per_s,
        codec=codec,
        tokens=tokens,
        wire_bytes=done.transfer.wire_bytes,
        left_s=done.transfer.exposed_s,
        duration_s=done.transfer.duration_s,
        prefill_s=done.compute_s,
        ttft_ms=done.ttft_ms,
    )
