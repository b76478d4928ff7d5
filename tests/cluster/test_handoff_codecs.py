"""Codecs in the handoff between two real engines: what is exact stays exact, and the worker says why it chose."""

import pytest

from cluster.events import TransferCompleted, TransferStarted
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.weights import LoadedModel, load_model
from tests.cluster.handoff_pair import HandoffPair
from transport.codec_choice import CodecRate

CONFIG = EngineConfig(num_blocks=80, dtype="float32", max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPT = tuple((7 * n) % 256 for n in range(203))
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
RATES = {"int8": CodecRate(5e9, 6e9, 0.52, is_lossy=True), "lossless": CodecRate(0.6e9, 1.8e9, 0.68)}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("synthetic:nano", "float32")


@pytest.fixture(scope="module")
def undisturbed(loaded: LoadedModel) -> list[int]:
    engine = Engine(CONFIG, loaded)
    engine.add(Request("r", PROMPT, SAMPLING))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for token in engine.step().new_tokens]
    return tokens


@pytest.mark.parametrize("path", ["v1", "v2"])
def test_lossless_moves_fewer_bytes_and_changes_no_token(
    loaded: LoadedModel, undisturbed: list[int], path: str
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        pair.start_decode(PROMPT, SAMPLING)
        pair.start_prefill(PROMPT, SAMPLING, codec="lossless", path=path)
        assert pair.decode.said.finished_tokens() == undisturbed
        completed = pair.prefill.said.wait_message(TransferCompleted)
        assert completed.codec == "lossless"
        assert 0.7 < completed.wire_bytes / completed.raw_bytes < 0.95


@pytest.mark.parametrize(
    ("asked", "bytes_per_s", "codec"),
    [
        ("auto", 12.5e6, "lossless"),
        ("auto", 1e11, "raw"),
        ("lossless", 1e11, "raw"),
        ("lossless", 12.5e6, "lossless"),
    ],
)
def test_the_worker_chooses_by_the_measured_link_and_says_why(
    loaded: LoadedModel,
    undisturbed: list[int],
    asked: str,
    bytes_per_s: float,
    codec: str,
) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        selector = pair.prefill.kv.codec_selector
        selector.codecs_measured(RATES)
        selector.link_measured(pair.decode.kv.address, bytes_per_s)
        pair.start_decode(PROMPT, SAMPLING)
        pair.start_prefill(PROMPT, SAMPLING, codec=asked)
        assert pair.decode.said.finished_tokens() == undisturbed
        completed = pair.prefill.said.wait_message(TransferCompleted)
        started = pair.prefill.said.wait_message(TransferStarted)
        assert started.codec == completed.codec == codec
        assert started.codec_reason.startswith(f"estimated {codec} ")
        assert ("int8 may lose and is not allowed" in started.codec_reason) == (asked == "auto")


def test_a_codec_asked_for_by_name_needs_no_reason(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        pair.prefill.kv.measure_codecs()
        pair.start_decode(PROMPT, SAMPLING)
        pair.start_prefill(PROMPT, SAMPLING, codec="int8")
        pair.decode.said.finished_tokens()
        started = pair.prefill.said.wait_message(TransferStarted)
        assert (started.codec, started.codec_reason) == ("int8", "")


def test_a_worker_measures_every_codec_that_does_something(loaded: LoadedModel) -> None:
    with HandoffPair(loaded, CONFIG) as pair:
        kv = pair.prefill.kv
        address = pair.decode.kv.address
        kv.codec_selector.link_measured(address, 1e6)
        assert kv.codec_selector.choose("auto", address, 10**7).codec == "raw"
        kv.measure_codecs()
        choice = kv.codec_selector.choose("auto", address, 10**7)
        assert choice.codec == "lossless"
        assert "int8 may lose" in choice.reason
