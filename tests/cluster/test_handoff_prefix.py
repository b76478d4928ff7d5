"""A handoff to a decode worker that holds the prompt's beginning: real engines and sockets, only the rest moves."""

import threading

import pytest

from cluster.control import HandoffFailed, PrefillDone
from cluster.events import PrefillFinished, TransferCompleted, TransferStarted
from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import NewToken
from engine.request import Request, SamplingParams
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair, kv_bytes
from transport.events import TransferAccepted, TransferEvent
from transport.faults import CorruptNextFrame

CONFIG = EngineConfig(num_blocks=700, dtype="float32", max_num_batched_tokens=512)
UNCACHED = EngineConfig(
    num_blocks=700, dtype="float32", max_num_batched_tokens=512, enable_prefix_caching=False
)
PREFIX = tuple((7 * n + n // 256) % 256 for n in range(4000))  # 250 blocks of 16 tokens
FIRST = (*PREFIX, *range(3, 40))
SECOND = (*PREFIX, *range(200, 90, -1))
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


def undisturbed(loaded: LoadedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    engine = Engine(UNCACHED, loaded)
    engine.add(Request("r", prompt, sampling))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for token in engine.step().new_tokens]
    return tokens


def of_second(pair: HandoffPair) -> tuple[TransferStarted, TransferCompleted]:
    """The two facts about the second request's transfer; each is told once."""
    said = pair.prefill.said
    said.wait_for(lambda: any(event.request_id == "second" for event in said.of(TransferCompleted)))
    (started,) = [event for event in said.of(TransferStarted) if event.request_id == "second"]
    (completed,) = [event for event in said.of(TransferCompleted) if event.request_id == "second"]
    return started, completed


def hand_off_first(pair: HandoffPair, prompt: tuple[int, ...] = FIRST, codec: str = "raw") -> None:
    pair.start_decode(prompt, GREEDY, request_id="first")
    pair.start_prefill(prompt, GREEDY, request_id="first", codec=codec)
    pair.decode.said.finished_tokens("first")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("decode_block_size", [16, 24])
@pytest.mark.parametrize("is_late", [False, True], ids=["accept before prefill ends", "accept after it"])
def test_the_second_request_with_a_prefix_moves_only_the_rest(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    decode_block_size: int,
    is_late: bool,
) -> None:
    held = 4000 // decode_block_size * decode_block_size
    seen: dict[str, bytes] = {}
    decode_config = EngineConfig(num_blocks=700, dtype="float32", block_size=decode_block_size)
    accepted = threading.Event()
    was_accepted: list[bool] = []
    with HandoffPair(loaded, CONFIG, decode_config) as pair:
        transfer_event = pair.prefill.kv._transfer_event

        def on_transfer_event(event: TransferEvent) -> None:
            transfer_event(event)
            if isinstance(event, TransferAccepted) and event.request_id == "second":
                accepted.set()

        monkeypatch.setattr(pair.prefill.kv, "_transfer_event", on_transfer_event)
        hand_off_first(pair)
        first_token, completed = pair.prefill.prefill.first_token, pair.decode.decode.completed

        def on_first_token(token: NewToken, now: float) -> None:
            seen["sent"] = kv_bytes(pair.prefill.engine, "second", len(SECOND))
            was_accepted.append(pair.prefill.prefill.jobs[token.request_id].accepted is not None)
            first_token(token, now)

        def on_completed(header, commit, verified_at):  # type: ignore[no-untyped-def]
            seen["received"] = kv_bytes(pair.decode.engine, "second", len(SECOND))
            return completed(header, commit, verified_at)

        monkeypatch.setattr(pair.prefill.prefill, "first_token", on_first_token)
        monkeypatch.setattr(pair.decode.decode, "completed", on_completed)
        said = pair.prefill.said
        if is_late:  # without a StartDecode the OPEN waits
            pair.start_prefill(SECOND, sampling, request_id="second")
            said.wait_for(lambda: any(done.request_id == "second" for done in said.of(PrefillDone)))
            assert all(event.request_id == "first" for event in said.of(TransferStarted))
            pair.start_decode(SECOND, sampling, request_id="second")
        else:
            pair.start_decode(SECOND, sampling, request_id="second")
            pair.start_prefill(SECOND, sampling, request_id="second")
            pair.prefill.thread.post(lambda: accepted.wait(30))  # holds prefill until the answer is there
        assert pair.decode.said.finished_tokens("second") == undisturbed(loaded, SECOND, sampling)

        assert was_accepted == [not is_late]
        started, done = of_second(pair)
        per_token = loaded.config.kv_bytes_per_token("float32")
        assert (done.tokens, done.skipped_tokens) == (len(SECOND) - held, held)
        assert done.wire_bytes == done.raw_bytes == done.tokens * per_token
        assert done.skipped_bytes == held * per_token
        assert (started.tokens, started.raw_bytes) == (done.tokens, done.raw_bytes)
        assert (started.skipped_tokens, started.skipped_bytes) == (done.skipped_tokens, done.skipped_bytes)
        (computed,) = [event for event in said.of(PrefillFinished) if event.request_id == "second"]
        assert computed.cached_tokens == 4000  # the prefill worker had the prefix as well
        assert len(seen["sent"]) == len(SECOND) * per_token
        assert seen["sent"] == seen["received"]
        pair.prefill.wait_until_free()
        pair.decode.wait_until_free()


def test_a_prompt_that_is_there_whole_still_moves_its_last_block(loaded: LoadedModel) -> None:
    prompt = PREFIX[:320]
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off_first(pair, prompt)
        pair.start_decode(prompt, GREEDY, request_id="second")
        pair.start_prefill(prompt, GREEDY, request_id="second")
        assert pair.decode.said.finished_tokens("second") == undisturbed(loaded, prompt, GREEDY)
        _, done = of_second(pair)
        assert (done.tokens, done.skipped_tokens) == (16, 304)


@pytest.mark.parametrize(
    ("first_codec", "second_codec", "held"), [("raw", "int8", 320), ("int8", "raw", 0), ("int8", "int8", 0)]
)
def test_what_is_skipped_is_exact_whatever_the_codec_of_the_rest(
    loaded: LoadedModel, first_codec: str, second_codec: str, held: int
) -> None:
    first, second = (*PREFIX[:320], 1, 2), (*PREFIX[:320], *range(100, 140))
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off_first(pair, first, first_codec)
        pair.start_decode(second, GREEDY, request_id="second")
        pair.start_prefill(second, GREEDY, request_id="second", codec=second_codec)
        assert len(pair.decode.said.finished_tokens("second")) == 12
        _, done = of_second(pair)
        assert (done.tokens, done.skipped_tokens) == (len(second) - held, held)
        # a third request finds exact blocks only
        pair.start_local(second, GREEDY)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded, second, GREEDY)
        (computed,) = [event for event in pair.decode.said.of(PrefillFinished) if event.request_id == "r"]
        assert computed.cached_tokens == (352 if second_codec == "raw" else held)


def test_no_prefix_cache_on_the_decode_worker_means_everything_moves(loaded: LoadedModel) -> None:
    prompt = PREFIX[:320]
    with HandoffPair(loaded, CONFIG, UNCACHED) as pair:
        hand_off_first(pair, prompt)
        pair.start_decode(prompt, GREEDY, request_id="second")
        pair.start_prefill(prompt, GREEDY, request_id="second")
        pair.decode.said.finished_tokens("second")
        _, done = of_second(pair)
        assert (done.tokens, done.skipped_tokens, done.skipped_bytes) == (320, 0, 0)


def test_fallback_after_a_damaged_transfer_starts_from_the_held_prefix(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off_first(pair)
        before = pair.decode.ask(lambda: pair.decode.engine.stats().cached_prefix_tokens)
        pair.prefill.kv.sender_to(*pair.decode.kv.address).inject(CorruptNextFrame())
        pair.start_decode(SECOND, GREEDY)
        pair.start_prefill(SECOND, GREEDY)
        assert pair.decode.said.wait_message(HandoffFailed).reason == "checksum"
        pair.decode.wait_until_free()
        pair.prefill.wait_until_free()
        assert pair.decode.ask(lambda: pair.decode.engine.stats().cached_prefix_tokens) == before
        pair.start_local(SECOND, GREEDY, attempt=2)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded, SECOND, GREEDY)
        (computed,) = pair.decode.said.of(PrefillFinished)
        assert (computed.cached_tokens, computed.prompt_tokens) == (4000, len(SECOND))


def test_giving_up_while_the_rest_is_on_its_way_leaves_the_prefix_whole(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        hand_off_first(pair)
        gate = threading.Event()
        pair.prefill.thread.post(lambda: gate.wait(30))
        pair.start_decode(SECOND, GREEDY)
        pair.start_prefill(SECOND, GREEDY)
        pair.abort()
        gate.set()
        pair.decode.wait_until_free()
        pair.prefill.wait_until_free()
        pair.start_decode(SECOND, GREEDY, request_id="second")
        pair.start_prefill(SECOND, GREEDY, request_id="second")
        assert pair.decode.said.finished_tokens("second") == undisturbed(loaded, SECOND, GREEDY)
        assert of_second(pair)[1].skipped_tokens == 4000
