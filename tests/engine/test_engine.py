"""One engine's life of a request, and that how it is scheduled never changes what it answers."""

from itertools import pairwise

import pytest

from engine.outputs import PrefillProgress
from engine.request import FinishReason, Request
from engine.scheduler import NoCapacity
from engine.sequence import SequenceStatus
from engine.weights import LoadedModel
from tests.engine.helpers import EOS_ID, VOCAB_SIZE, Driven, drive, make_engine, make_prompt, make_request

TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])
LENGTHS = (1, 15, 16, 17, 33, 100, 250)


def batch_of(temperature: float, max_tokens: int = 20) -> list[Request]:
    return [
        make_request(f"r{n}", make_prompt(n, seed=n), temperature=temperature, max_tokens=max_tokens, seed=n)
        for n in LENGTHS
    ]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def alone(loaded: LoadedModel, request: pytest.FixtureRequest) -> tuple[float, dict[str, list[int]]]:
    """Temperature, and what each request of the batch answers alone, its prompt computed at once."""
    temperature = float(request.param)
    answers: dict[str, list[int]] = {}
    for one in batch_of(temperature):
        engine = make_engine(loaded, max_num_batched_tokens=512, enable_prefix_caching=False)
        driven = drive(engine, [one])
        assert driven.steps[0].num_prefill_tokens == len(one.prompt_token_ids)
        answers |= driven.tokens
    return temperature, answers


def test_a_batch_answers_as_each_alone(
    loaded: LoadedModel, alone: tuple[float, dict[str, list[int]]]
) -> None:
    temperature, answers = alone
    driven = drive(make_engine(loaded, max_num_batched_tokens=512), batch_of(temperature))
    assert len({p.request_id for p in driven.steps[0].prefilled}) > 3  # several prompts in one step
    assert driven.tokens == answers


@pytest.mark.parametrize("budget", [8, 37])
def test_chunks_answer_as_the_whole(
    loaded: LoadedModel, alone: tuple[float, dict[str, list[int]]], budget: int
) -> None:
    temperature, answers = alone
    driven = drive(make_engine(loaded, max_num_batched_tokens=budget), batch_of(temperature))
    assert len([p for step in driven.steps for p in step.prefilled if p.request_id == "r250"]) > 5
    assert driven.tokens == answers


def test_a_prefix_hit_answers_as_a_miss(
    loaded: LoadedModel, alone: tuple[float, dict[str, list[int]]]
) -> None:
    temperature, answers = alone
    engine = make_engine(loaded)
    drive(engine, batch_of(temperature))
    again = drive(engine, batch_of(temperature))
    assert engine.stats().cached_prefix_tokens >= 240 + 96 + 32 + 16
    assert again.tokens == answers


@TEMPERATURES
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_preempted_sequence_answers_as_an_undisturbed_one(
    loaded: LoadedModel, temperature: float, prefix_caching: bool
) -> None:
    requests = [
        make_request(f"r{n}", make_prompt(16 + n, seed=n), temperature=temperature, max_tokens=30, seed=n)
        for n in range(8)
    ]
    expected = drive(make_engine(loaded), requests).tokens
    engine = make_engine(loaded, num_blocks=20, enable_prefix_caching=prefix_caching)
    driven = drive(engine, requests)
    assert engine.stats().preemptions > 0
    assert driven.tokens == expected
    assert all(positions == list(range(30)) for positions in driven.positions.values())


def test_fragmented_blocks_answer_as_whole_ones(
    loaded: LoadedModel, alone: tuple[float, dict[str, list[int]]]
) -> None:
    temperature, answers = alone
    engine = make_engine(loaded, num_blocks=60, enable_prefix_caching=False)
    holes = [make_request(f"hole{i}", make_prompt(30, seed=i), max_tokens=2) for i in range(24)]
    for hole in holes[:8]:
        engine.reserve(hole)
    for hole in holes[0:8:2]:
        engine.abort(hole.request_id)
    whole = make_request("r250", make_prompt(250, seed=250), temperature=temperature, max_tokens=20, seed=250)
    for index in range(44):  # nothing but single free blocks and short runs are left
        engine.add(make_request(f"fill{index}", make_prompt(3, seed=index), max_tokens=1), hold=True)
    fill = Driven()
    while engine.has_work():
        fill.take(engine.step())
    for index in range(0, 44, 2):
        engine.abort(f"fill{index}")
    engine.add(whole)
    while not engine.kv_blocks("r250"):
        fill.take(engine.step())
    blocks = engine.kv_blocks("r250")
    assert sum(after != before + 1 for before, after in pairwise(blocks)) > 3
    driven = drive(engine)
    assert fill.tokens.get("r250", []) + driven.tokens["r250"] == answers["r250"]


@TEMPERATURES
@pytest.mark.parametrize("done", [1, 5, 19])
def test_a_continued_request_goes_on_where_it_was(loaded: LoadedModel, temperature: float, done: int) -> None:
    prompt = make_prompt(45)
    whole = drive(
        make_engine(loaded), [make_request("a", prompt, temperature=temperature, max_tokens=20)]
    ).tokens["a"]
    rest = make_request("a", prompt, temperature=temperature, max_tokens=20, output=tuple(whole[:done]))
    driven = drive(make_engine(loaded), [rest])
    assert driven.tokens["a"] == whole[done:]
    assert driven.positions["a"] == list(range(done, 20))


def test_top_k_and_top_p_are_reproducible_in_any_batch(loaded: LoadedModel) -> None:
    request = make_request("a", make_prompt(30), temperature=1.2, top_k=20, top_p=0.8, max_tokens=16)
    alone = drive(make_engine(loaded), [request]).tokens["a"]
    assert drive(make_engine(loaded), [*batch_of(1.0), request]).tokens["a"] == alone


def test_prefill_progress_joins_up_and_includes_the_cached_prefix(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_batched_tokens=32)
    prompt = make_prompt(100)
    first = drive(engine, [make_request("a", prompt, max_tokens=1)])
    assert [p for step in first.steps for p in step.prefilled] == [
        PrefillProgress("a", 0, 32, 0, False),
        PrefillProgress("a", 32, 32, 0, False),
        PrefillProgress("a", 64, 32, 0, False),
        PrefillProgress("a", 96, 4, 0, True),
    ]
    again = drive(engine, [make_request("b", prompt[:70] + prompt[:50], max_tokens=1)])
    assert [p for step in again.steps for p in step.prefilled] == [
        PrefillProgress("b", 0, 64 + 32, 64, False),
        PrefillProgress("b", 96, 24, 0, True),
    ]
    assert [step.num_prefill_tokens for step in again.steps] == [32, 24]


def test_finish_reasons(loaded: LoadedModel) -> None:
    prompt = make_prompt(20)
    long = drive(make_engine(loaded), [make_request("a", prompt, max_tokens=200, temperature=2.0, seed=3)])
    assert long.finished["a"] is FinishReason.LENGTH
    assert EOS_ID in long.tokens["a"], "choose a seed whose answer contains the end token"
    stopped = drive(
        make_engine(loaded),
        [make_request("a", prompt, max_tokens=200, temperature=2.0, seed=3, ignore_eos=False)],
    )
    assert stopped.finished["a"] is FinishReason.STOP
    assert stopped.tokens["a"] == long.tokens["a"][: long.tokens["a"].index(EOS_ID) + 1]
    small = make_engine(loaded, num_blocks=2)
    assert small.max_model_len == 32
    cut = drive(small, [make_request("a", prompt, max_tokens=200)])
    assert cut.finished["a"] is FinishReason.LENGTH
    assert len(cut.tokens["a"]) == 12


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            make_request("a", make_prompt(40)),
            r"request a: 40 prompt and output tokens; allowed is fewer than 32",
        ),
        (make_request("a", (5, VOCAB_SIZE)), rf"token id {VOCAB_SIZE} is outside 0 to {VOCAB_SIZE - 1}"),
        (make_request("a", (5, -1)), r"token id -1 is outside"),
        (make_request("a", (5,), output=(VOCAB_SIZE,)), rf"token id {VOCAB_SIZE} is outside"),
        (
            make_request("a", (5,), max_tokens=2, output=(6, 7)),
            r"2 tokens are generated already; max_tokens is 2",
        ),
        (make_request("taken", (5,)), r"request id taken is in use"),
    ],
)
def test_requests_that_cannot_run_are_refused(loaded: LoadedModel, request_: Request, message: str) -> None:
    engine = make_engine(loaded, num_blocks=2)
    engine.add(make_request("taken", make_prompt(4)))
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    with pytest.raises(ValueError, match=message):
        engine.reserve(request_)
    engine.check_integrity()
    assert engine.stats().waiting == 1


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_abort_frees_at_once(loaded: LoadedModel, steps: int) -> None:
    engine = make_engine(loaded, max_num_batched_tokens=32)
    engine.add(make_request("a", make_prompt(100), max_tokens=50))
    for _ in range(steps):
        engine.step()
    assert (engine.stats().held_blocks > 0) == (steps > 0)
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.check_integrity()
    assert engine.stats().held_blocks == 0
    assert not engine.has_work()


def test_an_aborted_sequence_leaves_the_others_alone(loaded: LoadedModel) -> None:
    requests = batch_of(1.0)
    expected = drive(make_engine(loaded), requests).tokens
    engine = make_engine(loaded)
    driven = Driven()
    for request in requests:
        engine.add(request)
    for _ in range(6):
        driven.take(engine.step())
    engine.abort("r33")
    rest = drive(engine)
    for name in expected.keys() - {"r33"}:
        assert driven.tokens.get(name, []) + rest.tokens.get(name, []) == expected[name]
    assert "r33" not in rest.tokens


def test_owners_and_stats_follow_a_request(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_batched_tokens=32, num_blocks=10)
    assert engine.owners() == []
    engine.add(make_request("a", make_prompt(100)))
    assert engine.stats().waiting_prompt_tokens == 100
    engine.step()
    (owner,) = engine.owners()
    assert (owner.request_id, owner.status, owner.num_blocks) == ("a", SequenceStatus.RUNNING, 7)
    stats = engine.stats()
    assert (stats.running, stats.held_blocks, stats.free_blocks, stats.total_blocks) == (1, 7, 3, 10)
    assert stats.waiting_prompt_tokens == 68
    drive(engine)
    assert engine.stats().held_blocks == 0


def test_reservations_are_counted_and_bounded(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_blocks=10)
    engine.reserve(make_request("a", make_prompt(60), max_tokens=20))
    assert len(engine.kv_blocks("a")) == 5
    assert not engine.has_work()
    assert engine.stats().reserved == 1
    with pytest.raises(NoCapacity, match="6 blocks are needed, 5 are free"):
        engine.reserve(make_request("b", make_prompt(90), max_tokens=1))
    assert engine.abort("a")
    engine.reserve(make_request("b", make_prompt(90), max_tokens=1))
    engine.check_integrity()


def test_warm_up_leaves_nothing_behind(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    engine.warm_up()
    engine.check_integrity()
    assert not engine.has_work()
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert engine.stats().cached_prefix_tokens == 0
    engine.add(make_request("a", (5,)))
    with pytest.raises(ValueError, match="without sequences"):
        engine.warm_up()


def test_an_engine_refuses_a_cache_without_room_and_a_dtype_it_was_not_given(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"engine.kv_cache_bytes is 100; allowed is 12288"):
        make_engine(loaded, num_blocks=0, kv_cache_bytes=100)
    with pytest.raises(ValueError, match=r"engine.dtype is bfloat16, but the model was loaded in float32"):
        make_engine(loaded, dtype="bfloat16")
