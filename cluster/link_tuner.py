"""Gives the emulated link the ratio to B* that a run asks for: measure the prefill rate, shape the link, measure it.

rho = bandwidth / (KV bytes per token x prefill tokens per second). The rate is the one of this machine at this start,
by real prompts through a real worker; no profile says it.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from cluster.control import MeasurePrefill, PrefillMeasured, WorkerAddress
from cluster.events import Event, LinkTuned, PrefillFinished
from cluster.link_backend import LinkBackend
from cluster.netns import LinkShape, NetnsError
from cluster.planner import rho
from cluster.process_slot import ProcessSlot
from cluster.targets import LinkGoal
from cluster.units import format_bits_per_s
from cluster.workload import SYNTHETIC_TOKEN_IDS

WARM_UP_TOKENS: Final = 256
"""A first prompt is not counted: it pays for what a worker does once."""

PROMPT_TOKENS: Final = 1024
MAX_PROMPTS: Final = 3
ENOUGH_S: Final = 2.0
"""No further prompt is measured after so much prefill: a slow engine's rate is known by then."""

LENGTHS: Final = (64, 512, 2048)
"""Prompts by which forecasts are calibrated: what a prefill costs per token depends on its length."""

OUTPUT_TOKENS: Final = 2
LOWEST_BITS_PER_S: Final = 5e6
"""A slower link could not be measured before anybody would give up waiting for the start."""


class MeasuringFailed(Exception):
    """The prefill rate could not be measured; the message is one line."""


class PrefillRateProbe:
    """Has the router send prompts through one pair of workers; the worker's own account of them gives the rate.

    The owner passes on what the children say: ``answered`` and ``finished``.
    """

    def __init__(self, router: ProcessSlot) -> None:
        self._router = router
        self._answer: asyncio.Future[PrefillMeasured] | None = None
        self._finished: dict[str, PrefillFinished] = {}  # by request id, while measuring
        self._news = asyncio.Event()

    def answered(self, message: PrefillMeasured) -> None:
        """The router's request is over. An answer that nobody waits for is dropped."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def finished(self, event: PrefillFinished) -> None:
        """A worker computed a prompt, of whatever request."""
        if self._answer is not None:
            self._finished[event.request_id] = event
            self._news.set()

    async def tokens_per_s(self, pair: tuple[str, str], decode: WorkerAddress, limit_s: float) -> float:
        """Prompt tokens per second of the pair's prefill worker ("" = the decode worker prefills).

        Raises MeasuringFailed.
        """
        tokens, seconds = 0, 0.0
        try:
            async with asyncio.timeout(limit_s):
                for number, length in enumerate(prompt_lengths(decode)):
                    done = await self._send(pair, prompt(number, length))
                    if number > 0:
                        tokens += done.prompt_tokens - done.cached_tokens
                        seconds += done.compute_s
                    if seconds >= ENOUGH_S:
                        break
        except TimeoutError:
            raise MeasuringFailed(f"no prompt was prefilled within {limit_s:g} s") from None
        finally:
            self._answer = None
            self._finished.clear()
        if tokens < 1 or seconds <= 0:
            raise MeasuringFailed("no prompt took any time")
        return tokens / seconds

    async def send_lengths(self, pair: tuple[str, str], decode: WorkerAddress, limit_s: float) -> None:
        """One prompt of each of LENGTHS through the pair, alone, so that the router learns what it takes.

        Longer ones are left out where the shorter ones took long. Raises MeasuringFailed.
        """
        room = min(decode.max_model_len, decode.total_blocks * decode.block_size) - OUTPUT_TOKENS
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                for length in sorted({min(length, room) for length in LENGTHS}):
                    await self._send(pair, prompt(f"{pair} {length}", length))
                    if time.monotonic() - began_at >= ENOUGH_S:
                        break
        except TimeoutError:
            raise MeasuringFailed(f"no prompt was served within {limit_s:g} s") from None
        finally:
            self._answer = None
            self._finished.clear()

    async def _send(self, pair: tuple[str, str], prompt_token_ids: tuple[int, ...]) -> PrefillFinished:
        self._answer = asyncio.get_running_loop().create_future()
        self._router.send(
            MeasurePrefill(
                prefill_worker=pair[0],
                decode_worker=pair[1],
                prompt_token_ids=prompt_token_ids,
                max_tokens=OUTPUT_TOKENS,
            )
        )
        answer = await self._answer
        if answer.error:
            raise MeasuringFailed(answer.error)
        while answer.request_id not in self._finished:  # the worker's word may come after the router's
            self._news.clear()
            await self._news.wait()
        done = self._finished[answer.request_id]
        if done.worker_id != (pair[0] or pair[1]):
            raise MeasuringFailed(f"the prompt for {pair[0] or pair[1]} was prefilled by {done.worker_id}")
        return done


def prompt_lengths(worker: WorkerAddress) -> list[int]:
    """Tokens of each prompt to send, the uncounted first one included: as many as the worker can hold, if fewer."""
    room = min(worker.max_model_len, worker.total_blocks * worker.block_size) - OUTPUT_TOKENS
    return [min(WARM_UP_TOKENS, room), *[min(PROMPT_TOKENS, room)] * MAX_PROMPTS]


def prompt(name: object, num_tokens: int) -> tuple[int, ...]:
    """Token ids that every vocabulary has; another ``name`` begins with others, so that no cache answers."""
    rng = random.Random(f"prefill rate {name}")
    return tuple(rng.randrange(SYNTHETIC_TOKEN_IDS) for _ in range(num_tokens))


def wanted_shape(now: LinkShape, goal_rho: float, b_star_bytes_per_s: float) -> tuple[LinkShape, str]:
    """``now`` with the bandwidth that gives this rho, and what of that is not possible ("" = nothing)."""
    wanted = goal_rho * b_star_bytes_per_s * 8
    asked = max(wanted, LOWEST_BITS_PER_S)
    problem = ""
    if asked > wanted:
        problem = (
            f"rho {goal_rho:.3g} would need {format_bits_per_s(wanted)}; "
            f"the slowest link here is {format_bits_per_s(asked)}"
        )
    return LinkShape(bits_per_s=asked, delay_ms=now.delay_ms, jitter_ms=now.jitter_ms, loss=now.loss), problem


class LinkTuner:
    """``reshaped`` tells everybody who has to know of a new shape; ``probe`` begins to measure it (None: this run
    measures no links)."""

    def __init__(
        self,
        router: ProcessSlot,
        link: LinkBackend,
        emit: Callable[[Event], None],
        *,
        reshaped: Callable[[], None],
        probe: Callable[[], "asyncio.Task[None] | None"],
    ) -> None:
        self.prefill_rate = PrefillRateProbe(router)
        self._link = link
        self._emit = emit
        self._reshaped = reshaped
        self._probe = probe

    async def tune(
        self, goal: LinkGoal, pair: tuple[str, str], decode: WorkerAddress, limit_s: float
    ) -> None:
        """Measure the prefill rate of ``pair``, shape the link for the goal, log what came of it.

        A link that cannot be shaped stays as it is, and the event says so. Raises MeasuringFailed.
        """
        tokens_per_s = await self.prefill_rate.tokens_per_s(pair, decode, limit_s)
        link, kv_bytes = self._link, decode.kv_bytes_per_token
        shape, problem = wanted_shape(link.shape, goal.rho, tokens_per_s * kv_bytes)
        try:
            await asyncio.to_thread(link.change, shape)
        except (NetnsError, ValueError) as error:
            problem = f"the link could not be shaped: {error}"
        else:
            self._reshaped()
            probing = self._probe()
            if probing is not None:
                await probing
                if not link.achieved_bits_per_s:
                    problem = "; ".join(
                        part for part in (problem, "the new link could not be measured") if part
                    )
        achieved = link.achieved_bits_per_s
        self._emit(
            LinkTuned(
                at=time.monotonic(),
                target=goal.target,
                target_rho=goal.rho,
                prefill_tokens_per_s=tokens_per_s,
                b_star_bytes_per_s=tokens_per_s * kv_bytes,
                asked_bits_per_s=shape.bits_per_s,
                achieved_bits_per_s=achieved,
                rho=rho((achieved or link.shape.bits_per_s) / 8, kv_bytes, tokens_per_s),
                limit="; ".join(part for part in (problem, link.limit) if part),
            )
        )
