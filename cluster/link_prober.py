"""Measures every prefill -> decode path by the workers' own KV connections, one after the other."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from cluster.control import LinkMeasured, ProbeLink
from cluster.events import Event, LinkProbed
from cluster.link_backend import LinkBackend
from cluster.process_slot import ProcessSlot

PROBE_S: Final = 0.1
"""A probe carries what the asked rate moves in this time: enough to be right, too short to be noticed."""

_MIN_PROBE_BYTES: Final = 4 * 2**20
"""A shaper lets a first burst through at once; in fewer bytes it would count."""
_MAX_PROBE_BYTES: Final = 64 * 2**20
_UNLIMITED_BITS_PER_S: Final = 10e9
_ANSWER_MARGIN_S: Final = 5.0


def probe_bytes(bits_per_s: float) -> int:
    """Bytes to send for a path asked to carry ``bits_per_s`` (0 = unlimited)."""
    wanted = int((bits_per_s or _UNLIMITED_BITS_PER_S) / 8 * PROBE_S)
    return min(max(wanted, _MIN_PROBE_BYTES), _MAX_PROBE_BYTES)


class LinkProber:
    """Asks, waits, and turns answers into events. One probe runs at a time: two would share a cable."""

    def __init__(self, link: LinkBackend, emit: Callable[[Event], None]) -> None:
        self._link = link
        self._emit = emit
        self._lock = asyncio.Lock()
        self._waiting: dict[tuple[str, str], asyncio.Future[LinkMeasured]] = {}

    def answered(self, from_worker: str, message: LinkMeasured) -> None:
        """A worker's answer; one that nobody waits for any more is dropped."""
        future = self._waiting.pop((from_worker, message.to_worker), None)
        if future is not None and not future.done():
            future.set_result(message)

    async def probe(self, workers: list[ProcessSlot]) -> list[str]:
        """Measure every pair that is ready; returns one line per pair that could not be measured."""
        problems = []
        async with self._lock:
            prefills = [slot for slot in workers if slot.role == "prefill"]
            decodes = [slot for slot in workers if slot.role == "decode"]
            for prefill in prefills:
                for decode in decodes:
                    problem = await self._probe_pair(prefill, decode)
                    if problem:
                        problems.append(f"{prefill.process_id} to {decode.process_id}: {problem}")
        return problems

    async def _probe_pair(self, prefill: ProcessSlot, decode: ProcessSlot) -> str:
        target = decode.address
        if target is None or not prefill.is_ready:
            return "not ready"
        num_bytes = probe_bytes(self._link.shape.bits_per_s)
        pair = (prefill.process_id, decode.process_id)
        answer: asyncio.Future[LinkMeasured] = asyncio.get_running_loop().create_future()
        self._waiting[pair] = answer
        prefill.send(
            ProbeLink(
                to_worker=target.worker_id,
                kv_host=target.kv_host,
                kv_port=target.kv_port,
                num_bytes=num_bytes,
            )
        )
        at_asked_rate_s = num_bytes * 8 / (self._link.shape.bits_per_s or _UNLIMITED_BITS_PER_S)
        try:
            measured = await asyncio.wait_for(answer, at_asked_rate_s * 3 + _ANSWER_MARGIN_S)
        except TimeoutError:
            return "no answer"
        finally:
            self._waiting.pop(pair, None)
        if measured.error:
            return measured.error
        self._emit(
            LinkProbed(
                at=time.monotonic(),
                from_worker=pair[0],
                to_worker=pair[1],
                achieved_bits_per_s=measured.achieved_bits_per_s,
                rtt_ms=measured.rtt_ms,
            )
        )
        if self._link.measured(*pair, measured.achieved_bits_per_s):
            self._emit(self._link.describe(time.monotonic()))
        return ""
