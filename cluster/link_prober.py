"""Measures every path between a prefill and a decode worker, both ways, by the workers' own KV connections.

One after the other. There is where KV goes; back go answers, and KV again once the workers' roles change.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final

from cluster.control import LinkMeasured, ProbeLink
from cluster.events import Event, LinkProbed
from cluster.link_backend import LinkBackend
from cluster.process_slot import ProcessSlot
from cluster.worker_roles import DECODE_ROLES, PREFILL_ROLES

PROBE_S: Final = 0.1
"""A probe carries what the asked rate moves in this time: enough to be right, too short to be noticed."""

_MIN_PROBE_BYTES: Final = 4 * 2**20
"""A shaper lets a first burst through at once; in fewer bytes it would count."""
_MAX_PROBE_BYTES: Final = 64 * 2**20
_UNLIMITED_BITS_PER_S: Final = 10e9
_ANSWER_MARGIN_S: Final = 60.0
"""Beyond the bytes' own time: a worker compiles its codecs first, and a loaded machine lets everybody wait."""


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

    def gone(self, worker_id: str) -> None:
        """A worker ended: what it was to measure, or others of it, is not waited for."""
        for way, future in list(self._waiting.items()):
            if worker_id in way and not future.done():
                future.set_result(LinkMeasured(to_worker=way[1], error=f"{worker_id} ended"))

    async def probe(self, workers: list[ProcessSlot]) -> list[str]:
        """Measure every pair that is ready, both ways; returns one line per way that could not be measured."""
        problems = []
        async with self._lock:
            prefills = [slot for slot in workers if slot.role in PREFILL_ROLES]
            decodes = [slot for slot in workers if slot.role in DECODE_ROLES]
            pairs = [(p, d) for p, d in itertools.product(prefills, decodes) if p is not d]
            backs = [(d, p) for p, d in pairs if (d, p) not in pairs]
            for sender, receiver in (*pairs, *backs):
                problem = await self._probe_way(sender, receiver, carries_kv=(sender, receiver) in pairs)
                if problem:
                    problems.append(f"{sender.process_id} to {receiver.process_id}: {problem}")
        return problems

    async def _probe_way(self, sender: ProcessSlot, receiver: ProcessSlot, *, carries_kv: bool) -> str:
        target = receiver.address
        if target is None or not sender.is_ready:
            return "not ready"
        num_bytes = probe_bytes(self._link.shape.bits_per_s)
        way = (sender.process_id, receiver.process_id)
        answer: asyncio.Future[LinkMeasured] = asyncio.get_running_loop().create_future()
        self._waiting[way] = answer
        sender.send(
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
            self._waiting.pop(way, None)
        if measured.error:
            return measured.error
        self._emit(
            LinkProbed(
                at=time.monotonic(),
                from_worker=way[0],
                to_worker=way[1],
                achieved_bits_per_s=measured.achieved_bits_per_s,
                rtt_ms=measured.rtt_ms,
            )
        )
        if self._link.measured(way, measured.achieved_bits_per_s, measured.rtt_ms, carries_kv=carries_kv):
            self._emit(self._link.describe(time.monotonic()))
        return ""
