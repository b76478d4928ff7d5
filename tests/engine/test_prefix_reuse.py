"""A reservation shares what the prefix cache holds: fewer bytes come, same tokens, and shared blocks stay untouched."""

import pytest

from engine.engine import Engine
from engine.kv_cache import KEYS, VALUES
from engine.scheduler import NoCapacity
from engine.weights import LoadedModel
from tests.engine.helpers import drive, make_engine, make_prompt, make_request

TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])
PREFIX = make_prompt(50, seed=1)
PROMPT = PREFIX + make_prompt(25, seed=2)
HELD = 48  # three full blocks of the prefix


def kv_of(engine: Engine, blocks: tuple[int, ...], start: int, end: int) -> list[bytes]:
    """KV of some tokens of a block table, one string for each layer's keys and values."""
    return [
        b"".join(engine.cache.block_bytes(layer, kv, blocks, start, end - start))
        for layer in range(engine.cache.num_layers)
        for kv in (KEYS, VALUES)
    ]


def send_kv(source: Engine, target: Engine, request_id: str, start: int, end: int) -> int:
    """What a transfer does, from token ``start`` on. Returns the number of bytes."""
    parts = iter(kv_of(source, source.kv_blocks(request_id), start, end))
    sent = 0
    for layer in range(target.cache.num_layers):
        for kv in (KEYS, VALUES):
            part, position = next(parts), 0
            for view in target.cache.block_bytes(layer, kv, target.kv_blocks(request_id), start, end - start):
                view[:] = part[position : position + len(view)]
                position += len(view)
            sent += position
    return sent


def engine_with_prefix(loaded: LoadedModel, **changes: object) -> Engine:
    """An engine that has answered a request with the prefix before."""
    engine = make_engine(loaded, **changes)
    drive(engine, [make_request("before", PREFIX, max_tokens=2)])
    return engine


def prefilled(loaded: LoadedModel, temperature: float = 0.0, **changes: object) -> tuple[Engine, int]:
    """An engine that holds the prompt's KV for a handoff, and the first token."""
    engine = make_engine(loaded, enable_prefix_caching=False, **changes)
    engine.add(make_request("a", PROMPT, temperature=temperature), hold=True)
    return engine, drive(engine).tokens["a"][0]


def whole(loaded: LoadedModel, temperature: float = 0.0) -> list[int]:
    engine = make_engine(loaded, enable_prefix_caching=False)
    return drive(engine, [make_request("a", PROMPT, temperature=temperature)]).tokens["a"]


@TEMPERATURES
@pytest.mark.parametrize("decode_block_size", [16, 8])
def test_only_the_rest_comes_and_the_tokens_are_those_of_one_engine(
    loaded: LoadedModel, temperature: float, decode_block_size: int
) -> None:
    prefill, first = prefilled(loaded, temperature)
    decode = engine_with_prefix(loaded, block_size=decode_block_size, num_blocks=200)
    assert decode.reserve(make_request("a", PROMPT, temperature=temperature)) == HELD
    blocks = decode.kv_blocks("a")
    before = kv_of(decode, blocks, 0, HELD)
    bytes_per_token = loaded.config.kv_bytes_per_token("float32")
    assert send_kv(prefill, decode, "a", HELD, len(PROMPT)) == (len(PROMPT) - HELD) * bytes_per_token
    decode.adopt("a", first)
    assert decode.stats().cached_prefix_tokens == HELD
    tokens = [first]
    while decode.has_work():
        tokens += [token.token_id for token in decode.step().new_tokens]
        decode.check_integrity()
    assert tokens == whole(loaded, temperature)
    assert kv_of(decode, blocks, 0, HELD) == before
    assert decode.stats().held_blocks == 0


@TEMPERATURES
def test_fallback_computes_from_the_held_prefix_on(loaded: LoadedModel, temperature: float) -> None:
    engine = engine_with_prefix(loaded)
    engine.reserve(make_request("a", PROMPT, temperature=temperature))
    blocks = engine.kv_blocks("a")
    before = kv_of(engine, blocks, 0, HELD)
    for view in engine.cache.block_bytes(
        0, KEYS, blocks, HELD, 20
    ):  # a transfer that broke off in the middle
        view[:] = b"\xff" * len(view)
    engine.recompute("a")
    driven = drive(engine)
    first = driven.steps[0].prefilled[0]
    assert (first.start, first.num_tokens, first.num_cached, first.done) == (0, len(PROMPT), HELD, True)
    assert driven.steps[0].num_batched_tokens == len(PROMPT) - HELD
    assert driven.tokens["a"] == whole(loaded, temperature)
    assert kv_of(engine, blocks, 0, HELD) == before


def test_a_prompt_that_is_known_whole_leaves_something_to_come(loaded: LoadedModel) -> None:
    engine = engine_with_prefix(loaded)
    assert engine.reserve(make_request("longer", PREFIX)) == 48
    assert engine.reserve(make_request("whole blocks", PREFIX[:48])) == 32
    assert engine.reserve(make_request("one block", PREFIX[:16])) == 0
    assert engine.reserve(make_request("other", make_prompt(50, seed=3))) == 0
    engine.check_integrity()


def test_without_the_prefix_cache_nothing_is_held(loaded: LoadedModel) -> None:
    engine = engine_with_prefix(loaded, enable_prefix_caching=False)
    assert engine.reserve(make_request("a", PROMPT)) == 0


def test_blocks_of_a_sequence_that_still_runs_are_shared_too(loaded: LoadedModel) -> None:
    prefill, first = prefilled(loaded)
    decode = make_engine(loaded)
    alone = drive(make_engine(loaded), [make_request("running", PREFIX, max_tokens=30)]).tokens["running"]
    decode.add(make_request("running", PREFIX, max_tokens=30))
    tokens: dict[str, list[int]] = {"running": [], "a": [first]}
    for _ in range(3):
        tokens["running"] += [token.token_id for token in decode.step().new_tokens]
    assert decode.reserve(make_request("a", PROMPT)) == HELD
    assert decode.kv_blocks("a")[:3] == decode.kv_blocks("running")[:3]
    send_kv(prefill, decode, "a", HELD, len(PROMPT))
    decode.adopt("a", first)
    for request_id, more in drive(decode).tokens.items():
        tokens[request_id] += more
    assert tokens == {"running": alone, "a": whole(loaded)}


def test_shared_blocks_are_not_evicted_while_reserved(loaded: LoadedModel) -> None:
    prefill, first = prefilled(loaded)
    decode = engine_with_prefix(loaded, num_blocks=12)
    assert decode.reserve(make_request("a", PROMPT)) == HELD
    blocks = decode.kv_blocks("a")
    before = kv_of(decode, blocks, 0, HELD)
    for number in range(6):  # each needs every block that is left, so all other cached content goes
        other = make_request(str(number), make_prompt(60, seed=10 + number), max_tokens=30)
        decode.add(other)
        while decode.has_work():
            decode.step()
            decode.check_integrity()
            assert not any(
                set(decode.kv_blocks(owner.request_id)) & set(blocks)
                for owner in decode.owners()
                if owner.request_id != "a"
            )
    assert kv_of(decode, blocks, 0, HELD) == before
    send_kv(prefill, decode, "a", HELD, len(PROMPT))
    decode.adopt("a", first)
    assert [first, *drive(decode).tokens["a"]] == whole(loaded)


def test_what_no_longer_fits_holds_nothing_and_says_what_is_free(loaded: LoadedModel) -> None:
    engine = engine_with_prefix(loaded, num_blocks=8)
    # 100 tokens are 7 blocks: 3 of them shared, so 4 of the other 5 are needed
    assert engine.reserve(make_request("fits", PREFIX, max_tokens=50)) == 48
    assert engine.abort("fits")
    engine.add(make_request("held", make_prompt(20, seed=4)), hold=True)
    drive(engine)
    with pytest.raises(NoCapacity, match="4 blocks are needed, 3 are free"):
        engine.reserve(make_request("too long", PREFIX, max_tokens=50))
    engine.check_integrity()
    assert engine.stats().held_blocks == 2


def test_giving_up_a_reservation_leaves_the_prefix_cached(loaded: LoadedModel) -> None:
    engine = engine_with_prefix(loaded)
    engine.reserve(make_request("a", PROMPT))
    blocks = engine.kv_blocks("a")[:3]
    assert engine.abort("a")
    assert engine.stats().held_blocks == 0
    assert engine.reserve(make_request("again", PROMPT)) == HELD
    assert engine.kv_blocks("again")[:3] == blocks


def test_lossy_kv_may_follow_an_exact_prefix_and_is_not_kept(loaded: LoadedModel) -> None:
    prefill, first = prefilled(loaded)
    decode = engine_with_prefix(loaded)
    decode.reserve(make_request("a", PROMPT))
    send_kv(prefill, decode, "a", HELD, len(PROMPT))
    decode.adopt("a", first, exact=False)
    drive(decode)
    assert decode.reserve(make_request("again", PROMPT)) == HELD  # 64 with what came


def test_exact_kv_that_came_is_kept_behind_the_prefix(loaded: LoadedModel) -> None:
    prefill, first = prefilled(loaded)
    decode = engine_with_prefix(loaded)
    decode.reserve(make_request("a", PROMPT))
    send_kv(prefill, decode, "a", HELD, len(PROMPT))
    decode.adopt("a", first)
    assert decode.reserve(make_request("again", PROMPT)) == 64


@TEMPERATURES
def test_a_preempted_sequence_and_a_reserved_one_share_and_both_end_right(
    loaded: LoadedModel, temperature: float
) -> None:
    prefill, first = prefilled(loaded, temperature)
    others = {f"o{number}": PREFIX + make_prompt(9, seed=20 + number) for number in range(3)}
    alone = {
        name: drive(make_engine(loaded), [make_request(name, prompt, max_tokens=40)]).tokens[name]
        for name, prompt in others.items()
    }
    decode = engine_with_prefix(loaded, num_blocks=14)
    assert decode.reserve(make_request("a", PROMPT, temperature=temperature)) == HELD
    blocks = decode.kv_blocks("a")
    before = kv_of(decode, blocks, 0, HELD)
    send_kv(prefill, decode, "a", HELD, len(PROMPT))
    decode.adopt("a", first)
    driven = drive(decode, [make_request(name, prompt, max_tokens=40) for name, prompt in others.items()])
    assert decode.stats().preemptions > 0
    assert "a" not in {name for step in driven.steps for name in step.preempted}
    assert [first, *driven.tokens.pop("a")] == whole(loaded, temperature)
    assert driven.tokens == alone
    assert kv_of(decode, blocks, 0, HELD) == before


def test_a_reservation_cannot_start_inside_its_shared_blocks(loaded: LoadedModel) -> None:
    engine = engine_with_prefix(loaded)
    engine.reserve(make_request("a", PROMPT))
    sequence = engine._scheduler.sequences["a"]
    with pytest.raises(ValueError, match="request a starts at token 0; allowed is 48 or more"):
        engine._scheduler.start_reserved(sequence, 0, 0.0)
    engine.check_integrity()
