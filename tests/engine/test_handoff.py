"""A request that is prefilled in one engine and decoded in another answers as if it had never moved."""

import pytest

from engine.kv_cache import KEYS, VALUES
from engine.outputs import PrefillProgress
from engine.request import FinishReason
from engine.sequence import SequenceStatus
from engine.weights import LoadedModel, load_model
from tests.engine.helpers import EOS_ID, drive, make_engine, make_prompt, make_request, send_kv

TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


@TEMPERATURES
@pytest.mark.parametrize(("dtype", "done"), [("float32", 0), ("float32", 4), ("bfloat16", 0)])
def test_prefilled_here_and_decoded_there_is_one_answer(
    checkpoint: str, temperature: float, dtype: str, done: int
) -> None:
    loaded = load_model(checkpoint, dtype)
    prompt = make_prompt(75)
    request = make_request("a", prompt, temperature=temperature, max_tokens=20)
    whole = drive(make_engine(loaded), [request]).tokens["a"]

    request = make_request("a", prompt, temperature=temperature, max_tokens=20, output=tuple(whole[:done]))
    prefill, decode = make_engine(loaded), make_engine(loaded, block_size=8, num_blocks=200)
    if dtype == "float32":  # bfloat16 rounds too coarsely for a batch to answer as each alone
        decode.add(make_request("other", make_prompt(30, seed=5), max_tokens=40))
    decode.reserve(request)
    prefill.add(request, hold=True)
    first = drive(prefill)
    assert first.tokens["a"] == [whole[done]]
    assert first.positions["a"] == [done]
    assert prefill.owners()[0].status is SequenceStatus.HANDING_OFF
    assert not prefill.has_work()

    num_tokens = len(prompt) + done
    assert send_kv(prefill, decode, "a", num_tokens) == num_tokens * loaded.config.kv_bytes_per_token(dtype)
    assert decode.adopt("a", first.tokens["a"][0]) is None
    prefill.release("a")
    assert prefill.stats().held_blocks == 0
    rest = drive(decode)
    assert rest.tokens["a"] == whole[done + 1 :]
    assert rest.positions["a"] == list(range(done + 1, 20))
    assert decode.stats().held_blocks == 0


def test_a_prefill_with_a_cached_prefix_hands_off_the_same_bytes(loaded: LoadedModel) -> None:
    prompt = make_prompt(75)
    whole = drive(make_engine(loaded), [make_request("a", prompt)]).tokens["a"]
    prefill, decode = make_engine(loaded), make_engine(loaded)
    drive(prefill, [make_request("before", prompt[:50], max_tokens=2)])
    decode.reserve(make_request("a", prompt))
    prefill.add(make_request("a", prompt), hold=True)
    first = drive(prefill)
    assert prefill.stats().cached_prefix_tokens == 48
    send_kv(prefill, decode, "a", 75)
    decode.adopt("a", first.tokens["a"][0])
    assert first.tokens["a"] + drive(decode).tokens["a"] == whole


@TEMPERATURES
def test_fallback_computes_the_prompt_in_the_reserved_blocks(loaded: LoadedModel, temperature: float) -> None:
    request = make_request("a", make_prompt(75), temperature=temperature)
    whole = drive(make_engine(loaded), [request]).tokens["a"]
    engine = make_engine(loaded)
    engine.reserve(request)
    blocks = engine.kv_blocks("a")
    for view in engine.cache.block_bytes(0, KEYS, blocks, 0, 40):  # a transfer that broke off in the middle
        view[:] = b"\xff" * len(view)
    engine.recompute("a")
    assert engine.kv_blocks("a") == blocks
    driven = drive(engine)
    assert driven.tokens["a"] == whole
    assert driven.positions["a"] == list(range(12))
    assert engine.stats().held_blocks == 0


@pytest.mark.parametrize(
    ("max_tokens", "first_token_id", "ignore_eos", "reason"),
    [(1, 9, False, FinishReason.LENGTH), (5, EOS_ID, False, FinishReason.STOP), (5, EOS_ID, True, None)],
)
def test_adopt_says_so_when_the_first_token_ends_it(
    loaded: LoadedModel, max_tokens: int, first_token_id: int, ignore_eos: bool, reason: FinishReason | None
) -> None:
    engine = make_engine(loaded)
    engine.reserve(make_request("a", make_prompt(20), max_tokens=max_tokens, ignore_eos=ignore_eos))
    for layer in range(engine.cache.num_layers):
        for kv in (KEYS, VALUES):
            for view in engine.cache.block_bytes(layer, kv, engine.kv_blocks("a"), 0, 20):
                view[:] = bytes(len(view))
    assert engine.adopt("a", first_token_id) is reason
    engine.check_integrity()
    assert (engine.stats().held_blocks == 0) == (reason is not None)
    assert engine.has_work() == (reason is None)


def test_calls_at_the_wrong_time_are_refused(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    engine.add(make_request("a", make_prompt(20)))
    for call in (lambda: engine.adopt("a", 5), lambda: engine.recompute("a")):
        with pytest.raises(ValueError, match="request a is waiting; it must be waiting_for_kv"):
            call()
    with pytest.raises(ValueError, match="only a handing_off one can be released"):
        engine.release("a")
    with pytest.raises(KeyError):
        engine.adopt("unknown", 5)
    engine.reserve(make_request("b", make_prompt(20)))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.adopt("b", 10_000)
    engine.check_integrity()


def test_a_held_sequence_keeps_its_blocks_until_released(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_blocks=8)
    engine.add(make_request("held", make_prompt(100)), hold=True)
    drive(engine)
    engine.add(make_request("next", make_prompt(60, seed=2), max_tokens=2))
    assert not engine.has_work()
    engine.release("held")
    assert drive(engine).finished["next"] is FinishReason.LENGTH


def test_a_held_sequence_can_be_aborted_in_every_phase(loaded: LoadedModel) -> None:
    for steps in range(4):
        engine = make_engine(loaded, max_num_batched_tokens=40)
        engine.add(make_request("a", make_prompt(100)), hold=True)
        for _ in range(steps):
            engine.step()
        assert engine.abort("a")
        engine.check_integrity()
        assert engine.stats().held_blocks == 0


def test_a_layer_is_told_once_its_kv_is_in_place_and_before_the_step_ends(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_batched_tokens=40)
    engine.add(make_request("a", make_prompt(100)), hold=True)
    engine.add(make_request("b", make_prompt(30, seed=3), max_tokens=3))
    row = engine.cache.row_bytes
    told: list[tuple[tuple[PrefillProgress, ...], int]] = []
    early: dict[tuple[str, int, int], bytes] = {}

    def kv(name: str, layer: int, which: int, start: int, count: int) -> bytes:
        return b"".join(engine.cache.block_bytes(layer, which, engine.kv_blocks(name), start, count))

    def on_layer(prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
        told.append((prefilled, layer))
        for progress in prefilled:
            for which in (KEYS, VALUES):
                key = (progress.request_id, layer, which)
                early[key] = early.get(key, b"") + kv(
                    progress.request_id, layer, which, progress.start, progress.num_tokens
                )

    while engine.has_work():
        told.clear()
        output = engine.step(on_layer)
        layers = range(engine.cache.num_layers) if output.prefilled else ()
        assert told == [(output.prefilled, layer) for layer in layers]
    for layer in range(engine.cache.num_layers):
        for which in (KEYS, VALUES):
            assert early["a", layer, which] == kv("a", layer, which, 0, 100)
            assert len(early["b", layer, which]) == 30 * row


def test_a_halted_request_computes_nothing_more_and_keeps_its_blocks(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_batched_tokens=40)
    engine.add(make_request("a", make_prompt(100)), hold=True)
    with pytest.raises(ValueError, match="request a is waiting; only a held, running one can be halted"):
        engine.halt("a")
    engine.step()
    held = engine.stats().held_blocks
    engine.halt("a")
    engine.halt("a")
    assert not engine.has_work()
    assert engine.owners()[0].status is SequenceStatus.HANDING_OFF
    assert engine.stats().held_blocks == held > 0
    engine.check_integrity()
    engine.release("a")
    assert engine.stats().held_blocks == 0
    engine.add(make_request("b", make_prompt(20)))
    engine.step()
    with pytest.raises(ValueError, match="request b is running; only a held"):
        engine.halt("b")
    with pytest.raises(KeyError):
        engine.halt("a")
