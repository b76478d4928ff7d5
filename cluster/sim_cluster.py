"""A cluster in simulated time: the product's own router and schedulers over a cost model. Pure, and deterministic.

``RouterState`` takes the requests, picks the workers and answers with the same messages that real workers get;
``SimWorker`` runs the engine's ``Scheduler``. What is modelled, and not taken from the product, is time: engine steps
(``sim_cost``), the link, and a constant for each of router, handoff and step. Left out: codecs (KV goes raw), faults,
weighing of handoffs (every prompt is handed off), and answers that end before their ``max_tokens``. The router hears of
each answer's first and last token only: its decisions depend on no other.

A prefill worker's egress is one link, first come first served. Streamed KV leaves while the prompt is computed; after
it there is the last piece (``kv_stream``), or what the link is behind.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from cluster.attempt import key_of
from cluster.control import (
    AbortRequest,
    DecodeAdopted,
    HandoffFailed,
    PrefillDone,
    StartDecode,
    StartLocal,
    StartPrefill,
    TokenProduced,
    Tokens,
)
from cluster.handoff_forecast import HandoffForecast
from cluster.kv_stream import LAST_GATHERED_BYTES
from cluster.metrics import RequestLatency
from cluster.router_messages import (
    Deliver,
    Fail,
    RequestSubmitted,
    Send,
    Stimulus,
    Ticked,
    TokensWritten,
    WorkerConnected,
    WorkerSaid,
    WorkersListed,
)
from cluster.router_state import RouterState
from cluster.sim_figures import SimFigures, Work, figures_of
from cluster.sim_gaps import StepGaps
from cluster.sim_machine import Cores
from cluster.sim_parts import sim_worker, worker_address
from cluster.sim_result import SimRun
from cluster.sim_sequence import CountedSequence, prompt_of
from cluster.sim_spec import SimSpec
from cluster.sim_worker import SimJob, SimWorker, StepsDone
from cluster.trace import TraceRequest
from engine.request import Request, SamplingParams
from engine.scheduler import NoCapacity

TICK_S: Final = 1.0
"""How often the simulated router looks for requests that waited too long, while any waits."""


@dataclass(slots=True)
class _Open:
    """A request that is under way. Times of its last attempt."""

    request: TraceRequest
    arrived_at: float
    dispatched_at: float = 0.0
    prefill_started_at: float = 0.0
    prefill_done_at: float = 0.0
    first_token_at: float = 0.0
    accepted_at: float = -1.0  # the decode worker holds room for it
    num_cached: int = 0  # tokens whose KV the decode worker has


def simulate(spec: SimSpec, requests: Sequence[TraceRequest]) -> SimFigures:
    """Every request to its end. The same arguments give the same figures, whatever the machine. Raises ValueError for
    workers that have no room on ``spec.machine``."""
    return _Simulation(spec, requests).run()


def simulate_gaps(spec: SimSpec, requests: Sequence[TraceRequest]) -> tuple[SimFigures, StepGaps]:
    """``simulate``, and the times between tokens by what the steps between them did."""
    simulation = _Simulation(spec, requests)
    return simulation.run(), simulation.gaps


class _Simulation:
    def __init__(self, spec: SimSpec, requests: Sequence[TraceRequest]) -> None:
        self._spec = spec
        self._requests = requests
        self._result = SimRun(spec.slos)
        self.gaps = StepGaps(spec.overheads)
        self._open: dict[str, _Open] = {}
        self._todo: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._ends: dict[str, float] = {}  # worker id -> when its run ends
        self._arrivals = 0
        self._link_free_at: dict[str, float] = {}
        self._link_busy_s = 0.0
        self._expected: dict[str, tuple[str, str]] = {}  # attempt key -> prefill and decode worker
        self._next_tick = 0.0
        prefill_ids, decode_ids = spec.worker_ids
        roles = dict.fromkeys(prefill_ids, "prefill") | dict.fromkeys(decode_ids, "decode")
        self._workers = {worker_id: sim_worker(worker_id, spec, self.gaps) for worker_id in roles}
        self._cores = None if spec.machine is None else Cores(spec.machine, prefill_ids, decode_ids)
        self._in_full = False  # every core has a worker that steps
        self._router = RouterState(
            spec.limits,
            spec.mode,
            "raw",
            HandoffForecast(max_num_batched_tokens=spec.max_num_batched_tokens, allow_lossy=False),
        )
        listed = tuple(worker_address(spec, index, *worker) for index, worker in enumerate(roles.items()))
        self._router.handle(WorkersListed(listed), 0.0)
        for worker_id in roles:
            self._router.handle(WorkerConnected(worker_id), 0.0)

    def run(self) -> SimFigures:
        todo, requests = self._todo, self._requests
        if requests:
            self._at(requests[0].at_s, self._arrive)
        while todo:
            now, _, call = heapq.heappop(todo)
            call(now)
        return self._figures()

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._todo, (when, next(self._order), call))

    # --- the router -------------------------------------------------------------------------------------------

    def _arrive(self, now: float) -> None:
        index = self._arrivals
        request = self._requests[index]
        self._arrivals += 1
        if self._arrivals < len(self._requests):
            self._at(self._requests[self._arrivals].at_s, self._arrive)
        name = f"r{index}"
        self._open[name] = _Open(request, now)
        sampling = SamplingParams(max_tokens=max(1, request.output_tokens), ignore_eos=True)
        self._say(RequestSubmitted(name, prompt_of(request), sampling, now), now)

    def _say(self, stimulus: Stimulus, now: float) -> None:
        """Let the router decide, and do as it says."""
        for instruction in self._router.handle(stimulus, now):
            if isinstance(instruction, Send):
                self._send(instruction, now)
            elif isinstance(instruction, Deliver):
                self._say(TokensWritten(instruction.request_id, 1), now)
            elif isinstance(instruction, Fail):
                self._result.refused[instruction.status] += 1
                self._result.ended_at = max(self._result.ended_at, now)
                del self._open[instruction.request_id]
        if self._router.queue and now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._at(self._next_tick, self._tick)

    def _tick(self, now: float) -> None:
        self._say(Ticked(), now)

    def _send(self, send: Send, now: float) -> None:
        message, worker = send.message, self._workers[send.worker_id]
        arrives = now + self._spec.overheads.router_s
        if isinstance(message, AbortRequest):
            key = key_of(message)
            self._expected.pop(key, None)
            self._at(now, lambda at: self._post(worker, lambda begun: worker.drop(key, begun), at))
            return
        self._open[message.request_id].dispatched_at = now
        if isinstance(message, StartLocal):
            self._at(
                arrives, lambda at: self._post(worker, lambda begun: self._add(worker, message, begun), at)
            )
        elif isinstance(message, StartPrefill):
            self._expected[key_of(message)] = (send.worker_id, message.decode_worker)
            self._at(
                arrives, lambda at: self._post(worker, lambda begun: self._add(worker, message, begun), at)
            )
        else:
            self._at(
                arrives,
                lambda at: self._post(worker, lambda begun: self._reserve(worker, message, begun), at),
            )

    # --- workers ----------------------------------------------------------------------------------------------

    def _post(self, worker: SimWorker, call: Callable[[float], None], now: float) -> None:
        """Between two steps of that worker; it begins to step when that gave it something to do."""
        ends = worker.post(call, now)
        if ends is None:
            self._begin(worker, now)
        else:
            self._ends_at(worker, ends)

    def _begin(self, worker: SimWorker, now: float) -> None:
        ends = worker.begin(now) if not worker.is_stepping else None
        if ends is not None:
            self._ends_at(worker, ends)
        if self._cores is not None:
            self._share(self._cores, now)

    def _share(self, cores: Cores, now: float) -> None:
        """After a change of who steps: how fast everyone is from now on."""
        stepping = {worker_id: worker for worker_id, worker in self._workers.items() if worker.is_stepping}
        in_full = cores.are_full(stepping)
        has_changed, self._in_full = in_full != self._in_full, in_full
        for worker_id, share in cores.shares(stepping).items():
            worker = stepping[worker_id]
            if has_changed:
                worker.cut(now)
            self._ends_at(worker, worker.set_speed(now, share, in_full))

    def _ends_at(self, worker: SimWorker, ends: float) -> None:
        if self._ends.get(worker.worker_id) != ends:
            self._ends[worker.worker_id] = ends
            self._at(ends, lambda now: self._end(worker, now))

    def _end(self, worker: SimWorker, now: float) -> None:
        if self._ends.get(worker.worker_id) != now:
            return  # that run ended early
        del self._ends[worker.worker_id]
        self._stepped(worker, worker.end(now), now)
        self._begin(worker, now)

    def _stepped(self, worker: SimWorker, done: StepsDone, now: float) -> None:
        finished = {job.sequence.request_id for job in done.finished}
        for job in done.first:
            key = job.sequence.request_id
            said = PrefillDone(
                request_id=job.request_id, attempt=job.attempt, started_at=job.started_at, done_at=now
            )
            if key in self._expected or not job.is_handoff:
                opened = self._open[job.request_id]
                opened.prefill_started_at, opened.prefill_done_at = job.started_at, now
                self._say(WorkerSaid(worker.worker_id, said), now)
            if job.is_handoff:
                self._transfer(key, job, now)
            else:
                self._first(worker, job, now, is_last=key in finished)
        for job in done.finished:
            if job not in done.first:
                self._last(worker, job, now)

    def _add(self, worker: SimWorker, message: StartLocal | StartPrefill, now: float) -> None:
        key = key_of(message)
        is_handoff = isinstance(message, StartPrefill)
        if is_handoff and key not in self._expected:
            return  # aborted on its way
        job = self._job(key, message, is_handoff)
        worker.jobs[key] = job
        worker.scheduler.add(job.sequence)

    def _reserve(self, worker: SimWorker, message: StartDecode, now: float) -> None:
        """OPEN: the decode worker keeps room for prompt and answer, or refuses."""
        key = key_of(message)
        if key not in self._expected:
            return
        job = self._job(key, message)
        try:
            worker.scheduler.reserve(job.sequence, now)
        except NoCapacity as error:
            failed = HandoffFailed(
                request_id=message.request_id,
                attempt=message.attempt,
                reason="decode_full",
                detail=str(error),
            )
            self._say(WorkerSaid(worker.worker_id, failed), now)
            return
        worker.jobs[key] = job
        opened = self._open[message.request_id]
        opened.accepted_at, opened.num_cached = now, job.sequence.num_cached_tokens
        if opened.prefill_done_at > opened.dispatched_at:  # the prompt was computed before there was room
            self._at(now, lambda at: self._transfer(key, job, at))

    def _job(
        self, key: str, message: StartLocal | StartPrefill | StartDecode, is_handoff: bool = False
    ) -> SimJob:
        request = self._open[message.request_id].request
        sequence = CountedSequence(
            Request(key, message.prompt_token_ids, message.sampling),
            next(self._order),
            0.0,
            hold=is_handoff,
            trace_name=message.request_id,
            prefix_ids=request.prefix_ids,
            block_tokens=request.block_tokens,
        )
        return SimJob(message.request_id, message.attempt, sequence, is_handoff)

    # --- the handoff ------------------------------------------------------------------------------------------

    def _transfer(self, key: str, job: SimJob, now: float) -> None:
        """The prompt is computed: when will its KV be there?"""
        pair = self._expected.get(key)
        if pair is None:
            return
        opened = self._open[job.request_id]
        if opened.accepted_at < opened.dispatched_at:
            return  # the decode worker has not said yet that it has room: ``_reserve`` comes back here
        prefill, decode = (self._workers[worker_id] for worker_id in pair)
        link, prompt_tokens = self._spec.link, opened.request.prompt_tokens
        num_bytes = (prompt_tokens - opened.num_cached) * self._spec.kv_bytes_per_token
        wire_s = num_bytes / link.bytes_per_s
        free_at = self._link_free_at.get(prefill.worker_id, 0.0)
        if 0 < link.stream_from_tokens <= prompt_tokens:
            began = max(free_at, opened.prefill_started_at, opened.accepted_at)
            tail_s = min(num_bytes, LAST_GATHERED_BYTES) / link.bytes_per_s
            left = max(began + wire_s, now + tail_s)
        else:
            left = max(free_at, now) + wire_s
        self._link_free_at[prefill.worker_id] = left
        self._link_busy_s += wire_s
        arrives = left + link.delay_s + self._spec.overheads.handoff_s

        def arrived(at: float) -> None:
            self._post(decode, lambda begun: self._adopt(prefill, decode, key, begun), at)

        self._at(arrives, arrived)

    def _adopt(self, prefill: SimWorker, decode: SimWorker, key: str, now: float) -> None:
        job = decode.jobs.get(key)
        if job is None or self._expected.pop(key, None) is None:
            return  # aborted meanwhile
        is_last = decode.adopt(job, now)
        opened = self._open[job.request_id]
        adopted = DecodeAdopted(
            request_id=job.request_id,
            attempt=job.attempt,
            verified_at=now,
            admitted_at=now,
            prefill_started_at=opened.prefill_started_at,
            prefill_done_at=opened.prefill_done_at,
        )
        self._say(WorkerSaid(decode.worker_id, adopted), now)
        self._first(decode, job, now, is_last)
        self._at(now, lambda at: self._post(prefill, lambda begun: prefill.drop(key, begun), at))

    # --- tokens -----------------------------------------------------------------------------------------------

    def _first(self, worker: SimWorker, job: SimJob, now: float, is_last: bool) -> None:
        self._open[job.request_id].first_token_at = now
        self._token(worker, job, 0, now, is_last)
        if is_last:
            self._finish(job, now)

    def _last(self, worker: SimWorker, job: SimJob, now: float) -> None:
        self._token(worker, job, 1, now, is_last=True)
        self._finish(job, now)

    def _token(self, worker: SimWorker, job: SimJob, position: int, now: float, is_last: bool) -> None:
        token = TokenProduced(
            request_id=job.request_id,
            attempt=job.attempt,
            position=position,
            token_id=0,
            at=now,
            finish_reason="length" if is_last else "",
        )
        self._say(WorkerSaid(worker.worker_id, Tokens(tokens=(token,))), now)

    def _finish(self, job: SimJob, now: float) -> None:
        opened = self._open.pop(job.request_id)
        answer_s, num_tokens = self._spec.overheads.answer_s, job.sequence.num_output_tokens
        span_s = now - opened.first_token_at
        latency = RequestLatency(
            ttft_ms=(opened.first_token_at + answer_s - opened.arrived_at) * 1e3,
            tpot_ms=span_s / (num_tokens - 1) * 1e3 if num_tokens > 1 else 0.0,
            e2el_ms=(now + answer_s - opened.arrived_at) * 1e3,
            worst_itl_ms=job.worst_gap_s * 1e3,
        )
        result, parts = self._result, self._result.parts
        result.add(latency, num_tokens)
        result.ended_at = max(result.ended_at, now + answer_s)
        parts.router_queue_s += opened.dispatched_at - opened.arrived_at
        parts.prefill_queue_s += opened.prefill_started_at - opened.dispatched_at
        parts.prefill_s += opened.prefill_done_at - opened.prefill_started_at
        parts.transfer_s += opened.first_token_at - opened.prefill_done_at

    # --- figures ----------------------------------------------------------------------------------------------

    def _figures(self) -> SimFigures:
        assert not self._open, f"{len(self._open)} simulated requests never ended"
        workers = self._workers.values()
        return figures_of(
            self._result,
            self.gaps,
            self._spec,
            self._requests,
            Work(
                prefill_s=sum(worker.busy_s for worker in workers if worker.worker_id.startswith("prefill")),
                decode_s=sum(worker.busy_s for worker in workers if worker.worker_id.startswith("decode")),
                link_s=self._link_busy_s,
                steps=sum(worker.num_steps for worker in workers),
                preemptions=sum(worker.preemptions for worker in workers),
            ),
        )
