"""The handoff between two real engines over real sockets: same tokens, same bytes, nothing held afterwards."""

import threading

import pytest

from cluster.control import DecodeAdopted, HandoffFailed, PrefillDone, RequestError
from cluster.events import DecodeAdmitted, PrefillFinished, TransferCompleted, TransferStarted
from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import NewToken
from engine.request import Request, SamplingParams
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair, kv_bytes

CONFIG = EngineConfig(num_blocks=80, dtype="float32", max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPT = tuple((7 * n) % 256 for n in range(203))  # not a multiple of the block size
SAMPLINGS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


def undisturbed(loaded: LoadedModel, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    engine = Engine(CONFIG, loaded)
    engine.add(Request("r", prompt, sampling))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for token in engine.step().new_tokens]
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("path", ["v1", "v2"])
@pytest.mark.parametrize("open_first", [True, False])
def test_tokens_equal_one_engine_alone(
    loaded: LoadedModel, sampling: SamplingParams, path: str, open_first: bool
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        if open_first:  # its StartDecode comes when the prompt is computed and the OPEN waits
            pair.start_prefill(PROMPT, sampling, path=path)
            pair.prefill.said.wait_message(PrefillDone)
            pair.start_decode(PROMPT, sampling)
        else:
            pair.start_decode(PROMPT, sampling)
            pair.start_prefill(PROMPT, sampling, path=path)
        assert pair.decode.said.finished_tokens() == undisturbed(loaded, sampling)
        completed = pair.prefill.said.wait_message(TransferCompleted)
        token_bytes = loaded.config.kv_bytes_per_token("float32")
        assert completed.wire_bytes == completed.raw_bytes == len(PROMPT) * token_bytes
        assert pair.prefill.said.of(TransferStarted)[0].raw_bytes == completed.raw_bytes
        assert pair.prefill.said.of(PrefillFinished)[0].prompt_tokens == len(PROMPT)
        adopted = pair.decode.said.of(DecodeAdopted)[0]
        assert adopted.verified_at <= adopted.admitted_at
        assert pair.decode.said.of(DecodeAdmitted)
        pair.prefill.wait_until_free()
        pair.decode.wait_until_free()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_received_kv_is_bitwise_what_prefill_computed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, staged: bool, codec: str
) -> None:
    seen: dict[str, bytes] = {}
    with HandoffPair(loaded, CONFIG, staged=staged) as pair:
        first_token, completed = pair.prefill.prefill.first_token, pair.decode.decode.completed

        def on_first_token(token: NewToken, now: float) -> None:
            seen["sent"] = kv_bytes(pair.prefill.engine, "r", len(PROMPT))
            first_token(token, now)

        def on_completed(header, commit, verified_at):  # type: ignore[no-untyped-def]
            is_admitted = completed(header, commit, verified_at)
            seen["received"] = kv_bytes(pair.decode.engine, "r", len(PROMPT))
            return is_admitted

        monkeypatch.setattr(pair.prefill.prefill, "first_token", on_first_token)
        monkeypatch.setattr(pair.decode.decode, "completed", on_completed)
        pair.start_decode(PROMPT, SAMPLINGS[0])
        pair.start_prefill(PROMPT, SAMPLINGS[0], codec=codec)
        pair.decode.said.finished_tokens()
    assert len(seen["sent"]) == len(PROMPT) * loaded.config.kv_bytes_per_token("float32")
    assert seen["sent"] == seen["received"]


def test_int8_moves_fewer_bytes_and_still_decodes(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_decode(PROMPT, SAMPLINGS[0])
        pair.start_prefill(PROMPT, SAMPLINGS[0], codec="int8")
        assert len(pair.decode.said.finished_tokens()) == 24
        completed = pair.prefill.said.wait_message(TransferCompleted)
        head_dim = loaded.config.head_dim
        assert completed.wire_bytes == completed.raw_bytes * (head_dim + 2) // (4 * head_dim)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_only_exact_kv_is_kept_for_other_requests(loaded: LoadedModel, codec: str) -> None:
    caching = EngineConfig(num_blocks=80, dtype="float32", max_num_batched_tokens=64)
    with HandoffPair(loaded, caching) as pair:
        pair.start_decode(PROMPT, SAMPLINGS[0], request_id="first")
        pair.start_prefill(PROMPT, SAMPLINGS[0], request_id="first", codec=codec)
        pair.decode.said.finished_tokens("first")
        pair.start_local(PROMPT, SAMPLINGS[0])
        assert pair.decode.said.finished_tokens() == undisturbed(loaded, SAMPLINGS[0])
        computed = [e for e in pair.decode.said.of(PrefillFinished) if e.request_id == "r"]
        assert [e.cached_tokens > 0 for e in computed] == [codec == "raw"]


def test_first_token_that_ends_the_request_ends_it(loaded: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=1)
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_decode(PROMPT, sampling)
        pair.start_prefill(PROMPT, sampling)
        assert len(pair.decode.said.finished_tokens()) == 1
        pair.prefill.wait_until_free()
        pair.decode.wait_until_free()


def test_full_decode_worker_rejects_before_prefill_computes(loaded: LoadedModel) -> None:
    small = EngineConfig(num_blocks=8, dtype="float32", max_num_batched_tokens=64)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    with HandoffPair(loaded, CONFIG, small) as pair:
        pair.start_decode(tuple(range(60)), sampling, request_id="first")
        pair.start_prefill(tuple(range(60)), sampling, request_id="first")
        pair.decode.said.wait_for(lambda: bool(pair.decode.said.tokens("first")))
        pair.start_decode(tuple(range(60)), sampling, request_id="second")
        pair.start_prefill(tuple(range(60)), sampling, request_id="second")
        failed = pair.decode.said.wait_message(HandoffFailed)
        assert (failed.request_id, failed.reason) == ("second", "decode_full")
        assert pair.prefill.said.wait_message(HandoffFailed).reason == "decode_full"
        assert len(pair.decode.said.finished_tokens("first")) == 60
        pair.prefill.wait_until_free()
        pair.decode.wait_until_free()


@pytest.mark.parametrize("staged", [False, True])
def test_abort_frees_both_sides_in_every_phase(loaded: LoadedModel, staged: bool) -> None:
    sampling = SAMPLINGS[0]
    with HandoffPair(loaded, CONFIG, staged=staged) as pair:
        for attempt, phase in enumerate(("before open", "prefill", "decode"), start=1):
            gate = threading.Event()
            pair.prefill.thread.post(lambda gate=gate: gate.wait(30))  # type: ignore[misc]  # holds prefill at its start
            pair.start_decode(PROMPT, sampling, attempt=attempt)
            pair.start_prefill(PROMPT, sampling, attempt=attempt)
            if phase == "before open":
                pair.abort(attempt)
                gate.set()
            elif phase == "prefill":
                gate.set()
                pair.abort(attempt)
            else:
                gate.set()
                pair.decode.said.wait_for(
                    lambda attempt=attempt: any(t.attempt == attempt for t in pair.decode.said.tokens())
                )
                pair.abort(attempt)
            pair.prefill.wait_until_free()
            pair.decode.wait_until_free()
            assert not pair.prefill.ask(lambda: dict(pair.prefill.prefill.jobs))
            assert not pair.decode.ask(lambda: dict(pair.decode.decode.jobs))
            for side in (pair.prefill, pair.decode):
                assert side.staging is None or side.staging.num_held_bytes == 0


def test_prefill_gone_mid_way_is_reported_and_frees_the_reservation(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        gate = threading.Event()
        pair.start_decode(PROMPT, SAMPLINGS[0])
        pair.start_prefill(PROMPT, SAMPLINGS[0])
        pair.prefill.thread.post(lambda: gate.wait(30))
        pair.decode.said.wait_for(lambda: True)
        for sender in list(pair.prefill.kv._senders.values()):
            sender.close()
        gate.set()
        pair.decode.said.wait_for(
            lambda: bool(pair.decode.said.of(HandoffFailed) or pair.decode.said.of(DecodeAdopted))
        )
        pair.abort()
        pair.decode.wait_until_free()
        pair.prefill.wait_until_free()
        # the same request as a fallback, on the same worker
        pair.start_local(PROMPT, SAMPLINGS[0], attempt=2)
        pair.decode.said.wait_for(
            lambda: any(t.finish_reason and t.attempt == 2 for t in pair.decode.said.tokens())
        )
        tokens = [t.token_id for t in pair.decode.said.tokens() if t.attempt == 2]
        assert tokens == undisturbed(loaded, SAMPLINGS[0])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_a_continued_request_goes_on_exactly(loaded: LoadedModel, sampling: SamplingParams) -> None:
    whole = undisturbed(loaded, sampling)
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_local(PROMPT, sampling, outputs=tuple(whole[:9]))
        assert pair.decode.said.finished_tokens() == whole[9:]
        assert pair.decode.said.tokens()[0].position == 9


def test_impossible_request_is_an_error_not_a_crash(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_local((99999,), SAMPLINGS[0])
        assert "99999" in pair.decode.said.wait_message(RequestError).reason
