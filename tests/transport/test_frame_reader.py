import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import FramingError
from transport.frame import (
    SLICE_BYTES,
    DataSlice,
    Frame,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_header,
    encode_slice,
)
from transport.frame_reader import FrameArrived, FrameReader, SliceArrived

PART = DataSlice(1, 0, 4, 2)


def feed(reader: FrameReader, data: bytes, views: list[memoryview] | None = None) -> list[object]:
    """Gives the reader its bytes; DATA goes into ``views`` if there are any, else to waste."""
    arrived: list[object] = []
    while data:
        target = reader.buffers()[0]
        size = min(target.nbytes, len(data))
        target[:size] = data[:size]
        data = data[size:]
        event = reader.received(size)
        if isinstance(event, SliceArrived) and views is not None:
            reader.direct(views)
        if event is not None:
            arrived.append(event)
    return arrived


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_data_lands_in_the_given_views_and_nowhere_else(payload: bytes, chunks: list[int]) -> None:
    cuts = [payload[start : start + 7] for start in range(0, len(payload), 7)]
    places = [bytearray(len(cut) + 2) for cut in cuts]
    views = [memoryview(place)[1:-1] for place in places]
    stream = encode_frame(Frame(FrameType.DATA, 5, encode_slice(PART) + payload))
    stream += encode_frame(Frame(FrameType.COMMIT, 5, b"the end"))
    reader, arrived, position = FrameReader(), [], 0
    while position < len(stream):
        size = chunks[position % len(chunks)]
        arrived += feed(reader, stream[position : position + size], views)
        position += size
    began, whole, commit = arrived
    assert isinstance(began, SliceArrived)
    assert (began.part, began.wire_bytes) == (PART, len(payload))
    assert isinstance(whole, FrameArrived)
    assert whole.is_intact
    assert isinstance(commit, FrameArrived)
    assert (commit.payload, commit.is_intact) == (b"the end", True)
    assert [bytes(place) for place in places] == [b"\0" + cut + b"\0" for cut in cuts]
    assert not reader.is_inside_frame


@given(st.data())
def test_a_flipped_payload_bit_is_seen(data: st.DataObject) -> None:
    stream = bytearray(encode_frame(Frame(FrameType.DATA, 5, encode_slice(PART) + b"payload")))
    bit = data.draw(st.integers(8 * 32, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    *_, whole = feed(FrameReader(), bytes(stream), [memoryview(bytearray(7))])
    assert isinstance(whole, FrameArrived)
    assert not whole.is_intact


def test_discarding_lets_go_of_the_views_and_keeps_the_framing() -> None:
    memory = bytearray(100)
    stream = encode_frame(Frame(FrameType.DATA, 5, encode_slice(PART) + b"x" * 100))
    reader = FrameReader()
    feed(reader, stream[:-60], [memoryview(memory)])
    reader.discard_rest()
    assert memory == b"x" * 40 + bytes(60)
    memory.append(0)  # a BufferError if the reader still had a view
    *_, ping = feed(reader, stream[-60:] + encode_frame(Frame(FrameType.PING, 6, b"y" * 500_000)))
    assert isinstance(ping, FrameArrived)
    assert ping.header.type is FrameType.PING
    assert ping.is_intact
    assert bytes(memory) == b"x" * 40 + bytes(61)


def test_views_of_the_wrong_size_are_refused() -> None:
    reader = FrameReader()
    with pytest.raises(ValueError, match="the views hold 3 bytes; the frame has 4"):
        feed(
            reader,
            encode_frame(Frame(FrameType.DATA, 5, encode_slice(PART) + b"1234")),
            [memoryview(bytearray(3))],
        )


def test_data_without_data_is_a_framing_error() -> None:
    with pytest.raises(FramingError, match="allowed is above 16"):
        feed(FrameReader(), encode_header(FrameHeader(FrameType.DATA, 1, SLICE_BYTES, 0)))


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 32, 47, 48, 50])
def test_it_knows_when_it_is_inside_a_frame(num_bytes: int) -> None:
    stream = encode_frame(Frame(FrameType.DATA, 5, encode_slice(PART) + b"1234"))
    reader = FrameReader()
    feed(reader, stream[:num_bytes])
    assert reader.is_inside_frame == (num_bytes > 0)
