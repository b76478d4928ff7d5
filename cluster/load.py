"""Drives a router over HTTP as any client would: steady loads by their schedule, bursts at once.

A load by rate is an open loop: an arrival is sent when it is due, not when an earlier answer came, and the generator
measures its own lateness (schedule lag), so that a slow client is never read as a slow server. A load of streams is a
closed loop, as busy as the server allows. Failures are counted by kind.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.control import InjectBurst
from cluster.events import BurstInjected, Event, LoadStarted, LoadStopped
from cluster.load_client import LoadClient, RequestResult
from cluster.profile import LoadSection, Profile
from cluster.workload import (
    PlannedRequest,
    PromptCorpus,
    burst_requests,
    corpus_text,
    steady_requests,
    synthetic_corpus,
)
from engine.model_ids import SYNTHETIC_PREFIX, resolve_model
from engine.tokenizer import load_tokenizer

CORPUS_CHARS: Final = 250_000
MAX_BURST_IN_FLIGHT: Final = 256
"""Burst requests beyond this many at once are refused: a stuck key must not fill the memory."""

_LAGS_KEPT: Final = 10_000
_PAUSE_AFTER_FAILURE_S: Final = 0.1


class LoadError(Exception):
    """A load or burst cannot be started; the message names it and what is allowed."""


@dataclass(slots=True)
class LoadCounts:
    """What one generator did since it was made."""

    sent: int = 0
    finished: int = 0
    skipped: int = 0  # arrivals not sent: ``max_in_flight`` were open
    cancelled: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # kind -> count

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def model_corpus(model_id: str) -> PromptCorpus:
    """Text in the model's own tokens; random ids for models of random weights. Takes about 0.2 s, blocking.

    Raises engine.model_ids.ModelError for an unknown model.
    """
    if model_id.startswith(SYNTHETIC_PREFIX):
        return synthetic_corpus()
    tokenizer = load_tokenizer(resolve_model(model_id))
    return PromptCorpus(tokenizer.encode(corpus_text(CORPUS_CHARS)))


class LoadGenerator:
    """Sends one steady load at a time and any number of bursts to the router at ``url``.

    ``emit`` gets a LoadStarted, LoadStopped or BurstInjected for everything that was done; ``on_result`` (optional)
    gets every request's own figures. All methods belong to one event loop.
    """

    def __init__(
        self,
        url: str,
        profile: Profile,
        emit: Callable[[Event], None],
        model_id: str,
        on_result: Callable[[RequestResult], None] | None = None,
    ) -> None:
        self._client = LoadClient(url, model_id)
        self._profile = profile
        self._emit = emit
        self._model_id = model_id
        self._on_result = on_result
        self._corpus: asyncio.Task[PromptCorpus] | None = None
        self._schedules: set[asyncio.Task[None]] = set()
        self._steady: set[asyncio.Task[None]] = set()
        self._bursts: set[asyncio.Task[None]] = set()
        self._lags_s: deque[float] = deque(maxlen=_LAGS_KEPT)
        self._num_bursts = 0
        self.counts = LoadCounts()
        self.running = ""  # name of the steady load, "" = none

    @property
    def in_flight(self) -> int:
        return len(self._steady) + len(self._bursts)

    @property
    def lag_p99_s(self) -> float:
        """How late arrivals and repeated bursts left this client, over the last ``_LAGS_KEPT``; 0.0 before any."""
        lags = sorted(self._lags_s)
        return lags[int(0.99 * len(lags))] if lags else 0.0

    async def start(self, name: str, cause: str) -> None:
        """Begin the named load of the profile; another one that runs is stopped first.

        Raises LoadError for an unknown name, ModelError for an unknown model.
        """
        load = self._profile.load.get(name)
        if load is None:
            raise LoadError(f"load {name!r} is unknown; allowed: {', '.join(self._profile.load)}")
        corpus = await self._get_corpus()
        requests = steady_requests(load, corpus)
        if load.streams:
            schedule = self._keep_streams(requests, load.streams)
        else:
            schedule = self._follow_schedule(requests, load.max_in_flight)
        await self._begin(name, describe_load(load), schedule, cause)
        if load.burst_every_s > 0:
            self._schedules.add(
                asyncio.create_task(self.repeat_bursts(load.burst_every_s, f"load {name}"), name="bursts")
            )

    async def follow(
        self,
        name: str,
        detail: str,
        requests_of: Callable[[PromptCorpus], Iterator[PlannedRequest]],
        cause: str,
        max_in_flight: int,
    ) -> None:
        """Send these requests by their times and return when the last one is on its way, or the load was stopped.

        Another load that runs is stopped first. Raises ModelError for an unknown model.
        """
        schedule = self._follow_schedule(requests_of(await self._get_corpus()), max_in_flight)
        await self._begin(name, detail, schedule, cause)
        await asyncio.wait(self._schedules)

    async def _begin(self, name: str, detail: str, schedule: Coroutine[Any, Any, None], cause: str) -> None:
        await self.stop(cause)
        self.running = name
        self._emit(LoadStarted(at=time.monotonic(), name=name, detail=detail, cause=cause))
        self._schedules = {asyncio.create_task(schedule, name=f"load {name}")}

    async def stop(self, cause: str, *, cancel: bool = False) -> None:
        """No new arrivals. What is in flight finishes, or with ``cancel`` is dropped. Nothing runs: nothing happens."""
        schedules, self._schedules = self._schedules, set()
        await _cancel(schedules)
        if self.running:
            self._emit(LoadStopped(at=time.monotonic(), name=self.running, cause=cause))
            self.running = ""
        if cancel:
            await _cancel(self._steady)

    async def burst(self, command: InjectBurst) -> None:
        """Send the prompts at once; returns when they are on their way, not when they are answered.

        Raises LoadError when too many burst requests are open already.
        """
        corpus = await self._get_corpus()
        if len(self._bursts) + command.prompts > MAX_BURST_IN_FLIGHT:
            raise LoadError(
                f"burst of {command.prompts}: {len(self._bursts)} burst requests are open; "
                f"allowed are {MAX_BURST_IN_FLIGHT} at once"
            )
        planned = burst_requests(
            command.prompts, command.prompt_tokens, command.max_tokens, corpus, seed=self._num_bursts
        )
        self._num_bursts += 1
        self._emit(
            BurstInjected(
                at=time.monotonic(),
                prompts=command.prompts,
                prompt_tokens=command.prompt_tokens,
                cause=command.cause,
            )
        )
        for request in planned:
            self._spawn(self._bursts, request, "burst")

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when ``timeout_s`` passed first."""
        open_requests = self._steady | self._bursts
        if open_requests:
            await asyncio.wait(open_requests, timeout=timeout_s)
        return self.in_flight == 0

    async def close(self) -> None:
        """Drop everything in flight without a word to the log, and the connections. The generator is done."""
        tasks: set[asyncio.Task[Any]] = {*self._steady, *self._bursts, *self._schedules}
        if self._corpus is not None and not self._corpus.done():
            tasks.add(self._corpus)
        await _cancel(tasks)
        self.running = ""
        await self._client.close()

    async def _get_corpus(self) -> PromptCorpus:
        """Made once, in a thread: tokenizing must not hold up the loop that answers heartbeats."""
        if self._corpus is None:
            self._corpus = asyncio.create_task(asyncio.to_thread(model_corpus, self._model_id))
        return await asyncio.shield(self._corpus)

    async def _follow_schedule(self, requests: Iterator[PlannedRequest], max_in_flight: int) -> None:
        begin = time.monotonic()
        for request in requests:
            due = begin + request.at_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._steady) >= max_in_flight:
                self.counts.skipped += 1
                continue
            self._lags_s.append(time.monotonic() - due)
            self._spawn(self._steady, request, "steady")

    async def _keep_streams(self, requests: Iterator[PlannedRequest], streams: int) -> None:
        """``streams`` requests at a time: the next one leaves when one is answered."""
        for request in requests:
            failed = self.counts.failed
            while len(self._steady) >= streams:
                await asyncio.wait(self._steady, return_when=asyncio.FIRST_COMPLETED)
            if self.counts.failed > failed:  # a router that refuses at once must not be asked in a tight loop
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
            self._spawn(self._steady, request, "steady")

    async def repeat_bursts(self, every_s: float, cause: str) -> None:
        """The profile's burst after half of ``every_s``, then every ``every_s``, but none while one is unanswered;
        until cancelled. Raises ModelError for an unknown model."""
        burst = self._profile.burst
        command = InjectBurst(
            prompts=burst.prompts,
            prompt_tokens=burst.prompt_tokens,
            max_tokens=burst.max_tokens,
            cause=cause,
        )
        due = time.monotonic() + every_s / 2
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self._bursts:
                self._lags_s.append(time.monotonic() - due)
                await self.burst(command)
            due += every_s

    def _spawn(self, group: set[asyncio.Task[None]], request: PlannedRequest, label: str) -> None:
        task = asyncio.create_task(self._send(request, label))
        group.add(task)
        task.add_done_callback(group.discard)

    async def _send(self, request: PlannedRequest, label: str) -> None:
        self.counts.sent += 1
        try:
            result = await self._client.send(request, label)
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            raise
        if result.failure:
            self.counts.failures[result.failure] += 1
        else:
            self.counts.finished += 1
        if self._on_result is not None:
            self._on_result(result)


def describe_load(load: LoadSection) -> str:
    """ "2 requests/s, prompts of 128 tokens, 64 tokens out, seed 0" """
    bursts = f", a burst every {load.burst_every_s:g} s" if load.burst_every_s else ""
    arrivals = f"{load.streams} streams" if load.streams else f"{load.rate_per_s:g} requests/s"
    return (
        f"{arrivals}, prompts of {load.prompt_tokens} tokens, "
        f"{load.max_tokens} tokens out, seed {load.seed}{bursts}"
    )


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel and wait until each has ended. One that had failed raises here, where it is seen."""
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks)
    for task in done:
        if not task.cancelled():
            task.result()
