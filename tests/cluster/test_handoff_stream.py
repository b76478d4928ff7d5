"""Handoffs whose KV leaves while the prompt is computed: real engines and sockets, and faults in mid-stream."""

import threading
from collections.abc import Callable

import pytest

from cluster import kv_stream
from cluster.attempt import attempt_key
from cluster.control import HandoffFailed, PrefillDone
from cluster.events import PrefillFinished, TransferCompleted, TransferFailed, TransferStarted
from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import NewToken, PrefillProgress
from engine.request import Request, SamplingParams
from engine.sequence import SequenceStatus
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair, kv_bytes
from transport.events import TransferAccepted, TransferEvent
from transport.faults import CorruptNextFrame, Cut, LinkFault, Stall

CONFIG = EngineConfig(num_blocks=80, dtype="float32", max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPT = tuple((7 * n) % 256 for n in range(203))  # four chunks, the last of 11 tokens
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


@pytest.fixture(autouse=True)
def every_chunk_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "MIN_PIECE_BYTES", 1)
    monkeypatch.setattr(kv_stream, "MAX_GATHERED_BYTES", 1)
    monkeypatch.setattr(kv_stream, "LAST_GATHERED_BYTES", 1)


def undisturbed(
    loaded: LoadedModel, sampling: SamplingParams = GREEDY, prompt: tuple[int, ...] = PROMPT
) -> list[int]:
    engine = Engine(CONFIG, loaded)
    engine.add(Request("r", prompt, sampling))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for token in engine.step().new_tokens]
    return tokens


class Gate:
    """Holds the prefill engine in the middle of the step that computes token ``at_token``: the KV of layer 0 has been
    handed to the wire, that of layer 1 has not."""

    def __init__(self, pair: HandoffPair, monkeypatch: pytest.MonkeyPatch, at_token: int) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        written = pair.prefill.prefill.layer_written

        def on_layer(prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
            is_there = any(each.start <= at_token < each.start + each.num_tokens for each in prefilled)
            if is_there and layer == 1:
                self._reached.set()
                assert self._open.wait(30)
            written(prefilled, layer)

        monkeypatch.setattr(pair.prefill.prefill, "layer_written", on_layer)

    def wait(self) -> None:
        assert self._reached.wait(30)

    def open(self) -> None:
        self._open.set()


def frames_asked(pair: HandoffPair, monkeypatch: pytest.MonkeyPatch, count: int) -> threading.Event:
    """Set when the place for so many DATA frames was asked for: all before the last one have arrived then."""
    event, asked = threading.Event(), 0
    block_bytes = pair.decode.engine.cache.block_bytes

    def on_block_bytes(layer, kv, table, start, num_tokens):  # type: ignore[no-untyped-def]
        nonlocal asked
        asked += 1
        if asked == count:
            event.set()
        return block_bytes(layer, kv, table, start, num_tokens)

    monkeypatch.setattr(pair.decode.engine.cache, "block_bytes", on_block_bytes)
    return event


def is_last(event: TransferEvent) -> bool:
    return not isinstance(event, TransferAccepted)


def told_of(
    pair: HandoffPair, monkeypatch: pytest.MonkeyPatch, matches: Callable[[TransferEvent], bool] = is_last
) -> threading.Event:
    """Set when the wire's word has been posted to the prefill engine's thread, which may be busy."""
    told = threading.Event()
    transfer_event = pair.prefill.kv._transfer_event

    def on_transfer_event(event: TransferEvent) -> None:
        transfer_event(event)
        if matches(event):
            told.set()

    monkeypatch.setattr(pair.prefill.kv, "_transfer_event", on_transfer_event)
    return told


def inject(pair: HandoffPair, fault: LinkFault) -> None:
    pair.prefill.kv.sender_to(*pair.decode.kv.address).inject(fault)


def both_free(pair: HandoffPair) -> None:
    pair.prefill.wait_until_free()
    pair.decode.wait_until_free()
    assert not pair.prefill.ask(lambda: dict(pair.prefill.prefill.jobs))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("delivery", ["stream", "bulk"])
def test_kv_is_bitwise_the_same_and_so_are_the_tokens(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, delivery: str, sampling: SamplingParams
) -> None:
    seen: dict[str, bytes] = {}
    with HandoffPair(loaded, CONFIG, delivery=delivery) as pair:
        first_token, completed = pair.prefill.prefill.first_token, pair.decode.decode.completed

        def on_first_token(token: NewToken, now: float) -> None:
            seen["sent"] = kv_bytes(pair.prefill.engine, "r", len(PROMPT))
            first_token(token, now)

        def on_completed(header, commit, verified_at):  # type: ignore[no-untyped-def]
            seen["received"] = kv_bytes(pair.decode.engine, "r", len(PROMPT))
            return completed(header, commit, verified_at)

        monkeypatch.setattr(pair.prefill.prefill, "first_token", on_first_token)
        monkeypatch.setattr(pair.decode.decode, "completed", on_completed)
        answered = told_of(pair, monkeypatch, lambda event: True)
        pair.start_decode(PROMPT, sampling)
        pair.start_prefill(PROMPT, sampling)
        pair.prefill.thread.post(lambda: answered.wait(30))  # ACCEPT first, then the prompt
        assert pair.decode.said.finished_tokens() == undisturbed(loaded, sampling)
        done = pair.prefill.said.wait_message(TransferCompleted)
        (started,) = pair.prefill.said.of(TransferStarted)
        (computed,) = pair.prefill.said.of(PrefillFinished)
        both_free(pair)
    assert seen["sent"] == seen["received"]
    assert len(seen["sent"]) == len(PROMPT) * loaded.config.kv_bytes_per_token("float32")
    assert done.wire_bytes == done.raw_bytes == len(seen["sent"])
    if delivery == "stream":
        assert started.at < computed.at
        assert 0 < done.exposed_s < done.duration_s
    else:
        assert started.at >= computed.at
        assert done.exposed_s == done.duration_s


def test_a_chunk_is_on_the_other_side_while_the_next_is_computed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        gate = Gate(pair, monkeypatch, 150)  # in the third chunk
        arrived = frames_asked(pair, monkeypatch, 2 * 2 * loaded.config.num_layers)
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        gate.wait()
        assert arrived.wait(30), "nothing of two chunks came"
        assert kv_bytes(pair.decode.engine, "r", 64) == kv_bytes(pair.prefill.engine, "r", 64)
        assert not pair.prefill.said.of(PrefillDone)
        gate.open()
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)
        both_free(pair)


def test_an_answer_that_comes_after_the_prompt_finds_all_pieces_waiting(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_prefill(PROMPT, GREEDY)
        pair.prefill.said.wait_message(PrefillDone)
        assert not pair.prefill.said.of(TransferStarted)
        pair.start_decode(PROMPT, GREEDY)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)
        done = pair.prefill.said.wait_message(TransferCompleted)
        (started,) = pair.prefill.said.of(TransferStarted)
        assert done.exposed_s == done.duration_s, "it began after the prompt's end"
        assert started.at >= pair.prefill.said.of(PrefillFinished)[0].at
        both_free(pair)


def test_path_v1_is_bulk_whatever_the_delivery(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG, delivery="stream") as pair:
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY, path="v1")
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)
        done = pair.prefill.said.wait_message(TransferCompleted)
        assert done.exposed_s == done.duration_s


def test_prompts_computed_side_by_side_share_the_wire(loaded: LoadedModel) -> None:
    config = EngineConfig(
        num_blocks=120,
        dtype="float32",
        max_num_batched_tokens=64,
        prefill_chunk_tokens=24,
        enable_prefix_caching=False,
    )
    prompts = {f"r{n}": tuple((7 * i + 31 * n) % 256 for i in range(150 + n)) for n in range(3)}
    with HandoffPair(loaded, config) as pair:
        for name, prompt in prompts.items():
            pair.start_decode(prompt, GREEDY, request_id=name)
            pair.start_prefill(prompt, GREEDY, request_id=name)
        for name, prompt in prompts.items():
            assert pair.decode.said.finished_tokens(name) == undisturbed(loaded, prompt=prompt)
        both_free(pair)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_pieces_carry_what_a_bulk_transfer_carries(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    arrived: list[bytes] = []
    for delivery in ("stream", "bulk"):
        with HandoffPair(loaded, CONFIG, delivery=delivery) as pair:
            completed = pair.decode.decode.completed

            def on_completed(header, commit, verified_at, pair=pair, completed=completed):  # type: ignore[no-untyped-def]
                arrived.append(kv_bytes(pair.decode.engine, "r", len(PROMPT)))
                return completed(header, commit, verified_at)

            monkeypatch.setattr(pair.decode.decode, "completed", on_completed)
            pair.start_decode(PROMPT, GREEDY)
            pair.start_prefill(PROMPT, GREEDY, codec=codec)
            pair.decode.said.finished_tokens()
    streamed, bulk = arrived
    assert streamed == bulk


# --- failures in mid-stream ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [(CorruptNextFrame(), {"checksum"}), (Cut(), {"peer_closed", "truncated"})],
    ids=["corrupt", "cut"],
)
def test_a_fault_in_mid_stream_stops_the_prefill_and_frees_both_sides(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: LinkFault, reasons: set[str]
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        gate, told = Gate(pair, monkeypatch, 10), told_of(pair, monkeypatch)
        inject(pair, fault)
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        gate.wait()
        assert pair.decode.said.wait_message(HandoffFailed).reason in reasons
        pair.decode.wait_until_free()
        assert told.wait(30)
        gate.open()
        assert pair.prefill.said.wait_message(HandoffFailed).reason in reasons
        both_free(pair)
        assert not pair.prefill.said.of(PrefillDone), "the rest of the prompt was not computed"
        assert not pair.prefill.ask(pair.prefill.engine.has_work)
        # the connection (or a new one) serves the next attempt
        pair.start_decode(PROMPT, GREEDY, attempt=2)
        pair.start_prefill(PROMPT, GREEDY, attempt=2)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)
        both_free(pair)


def test_a_fault_in_the_last_piece_is_found_too(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        gate = Gate(pair, monkeypatch, len(PROMPT) - 1)
        arrived = frames_asked(
            pair, monkeypatch, 3 * 2 * loaded.config.num_layers + 2
        )  # and the last layer 0
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        gate.wait()
        assert arrived.wait(30)
        inject(pair, CorruptNextFrame())
        gate.open()
        assert pair.decode.said.wait_message(HandoffFailed).reason == "checksum"
        both_free(pair)
        pair.start_local(PROMPT, GREEDY, attempt=2)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)


def test_a_link_that_stands_still_delays_no_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        began = frames_asked(pair, monkeypatch, 1)
        inject(pair, Stall(60.0))
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        assert began.wait(30)
        pair.prefill.said.wait_message(PrefillDone)  # although no byte moves
        assert not pair.prefill.said.of(TransferCompleted)
        assert pair.prefill.held_blocks() > 0
        for sender in list(pair.prefill.kv._senders.values()):
            sender.close()
        both_free(pair)


def test_blocks_of_an_aborted_prompt_stay_pinned_while_the_wire_may_read_them(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        gate, began = Gate(pair, monkeypatch, 100), frames_asked(pair, monkeypatch, 1)
        accepted = told_of(pair, monkeypatch, lambda event: isinstance(event, TransferAccepted))
        inject(pair, Stall(60.0))  # a frame is half written
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        gate.wait()
        assert began.wait(30)
        assert accepted.wait(30)
        pair.abort()
        gate.open()
        pair.prefill.said.wait_message(TransferStarted)
        (owner,) = pair.prefill.ask(pair.prefill.engine.owners)
        assert owner.status is SequenceStatus.HANDING_OFF
        assert not pair.prefill.ask(pair.prefill.engine.has_work), "nothing more is computed"
        assert attempt_key("r", 1) in pair.prefill.ask(lambda: dict(pair.prefill.prefill.jobs))
        pair.decode.wait_until_free()
        for sender in list(pair.prefill.kv._senders.values()):
            sender.close()
        both_free(pair)
        assert pair.prefill.said.wait_message(TransferFailed).reason in ("aborted", "cancelled")
        assert not pair.prefill.said.of(HandoffFailed), "the router asked for it"
        assert not pair.prefill.said.of(PrefillDone)


@pytest.mark.parametrize("at_token", [10, 100, len(PROMPT) - 1])
@pytest.mark.parametrize("who", ["both", "decode"])
def test_an_abort_in_any_chunk_frees_both_sides(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, at_token: int, who: str
) -> None:
    act: dict[str, Callable[[HandoffPair], None]] = {
        "both": lambda pair: pair.abort(),
        "decode": lambda pair: pair.decode.kv._receiver.cancel("r", 1, "no longer wanted"),
    }
    with HandoffPair(loaded, CONFIG) as pair:
        gate, told = Gate(pair, monkeypatch, at_token), told_of(pair, monkeypatch)
        began = frames_asked(pair, monkeypatch, 1)
        pair.start_decode(PROMPT, GREEDY)
        pair.start_prefill(PROMPT, GREEDY)
        gate.wait()
        assert began.wait(30)
        act[who](pair)
        gate.open()
        assert told.wait(30)
        both_free(pair)
        assert not pair.decode.said.tokens()
        pair.start_local(PROMPT, GREEDY, attempt=2)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded)
