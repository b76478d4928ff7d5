"""Every held block has an owner, and one without is noticed; real engines and a real transfer."""

import pytest

from cluster.block_ownership import BlockOwnership
from cluster.control import BlocksReported
from cluster.events import BlocksStranded, Event
from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair, Side

CONFIG = EngineConfig(num_blocks=80, dtype="float32", max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPT = tuple((7 * n) % 256 for n in range(203))
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


def ownership(side: Side, name: str, events: list[Event]) -> BlockOwnership:
    return BlockOwnership(name, side.engine, side.sides, events.append)


def test_a_reservation_belongs_to_the_decode_side_and_names_its_peer(loaded: LoadedModel) -> None:
    events: list[Event] = []
    with HandoffPair(loaded, CONFIG) as pair:
        decode = ownership(pair.decode, "decode-0", events)
        prefill = ownership(pair.prefill, "prefill-0", events)
        reports: list[BlocksReported] = []
        first_token = pair.prefill.prefill.first_token

        def look_before_the_end(*arguments: object) -> None:
            """All of the prompt is computed, none of it acknowledged: both sides hold it."""
            reports.extend((prefill.report(1), pair.decode.ask(lambda: decode.report(2))))
            first_token(*arguments)  # type: ignore[arg-type]

        pair.prefill.prefill.first_token = look_before_the_end  # type: ignore[method-assign]
        pair.start_decode(PROMPT, SAMPLING)
        pair.start_prefill(PROMPT, SAMPLING)
        pair.decode.said.finished_tokens()
        sent, taken = reports
        (holder,) = sent.holders
        assert (holder.request_id, holder.attempt, holder.owner, holder.peer) == (
            "r",
            1,
            "prefill",
            "decode-0",
        )
        assert holder.blocks == sent.held_blocks == -(-len(PROMPT) // CONFIG.block_size)
        assert holder.age_s >= 0
        if taken.holders:  # ACCEPT may still be on its way
            (holder,) = taken.holders
            assert (holder.owner, holder.peer, holder.status) == ("decode", "prefill-0", "waiting_for_kv")
        pair.prefill.wait_until_free()
        pair.decode.wait_until_free()
        assert pair.decode.ask(decode.check) == pair.prefill.ask(prefill.check) == 0
    assert events == []


def test_blocks_that_no_job_would_free_are_an_event_once(loaded: LoadedModel) -> None:
    events: list[Event] = []
    with HandoffPair(loaded, CONFIG) as pair:
        engine = pair.decode.engine
        decode = ownership(pair.decode, "decode-0", events)
        pair.decode.ask(lambda: engine.reserve(Request("stray#3", PROMPT, SAMPLING)))
        held = pair.decode.held_blocks()
        assert pair.decode.ask(decode.check) == held > 0
        assert pair.decode.ask(decode.check) == held
        (event,) = events
        assert isinstance(event, BlocksStranded)
        assert (event.worker_id, event.blocks) == ("decode-0", held)
        assert event.holders == f"stray#3 (waiting_for_kv, {held} blocks)"
        report = pair.decode.ask(lambda: decode.report(1))
        assert (report.stranded_blocks, report.holders[0].owner, report.holders[0].attempt) == (held, "", 3)
        pair.decode.ask(lambda: engine.abort("stray#3"))
        assert pair.decode.ask(decode.check) == 0
