"""Whatever is asked of an engine in whatever order, it loses no block and answers as if each request were alone."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache import KEYS
from engine.request import Request
from engine.scheduler import NoCapacity
from engine.sequence import SequenceStatus
from engine.weights import LoadedModel, load_model
from tests.engine.helpers import (
    clear_answer,
    make_engine,
    make_prompt,
    make_request,
    send_kv,
    write_checkpoint,
)

SHARED = make_prompt(21, seed=50)
PROMPTS = (
    SHARED,
    (*SHARED[:14], 5, 6, 7),
    (*SHARED[:8], 9),
    (3, 4, 5, 6, *SHARED[4:18]),  # equal blocks behind another beginning
    make_prompt(3, seed=51),
    make_prompt(30, seed=52),
)
MAX_TOKENS = (7, 9, 1, 8, 12, 5)
KINDS = st.integers(0, 2 * len(PROMPTS) - 1)
"""Requests by number: every prompt greedy, then every prompt sampled."""
PICK = st.integers(0, 2**16)


@cache
def model() -> LoadedModel:
    with TemporaryDirectory() as path:
        write_checkpoint(Path(path), num_hidden_layers=2, initializer_range=0.3)
        return load_model(path, "float32")


@cache
def request_and_answer(kind: int) -> tuple[Request, tuple[int, ...]]:
    index = kind % len(PROMPTS)

    def make_kind(seed: int) -> Request:
        return make_request(
            "alone",
            PROMPTS[index],
            max_tokens=MAX_TOKENS[index],
            temperature=float(kind >= len(PROMPTS)),
            seed=100 * seed + kind,
        )

    request, tokens = clear_answer(model(), make_kind)
    return request, tuple(tokens)


def answer(kind: int) -> tuple[int, ...]:
    """What a request answers alone."""
    return request_and_answer(kind)[1]


def make(kind: int, request_id: str, done: int) -> Request:
    """The request ``kind``, of whose answer ``done`` tokens exist already."""
    request, tokens = request_and_answer(kind)
    return Request(request_id, request.prompt_token_ids, request.sampling, tokens[:done])


class EngineMachine(RuleBasedStateMachine):
    """One engine in both roles: handed-off requests are adopted by reservations in the same cache."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(
            model(), num_blocks=20, block_size=4, max_num_seqs=5, max_num_batched_tokens=12
        )
        self.live: dict[str, Request] = {}
        self.kinds: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}  # output so far, with what a request began with
        self.reserved: dict[str, int] = {}  # with the tokens whose KV the prefix cache gave

    def new(self, kind: int, pick: int) -> Request:
        done = pick % MAX_TOKENS[kind % len(PROMPTS)] if pick % 3 == 0 else 0
        request = make(kind, f"{len(self.kinds)}", done)
        self.kinds[request.request_id] = kind
        self.tokens[request.request_id] = list(request.output_token_ids)
        self.live[request.request_id] = request
        return request

    def forget(self, request_id: str) -> None:
        del self.live[request_id]
        self.reserved.pop(request_id, None)

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=3), pick=PICK)
    def add(self, kinds: list[int], pick: int) -> None:
        for kind in kinds:
            self.engine.add(self.new(kind, pick))

    @rule(kind=KINDS, pick=PICK)
    def prefill(self, kind: int, pick: int) -> None:
        self.engine.add(self.new(kind, pick), hold=True)

    @rule(kind=KINDS, pick=PICK)
    def reserve(self, kind: int, pick: int) -> None:
        request = self.new(kind, pick)
        held_before = self.engine.stats().held_blocks
        try:
            cached = self.engine.reserve(request)
        except NoCapacity:
            assert self.engine.stats().held_blocks == held_before
            self.forget(request.request_id)
        else:
            self.reserved[request.request_id] = cached

    @rule(kind=KINDS, pick=PICK, count=st.integers(0, 20))
    def hand_off(self, kind: int, pick: int, count: int) -> None:
        self.reserve(kind, pick)
        self.prefill(kind, pick)
        self.step(count)
        if self.transfers():
            self.adopt(pick, True)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work():
                self.step_once()

    def step_once(self) -> None:
        output = self.engine.step()
        assert output.num_batched_tokens > 0 or output.preempted
        for request_id, token_id, position in output.new_tokens:
            tokens = self.tokens[request_id]
            assert position == len(tokens)
            tokens.append(token_id)
            assert tuple(tokens) == answer(self.kinds[request_id])[: len(tokens)]
        for request_id, _ in output.finished:
            assert tuple(self.tokens[request_id]) == answer(self.kinds[request_id])
            self.forget(request_id)

    def handed_off(self) -> list[str]:
        owners = self.engine.owners()
        return [owner.request_id for owner in owners if owner.status is SequenceStatus.HANDING_OFF]

    def transfers(self) -> list[tuple[str, str]]:
        """Handed-off sequences and reservations with the same tokens."""
        return [
            (source, target)
            for source in self.handed_off()
            for target in sorted(self.reserved)
            if self.kinds[source] == self.kinds[target]
            and self.live[source].output_token_ids == self.live[target].output_token_ids
        ]

    @precondition(lambda self: self.transfers())
    @rule(pick=PICK, is_exact=st.booleans())
    def adopt(self, pick: int, is_exact: bool) -> None:
        pairs = self.transfers()
        source, target = pairs[pick % len(pairs)]
        request, first = self.live[target], self.tokens[source][-1]
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        cached = self.reserved.pop(target)
        send_kv(self.engine, self.engine, target, num_tokens, start=cached, source_id=source)
        self.tokens[target].append(first)
        if self.engine.adopt(target, first, exact=is_exact) is not None:
            assert tuple(self.tokens[target]) == answer(self.kinds[target])
            self.forget(target)

    @precondition(lambda self: len(self.reserved) > 1)
    @rule(pick=PICK)
    def recompute(self, pick: int) -> None:
        request_id = sorted(self.reserved)[pick % len(self.reserved)]
        cached = self.reserved.pop(request_id)
        for layer in range(self.engine.cache.num_layers):  # what a broken transfer may leave behind
            blocks = self.engine.kv_blocks(request_id)
            for view in self.engine.cache.block_bytes(layer, KEYS, blocks, cached, 1):
                view[:] = b"\xff" * len(view)
        self.engine.recompute(request_id)

    @precondition(lambda self: self.handed_off())
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        ready = self.handed_off()
        request_id = ready[pick % len(ready)]
        self.engine.release(request_id)
        self.forget(request_id)

    @precondition(lambda self: len(self.live) > 3)  # or few would live to be handed over
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        request_id = sorted(self.live)[pick % len(self.live)]
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        self.forget(request_id)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.waiting + stats.running + stats.reserved + stats.handing_off == len(self.live)
        assert stats.reserved == len(self.reserved)

    def teardown(self) -> None:
        """Everything that is left finishes, and then no block is held."""
        for request_id in sorted(self.reserved):
            self.engine.abort(request_id)
            self.forget(request_id)
        while self.live:
            for request_id in self.handed_off():
                self.engine.release(request_id)
                self.forget(request_id)
            assert self.engine.has_work() == bool(self.live)
            if self.live:
                self.step_once()
                self.engine.check_integrity()
        assert self.engine.stats().held_blocks == 0


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
