"""Link faults as a worker is told of them: real engines and sockets, and a transfer after the fault that is whole."""

import time

import pytest

from cluster.control import HandoffFailed, InjectLinkFault, PrefillDone
from cluster.events import TransferCompleted
from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair

CONFIG = EngineConfig(num_blocks=80, dtype="float32", enable_prefix_caching=False)
PROMPT = tuple((7 * n) % 256 for n in range(100))
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
REASONS = {"corrupt": {"checksum"}, "cut": {"peer_closed", "truncated"}}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


def inject(pair: HandoffPair, kind: str, seconds: float = 0.0, now: float | None = None) -> None:
    fault = InjectLinkFault(worker_id="prefill-0", kind=kind, seconds=seconds)
    pair.prefill.kv.inject(fault, time.monotonic() if now is None else now)


def hand_off(pair: HandoffPair, request_id: str) -> None:
    pair.start_decode(PROMPT, GREEDY, request_id)
    pair.start_prefill(PROMPT, GREEDY, request_id)


def failure_of(pair: HandoffPair, request_id: str) -> str:
    def found() -> list[HandoffFailed]:
        return [failed for failed in pair.decode.said.of(HandoffFailed) if failed.request_id == request_id]

    pair.decode.said.wait_for(lambda: bool(found()))
    return found()[0].reason


def is_whole(pair: HandoffPair, request_id: str) -> bool:
    return len(pair.decode.said.finished_tokens(request_id)) == GREEDY.max_tokens


@pytest.mark.parametrize("kind", REASONS)
def test_the_next_frame_is_hit_and_no_other(loaded: LoadedModel, kind: str) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        inject(pair, kind)  # before there is any connection: it waits for the first one
        hand_off(pair, "a")
        assert failure_of(pair, "a") in REASONS[kind]
        hand_off(pair, "b")
        assert is_whole(pair, "b")
        inject(pair, kind)
        hand_off(pair, "c")
        assert failure_of(pair, "c") in REASONS[kind]
        pair.decode.wait_until_free()
        pair.prefill.wait_until_free()


@pytest.mark.parametrize("kind", REASONS)
def test_a_fault_that_lasts_hits_every_frame_until_its_end(loaded: LoadedModel, kind: str) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off(pair, "before")
        assert is_whole(pair, "before")
        inject(pair, kind, seconds=3600.0)
        for request_id in ("a", "b"):
            hand_off(pair, request_id)
            assert failure_of(pair, request_id) in REASONS[kind]
        pair.decode.wait_until_free()
        pair.prefill.wait_until_free()


def test_a_fault_whose_time_is_over_hits_nothing(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        inject(pair, "cut", seconds=10.0, now=time.monotonic() - 11.0)
        hand_off(pair, "a")
        assert is_whole(pair, "a")


def test_a_stall_delays_and_breaks_nothing(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off(pair, "before")
        assert is_whole(pair, "before")
        inject(pair, "stall", seconds=0.3)
        hand_off(pair, "a")
        assert is_whole(pair, "a")
        pair.prefill.said.wait_for(lambda: len(pair.prefill.said.of(TransferCompleted)) == 2)
        assert pair.prefill.said.of(TransferCompleted)[1].duration_s >= 0.3
        assert not pair.decode.said.of(HandoffFailed)


def test_an_unknown_fault_is_a_mistake_of_the_supervisor(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair, pytest.raises(ValueError, match="'bend' is not a link fault"):
        inject(pair, "bend")


@pytest.mark.parametrize("kind", REASONS)
def test_a_fault_that_was_taken_back_hits_nothing(loaded: LoadedModel, kind: str) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        for seconds in (0.0, 60.0):
            inject(pair, kind, seconds)
            pair.prefill.kv.heal()
            name = f"before-{seconds:g}"
            hand_off(pair, name)
            assert is_whole(pair, name)
            inject(pair, kind, seconds)  # now on a connection that exists
            pair.prefill.kv.heal()
            name = f"after-{seconds:g}"
            hand_off(pair, name)
            assert is_whole(pair, name)


def test_a_stall_that_is_healed_goes_on(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off(pair, "first")
        assert is_whole(pair, "first")
        inject(pair, "stall", 60.0)
        hand_off(pair, "stalled")
        pair.prefill.said.wait_for(lambda: len(pair.prefill.said.of(PrefillDone)) == 2)
        pair.prefill.kv.heal()
        assert is_whole(pair, "stalled")
