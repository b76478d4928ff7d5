"""Mutated transfers in the suite: a few seconds of what ``tests.transport.fuzz`` does for hours, every offset and every
bit of a small one, and proof that the fuzzer sees what it looks for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport import fuzz
from tests.transport.fuzz import (
    CODECS,
    CONTRACT,
    HONEST,
    KINDS,
    TOKENS,
    Mutation,
    ReceiverSession,
    play,
    random_session,
    recording,
)
from tests.transport.wire import FakeLink, KVMemory
from transport.errors import ChecksumError, TruncatedTransfer
from transport.frame import HEADER_BYTES, SLICE_BYTES, FrameType, decode_header
from transport.frame_reader import FrameReader
from transport.messages import FailReason
from transport.receiver_connection import ReceiverConnection

MUTATIONS = st.builds(
    Mutation,
    kind=st.integers(0, len(KINDS) - 1),
    frame=st.integers(0, 100),
    position=st.integers(0, 65535),
    value=st.integers(0, 2**32 - 1),
)
CODEC_NAMES = [codec.name for codec in CODECS]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(CODEC_NAMES), st.lists(MUTATIONS, max_size=6), st.sampled_from([1, 7, 64, 1000, 1 << 20])
)
def test_no_mutation_breaks_either_end(codec: str, mutations: list[Mutation], chunk: int) -> None:
    play(codec, mutations, chunk)


def test_a_fixed_stretch_of_the_long_run() -> None:
    rng, frames = random.Random(0), 0
    while frames < 6000:
        frames += play(*random_session(rng))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_recording_itself_completes(codec: str) -> None:
    session = ReceiverSession(recording(codec))
    session.play(b"".join(recording(codec).frames), 64, is_forged=False)
    assert session.num_completed == 2


# --- every offset, every bit ---------------------------------------------------------------------------------------


def receiver() -> FakeLink:
    link = FakeLink(CONTRACT, CODECS)
    link.destination = KVMemory(CONTRACT, TOKENS)
    return link


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_transfer_that_ends_at_any_byte_is_truncated(codec: str) -> None:
    """Byte by byte into one receiver per offset would be quadratic: one receiver, asked at every offset."""
    stream = b"".join(
        frame for frame in recording(codec).frames if decode_header(frame[:HEADER_BYTES]).transfer_id == 1
    )
    link = receiver()
    link.receiver.receive_eof()  # before the first byte nothing is missing
    for offset in range(len(stream)):
        if offset:
            with pytest.raises(TruncatedTransfer):
                link.receiver.receive_eof()
        link.deliver(stream[offset : offset + 1])
    link.receiver.receive_eof()
    assert len(link.completed) == 1


def test_an_end_at_any_byte_frees_the_blocks() -> None:
    stream = b"".join(
        frame for frame in recording("raw").frames if decode_header(frame[:HEADER_BYTES]).transfer_id == 1
    )
    for offset in range(1, len(stream), 3):
        link = receiver()
        link.deliver(stream[:offset])
        link.receiver.connection_lost(FailReason.TRUNCATED, TruncatedTransfer("the end"), link.now)
        link.answer()
        assert link.completed == []
        assert len(link.failures) == len(link.asked)
        assert link.destination is not None
        assert link.destination.is_free()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_every_flipped_bit_of_a_payload_is_found(codec: str) -> None:
    frames = [
        frame for frame in recording(codec).frames if decode_header(frame[:HEADER_BYTES]).transfer_id == 1
    ]
    position = next(
        at for at, frame in enumerate(frames) if decode_header(frame[:HEADER_BYTES]).type is FrameType.DATA
    )
    before, data = b"".join(frames[:position]), frames[position]
    for bit in range(8 * (HEADER_BYTES + SLICE_BYTES), 8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        link = receiver()
        link.deliver(before + bytes(damaged))
        (failure,) = link.failures
        assert failure.reason is FailReason.CHECKSUM
        assert isinstance(failure.error, ChecksumError)
        assert link.destination is not None
        assert link.destination.is_free()


# --- the fuzzer sees what it looks for -----------------------------------------------------------------------------


def find(num_sessions: int = 400) -> str:
    """The first finding of honest damage."""
    rng = random.Random(3)
    for _ in range(num_sessions):
        kind = rng.randrange(len(HONEST))
        mutation = Mutation(kind, rng.randrange(100), rng.randrange(65536), rng.randrange(2**32))
        try:
            play("raw", [mutation], 1 << 20)
        except AssertionError as error:
            return str(error)
    return ""


def test_nothing_is_found_without_a_fault() -> None:
    assert find() == ""


def test_a_checksum_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FrameReader._frame_arrived

    def believed(reader: FrameReader, header: object) -> object:
        arrived = whole(reader, header)  # type: ignore[arg-type]
        return type(arrived)(arrived.header, arrived.payload, True)

    monkeypatch.setattr(FrameReader, "_frame_arrived", believed)
    assert "completed with wrong bytes" in find()


def test_a_view_that_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameReader, "discard_rest", lambda reader: None)
    assert "a view of a block is held" in find()


def test_a_transfer_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReceiverConnection, "connection_lost", lambda *_: None)
    assert "never ended" in find()


def test_a_session_reports_what_it_did_not_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for codec in CODEC_NAMES:
        recording(codec)  # undisturbed

    monkeypatch.setattr(ReceiverConnection, "_committed", fail)
    record = fuzz.run(2000, seed=1)
    assert str(record["findings"]).count("ZeroDivisionError") == 10
