"""One engine: requests in, token ids out, in steps. Knows no sockets, no asyncio and no text.

Every method is called from one thread. Whoever owns the engine calls ``step`` while ``has_work`` is true.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from engine.block_allocator import BlockAllocator
from engine.config import EngineConfig
from engine.kv_cache import PagedKVCache
from engine.memory import num_kv_blocks
from engine.model_runner import ModelRunner, SampledToken
from engine.outputs import (
    BlockOwner,
    EngineStats,
    FinishedRequest,
    NewToken,
    OnLayer,
    PrefillProgress,
    StepOutput,
)
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import ScheduledChunk, Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.weights import TORCH_DTYPES, LoadedModel

_WARM_UP_TOKENS = 64


class Engine:
    """Continuous batching over one model and one paged cache.

    Raises ValueError if the cache cannot hold one block, or ``config`` asks for another dtype than was loaded.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if config.dtype not in ("auto", loaded.dtype):
            raise ValueError(f"engine.dtype is {config.dtype}, but the model was loaded in {loaded.dtype}")
        torch.set_num_threads(config.num_threads)
        self.config = config
        self.loaded = loaded
        model = loaded.config
        num_blocks = num_kv_blocks(config, model, loaded.dtype)
        self.max_model_len = min(model.max_model_len, num_blocks * config.block_size)
        self._cache = PagedKVCache(
            model.num_layers,
            num_blocks,
            config.block_size,
            model.num_kv_heads,
            model.head_dim,
            TORCH_DTYPES[loaded.dtype],
            loaded.device,
        )
        self._allocator = BlockAllocator(num_blocks, config.block_size)
        self._scheduler = Scheduler(
            self._allocator,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._runner = ModelRunner(loaded.model, self._cache, config.kernels_in_use)
        self._clock = clock
        self._arrivals = 0
        self._cached_prefix_tokens = 0
        self._preemptions = 0

    @property
    def cache(self) -> PagedKVCache:
        """The KV storage; transfers read and write the blocks that ``kv_blocks`` names."""
        return self._cache

    def add(self, request: Request, *, hold: bool = False) -> None:
        """Queue a request; output tokens it already has are computed with the prompt and not emitted again.

        ``hold``: prefill role. After the next token is sampled the sequence is HANDING_OFF: it runs no further,
        whatever that token is, and its blocks stay pinned until ``release``.
        Raises ValueError for a request that can never run here, and for an id that is in use.
        """
        self._scheduler.add(self._sequence(request, hold=hold))

    def reserve(self, request: Request) -> int:
        """Decode role: hold every block that prompt and whole possible output need, before the KV arrives.

        Returns how many leading tokens have their KV already, from the prefix cache: whole blocks, and fewer than the
        request has tokens. These blocks are shared with others; the KV that arrives begins behind them. They hold
        exact KV, so a request whose other KV comes by a lossy codec may use them too.
        Raises NoCapacity if that does not fit now, ValueError as ``add`` does.
        """
        sequence = self._sequence(request)
        self._scheduler.reserve(sequence, self._clock())
        return sequence.num_cached_tokens

    def kv_blocks(self, request_id: str) -> tuple[int, ...]:
        """The block table of a sequence, in token order. Raises KeyError for an unknown id.

        A transfer may read all of them, and write only those behind the tokens that ``reserve`` found cached.
        """
        return tuple(self._scheduler.sequences[request_id].block_table)

    def adopt(self, request_id: str, first_token_id: int, *, exact: bool = True) -> FinishReason | None:
        """KV of all the reserved request's tokens is in its blocks, and its next token was sampled elsewhere.

        The sequence runs on from there; ``step`` does not return ``first_token_id`` again. If that token ends the
        sequence, its blocks are freed and the reason is returned. ``exact`` False (the KV came by a lossy codec):
        none of the blocks that came is kept for other requests with the same prefix.
        Raises KeyError for an unknown id, ValueError for one that is not reserved or a token outside the vocabulary.
        """
        sequence = self._reserved(request_id)
        if not 0 <= first_token_id < self.loaded.config.vocab_size:
            raise ValueError(f"request {request_id}: token id {first_token_id} is outside the vocabulary")
        sequence.has_exact_kv = exact
        self._cached_prefix_tokens += sequence.num_cached_tokens
        num_computed = sequence.num_tokens
        sequence.token_ids.append(first_token_id)
        now = self._clock()
        self._scheduler.start_reserved(sequence, num_computed, now)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._scheduler.finish(sequence, now)
        return reason

    def recompute(self, request_id: str) -> None:
        """Fallback: compute a reserved request's KV here, from its cached prefix on. It keeps its blocks and its place.

        Call it only when nothing writes to those blocks any more. Raises as ``adopt`` does.
        """
        sequence = self._reserved(request_id)
        self._scheduler.start_reserved(sequence, sequence.num_cached_tokens, self._clock())

    def release(self, request_id: str) -> None:
        """Unpin and free the blocks of a handed-off sequence.

        Raises KeyError for an unknown id, ValueError for a sequence that is not HANDING_OFF.
        """
        sequence = self._scheduler.sequences[request_id]
        if sequence.status is not SequenceStatus.HANDING_OFF:
            raise ValueError(
                f"request {request_id} is {sequence.status}; only a handing_off one can be released"
            )
        self._scheduler.finish(sequence, self._clock())

    def halt(self, request_id: str) -> None:
        """Compute a held request no further; its blocks stay pinned until ``release``, as after its first token.

        For giving up while a transfer may still read them. No effect on a request that is HANDING_OFF already.
        Raises KeyError for an unknown id, ValueError for a request that is not held or holds no blocks yet.
        """
        sequence = self._scheduler.sequences[request_id]
        if sequence.status is SequenceStatus.HANDING_OFF:
            return
        if not sequence.hold or sequence.status is not SequenceStatus.RUNNING:
            raise ValueError(
                f"request {request_id} is {sequence.status}; only a held, running one can be halted"
            )
        self._scheduler.hand_off(sequence, self._clock())

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever status and free its blocks at once. False if it is not here (any more).

        Call it only when no transfer reads or writes its blocks.
        """
        sequence = self._scheduler.sequences.get(request_id)
        if sequence is None:
            return False
        self._scheduler.finish(sequence, self._clock())
        return True

    def has_work(self) -> bool:
        """True if ``step`` would do anything now. False with sequences waiting: for blocks that others hold."""
        return self._scheduler.has_work()

    def step(self, on_layer: OnLayer | None = None) -> StepOutput:
        """Schedule, run, update: at most ``max_num_batched_tokens`` tokens are computed.

        ``on_layer`` is called once a layer while prompts are computed, with what will be the step's ``prefilled``. It
        may read the KV it names, and must not call this engine's other methods but ``kv_blocks``.
        """
        started = self._clock()
        batch = self._scheduler.schedule(started)
        self._preemptions += len(batch.preempted)
        prefilled = tuple(self._progress(chunk) for chunk in batch.chunks if chunk.is_prefill)
        tell = partial(on_layer, prefilled) if on_layer is not None and prefilled else None
        sampled = self._runner.run(batch, tell) if batch.chunks else []
        self._scheduler.update(batch)
        finished = self._append(sampled)
        return StepOutput(
            new_tokens=tuple(NewToken(s.sequence.request_id, s.token_id, s.output_position) for s in sampled),
            prefilled=prefilled,
            finished=finished,
            preempted=batch.preempted,
            num_batched_tokens=sum(chunk.num_tokens for chunk in batch.chunks),
            num_prefill_tokens=sum(chunk.num_tokens for chunk in batch.chunks if chunk.is_prefill),
            duration_s=self._clock() - started,
        )

    def stats(self) -> EngineStats:
        """Counts for routing and display; cheap."""
        scheduler = self._scheduler
        queued = (*scheduler.waiting, *scheduler.running)
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            reserved=scheduler.num_reserved,
            handing_off=len(scheduler.sequences) - len(queued) - scheduler.num_reserved,
            free_blocks=self._allocator.num_free,
            held_blocks=self._allocator.num_held,
            total_blocks=self._allocator.num_blocks,
            waiting_prompt_tokens=sum(max(0, s.prefill_end - s.num_computed_tokens) for s in queued),
            cached_prefix_tokens=self._cached_prefix_tokens,
            preemptions=self._preemptions,
        )

    def owners(self) -> list[BlockOwner]:
        """Every sequence that holds blocks."""
        return [
            BlockOwner(sequence.request_id, sequence.status, len(sequence.block_table), sequence.since)
            for sequence in self._scheduler.sequences.values()
            if sequence.block_table
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + held == total and every block's owners are known."""
        self._scheduler.check_integrity()

    def warm_up(self) -> None:
        """Run a small prefill and decode, so that the first request does not pay for it. Leaves nothing behind.

        Raises ValueError if the engine has sequences already.
        """
        if self._scheduler.sequences:
            raise ValueError("warm_up needs an engine without sequences")
        num_tokens = max(1, min(_WARM_UP_TOKENS, self.max_model_len - 2))
        prompt = tuple(index % self.loaded.config.vocab_size for index in range(num_tokens))
        self.add(Request("warm-up", prompt, SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True)))
        while self.has_work():
            self.step()
        self._allocator.forget_cached()

    def _sequence(self, request: Request, hold: bool = False) -> Sequence:
        """A checked, new sequence."""
        name, vocab_size = request.request_id, self.loaded.config.vocab_size
        if name in self._scheduler.sequences:
            raise ValueError(f"request id {name} is in use")
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens >= self.max_model_len:
            raise ValueError(
                f"request {name}: {num_tokens} prompt and output tokens; allowed is fewer than {self.max_model_len}"
            )
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            raise ValueError(
                f"request {name}: {len(request.output_token_ids)} tokens are generated already; "
                f"max_tokens is {request.sampling.max_tokens}"
            )
        for ids in (request.prompt_token_ids, request.output_token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"request {name}: token id {wrong} is outside 0 to {vocab_size - 1}")
        self._arrivals += 1
        return Sequence(request, self._arrivals, self._clock(), hold=hold)

    def _reserved(self, request_id: str) -> Sequence:
        sequence = self._scheduler.sequences[request_id]
        if sequence.status is not SequenceStatus.WAITING_FOR_KV:
            raise ValueError(f"request {request_id} is {sequence.status}; it must be waiting_for_kv")
        return sequence

    def _append(self, sampled: list[SampledToken]) -> tuple[FinishedRequest, ...]:
        """Give sequences their new tokens; hand off or finish those that end with them."""
        now = self._clock()
        finished: list[FinishedRequest] = []
        for token in sampled:
            sequence = token.sequence
            sequence.token_ids.append(token.token_id)
            if sequence.hold:
                self._scheduler.hand_off(sequence, now)
                continue
            reason = self._finish_reason(sequence)
            if reason is not None:
                self._scheduler.finish(sequence, now)
                finished.append(FinishedRequest(sequence.request_id, reason))
        return tuple(finished)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        if not sampling.ignore_eos and sequence.token_ids[-1] in self.loaded.config.eos_token_ids:
            return FinishReason.STOP
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _progress(self, chunk: ScheduledChunk) -> PrefillProgress:
        sequence = chunk.sequence
        cached = sequence.num_cached_tokens if chunk.start == sequence.num_cached_tokens else 0
        self._cached_prefix_tokens += cached
        return PrefillProgress(
            sequence.request_id,
            start=chunk.start - cached,
            num_tokens=chunk.num_tokens + cached,
            num_cached=cached,
            done=chunk.start + chunk.num_tokens == sequence.prefill_end,
        )
