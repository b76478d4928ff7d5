"""What the router has learnt of prefilling and handing off, and so how long each way will take. Pure: facts in.

Learnt from what happened, and nothing else: how long a worker computes a prompt of a length (its own word, from the
prompts it computed), a decode step (its own word), the link's and the codecs' rates (the sending worker's own word:
probes and transfers; before them the rate asked of the link), and by size what a handoff took beyond its bytes'
time. A worker that has computed little yet is taken for the others: they run the same model on the same machine.
Until one prompt was computed, and the link's rate is known, nothing is weighed. What prefix caches hold is believed
from the prompts that went there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.control import WorkerAddress, WorkerLoad
from cluster.handoff_choice import (
    REMOTE,
    Estimate,
    HandoffChoice,
    OnWire,
    PrefillSite,
    TransferPath,
    choose_handoff,
    estimate_local,
    estimate_remote,
)
from cluster.measured_curve import MeasuredCurve
from cluster.prefix_memory import Chain, PrefixMemory
from cluster.selection import WorkerView
from transport.codec_choice import AUTO, LOSSLESS, RAW, CodecRate, LinkRate, choose_codec, transfer_s

UNWEIGHED: Final = "remote, unweighed: "
MIN_TOKENS: Final = 16
"""Shorter prompts teach nothing of a rate: most are readiness probes, to a worker that has computed nothing before."""

_RAW_RATE: Final = CodecRate(math.inf, math.inf, 1.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """``chain`` stands for its beginnings; () where no worker caches any."""

    num_tokens: int
    codec: str  # as asked: auto and lossless are resolved here as the sending worker will
    chain: Chain = ()


class HandoffForecast:
    """``max_num_batched_tokens`` and ``allow_lossy`` as in the profile."""

    def __init__(self, *, max_num_batched_tokens: int, allow_lossy: bool) -> None:
        self._budget = max_num_batched_tokens
        self._allow_lossy = allow_lossy
        self._any_prefill = MeasuredCurve()
        self._prefill: dict[str, MeasuredCurve] = {}
        self._rest = MeasuredCurve()  # by bytes moved
        self._loads: dict[str, WorkerLoad] = {}
        self._prefixes: dict[str, PrefixMemory] = {}
        self._asked_bytes_per_s = 0.0  # 0 = unlimited
        self._on_wire: dict[str, list[tuple[float, OnWire]]] = {}  # by prefill worker: when foreseen, what

    # --- facts ------------------------------------------------------------------------------------------------

    def reported(self, load: WorkerLoad) -> None:
        """A worker's own word on its speed and its links."""
        self._loads[load.worker_id] = load

    def link_set(self, bytes_per_s: float) -> None:
        """The links are shaped anew (0 = unlimited): what handoffs took before is history."""
        if bytes_per_s != self._asked_bytes_per_s:
            self._asked_bytes_per_s = bytes_per_s
            self._rest = MeasuredCurve()
            self._on_wire.clear()

    def prefilled(self, worker_id: str, num_tokens: int, compute_s: float) -> None:
        """A prompt was computed whole; ``compute_s`` is engine time of its own."""
        if num_tokens < MIN_TOKENS:
            return
        self._any_prefill.learn(num_tokens, compute_s)
        self._curve(worker_id).learn(num_tokens, compute_s)

    def holds(self, worker: WorkerView, prompt: Prompt) -> None:
        """The worker has the prompt's KV, computed there or come exact."""
        memory = self._prefixes.setdefault(worker.worker_id, PrefixMemory(worker.address.total_blocks))
        memory.note(prompt.chain)

    def is_exact(self, codec: str) -> bool:
        """KV that comes by this codec, as asked, may be used again."""
        return codec in (RAW, LOSSLESS) or (codec == AUTO and not self._allow_lossy)

    def handed_off(self, estimate: Estimate, num_bytes: int, tail_s: float) -> None:
        """A prompt's first token was out ``tail_s`` after its prefill; ``num_bytes`` of KV were to be moved."""
        self._rest.learn(max(1, num_bytes), tail_s - estimate.wire_tail_s)

    def forget(self, worker_id: str) -> None:
        """That process is gone; how fast its successor computes is known."""
        self._loads.pop(worker_id, None)
        self._prefixes.pop(worker_id, None)
        self._on_wire.pop(worker_id, None)

    def transferring(self, prefill_worker: str, estimate: Estimate, now: float) -> None:
        """It was dispatched as estimated: the link is taken by it."""
        if estimate.on_wire is not None:
            before = self._on_wire.get(prefill_worker, ())
            under_way = [(at, other) for at, other in before if at + other.end_s > now]
            self._on_wire[prefill_worker] = [*under_way, (now, estimate.on_wire)]

    def link_idle(self, prefill_worker: str) -> None:
        """No handoff from there is under way."""
        self._on_wire.pop(prefill_worker, None)

    # --- forecasts --------------------------------------------------------------------------------------------

    @property
    def can_foresee(self) -> bool:
        """A prefill was measured; before that there is no estimate of anything."""
        return self._any_prefill.near(1) is not None

    def choose(
        self, prompt: Prompt, prefill: WorkerView, decode: WorkerView, streams: Mapping[str, int], now: float
    ) -> HandoffChoice:
        """``streams``: sequences that decode, by worker."""
        remote = self.remote(prompt, prefill, decode, streams, now)
        if isinstance(remote, str):
            return HandoffChoice(REMOTE, UNWEIGHED + remote)
        site = self._site(prompt, decode, streams, now)
        if site is None:
            return HandoffChoice(REMOTE, UNWEIGHED + "no prefill is measured yet")
        return choose_handoff(remote, estimate_local(prompt.num_tokens - self._held(prompt, decode), site))

    def remote(
        self, prompt: Prompt, prefill: WorkerView, decode: WorkerView, streams: Mapping[str, int], now: float
    ) -> Estimate | str:
        """The handoff, or why it cannot be foreseen."""
        site = self._site(prompt, prefill, streams, now)
        if site is None:
            return "no prefill is measured yet"
        path = self._path(prompt, prefill, decode, now)
        if path is None:
            return "the link is not measured yet"
        return estimate_remote(prompt.num_tokens - self._held(prompt, prefill), site, path)

    def bytes_to_move(self, prompt: Prompt, decode: WorkerView) -> int:
        return (prompt.num_tokens - self._held(prompt, decode)) * decode.address.kv_bytes_per_token

    def link(self, prefill: WorkerView, decode: WorkerAddress) -> LinkRate | None:
        """Measured by the sending worker, else as asked; None: neither is known."""
        load = self._loads.get(prefill.worker_id)
        asked = self._asked_bytes_per_s
        measured = load.links.get(f"{decode.kv_host}:{decode.kv_port}") if load is not None else None
        if measured is None:
            return LinkRate(asked, "asked") if asked > 0 else None
        return LinkRate(min(measured, asked) if asked > 0 else measured, "measured")

    def _path(
        self, prompt: Prompt, prefill: WorkerView, decode: WorkerView, now: float
    ) -> TransferPath | None:
        load, link = self._loads.get(prefill.worker_id), self.link(prefill, decode.address)
        if load is None or link is None:
            return None
        num_bytes = self.bytes_to_move(prompt, decode)
        choice = choose_codec(prompt.codec, num_bytes, link, load.codecs, allow_lossy=self._allow_lossy)
        rate = load.codecs.get(choice.codec, _RAW_RATE)
        return TransferPath(
            wire_s=transfer_s(num_bytes, link, rate),
            others=[other.after(now - at) for at, other in self._on_wire.get(prefill.worker_id, ())],
            rest_s=self._rest.near(num_bytes) or 0.0,
            hides=0 < load.stream_from_tokens <= prompt.num_tokens,
        )

    def _site(
        self, prompt: Prompt, worker: WorkerView, streams: Mapping[str, int], now: float
    ) -> PrefillSite | None:
        curve, load = self._curve(worker.worker_id), self._loads.get(worker.worker_id)
        own_s, step_s = curve.at(prompt.num_tokens), curve.at(self._budget)
        if own_s is None or step_s is None:
            return None
        held = self._held(prompt, worker)
        if held:  # the rest is computed at its depth, and takes no less than by itself
            own_s = max(own_s - (curve.at(held) or 0.0), curve.at(prompt.num_tokens - held) or 0.0)
        if load is not None and load.prefill_tokens_per_s > 0:
            step_s = self._budget / load.prefill_tokens_per_s
        queued = list(worker.queued_prompt_tokens.values())
        waits_s = [curve.at(tokens) or 0.0 for tokens in queued]
        if waits_s:
            waits_s[0] = max(0.0, waits_s[0] - (now - worker.prefilling_since))
        return PrefillSite(
            own_s=own_s,
            backlog_s=sum(waits_s),
            short_tokens=sum(tokens for tokens in queued if tokens <= self._budget),
            step_s=step_s,
            budget=self._budget,
            streams=streams.get(worker.worker_id, 0),
            decode_step_s=load.decode_step_ms / 1e3 if load is not None else 0.0,
        )

    def _held(self, prompt: Prompt, worker: WorkerView) -> int:
        """Leading tokens that the worker's prefix cache is believed to hold."""
        memory = self._prefixes.get(worker.worker_id)
        return memory.num_held(prompt.chain) * worker.address.block_size if memory is not None else 0

    def _curve(self, worker_id: str) -> MeasuredCurve:
        return self._prefill.setdefault(worker_id, MeasuredCurve(self._any_prefill))
