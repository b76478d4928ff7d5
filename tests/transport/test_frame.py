import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ChecksumError, FramingError, ProtocolError, TruncatedTransfer
from transport.frame import (
    HEADER_BYTES,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_DATA_PAYLOAD_BYTES,
    NEED_DATA,
    DataSlice,
    Frame,
    FrameDecoder,
    FrameHeader,
    FrameType,
    decode_header,
    decode_slice,
    encode_frame,
    encode_header,
    encode_slice,
    payload_checksum,
)

frames = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    transfer_id=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
    flags=st.integers(0, 2**16 - 1),
)


def decode_all(decoder: FrameDecoder) -> list[Frame]:
    decoded = []
    while isinstance(frame := decoder.next_frame(), Frame):
        decoded.append(frame)
    return decoded


def resign(header: bytes) -> bytes:
    """Gives a changed header a right checksum again."""
    return header[:28] + struct.pack("!I", xxhash.xxh3_64_intdigest(header[:28]) & 0xFFFFFFFF)


@given(st.lists(frames, max_size=4), st.integers(1, 400))
def test_frames_survive_any_cutting_of_the_stream(sent: list[Frame], chunk: int) -> None:
    stream = b"".join(encode_frame(frame) for frame in sent)
    decoder = FrameDecoder()
    received = []
    for start in range(0, len(stream), chunk):
        decoder.receive_data(stream[start : start + chunk])
        received += decode_all(decoder)
    assert received == sent
    decoder.receive_eof()


def test_trailing_data_of_the_next_frame_waits() -> None:
    first, second = Frame(FrameType.PING, 1, b"abc"), Frame(FrameType.PONG, 2, b"defg")
    decoder = FrameDecoder()
    decoder.receive_data(encode_frame(first) + encode_frame(second)[:-1])
    assert decoder.next_frame() == first
    assert decoder.next_frame() is NEED_DATA
    decoder.receive_data(encode_frame(second)[-1:])
    assert decoder.next_frame() == second


@given(frames, st.data())
def test_any_flipped_bit_is_an_error_and_never_another_frame(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(encode_frame(frame))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    decoder = FrameDecoder()
    decoder.receive_data(damaged)
    with pytest.raises(FramingError if bit < 8 * HEADER_BYTES else ChecksumError):
        decoder.next_frame()


def test_a_damaged_payload_costs_one_frame_only() -> None:
    damaged = bytearray(encode_frame(Frame(FrameType.PING, 1, b"abc")))
    damaged[-1] ^= 1
    decoder = FrameDecoder()
    decoder.receive_data(damaged + encode_frame(Frame(FrameType.PING, 2, b"abc")))
    with pytest.raises(ChecksumError, match="transfer 1"):
        decoder.next_frame()
    assert decoder.next_frame() == Frame(FrameType.PING, 2, b"abc")


def test_after_a_framing_error_nothing_more_is_believed() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + encode_frame(Frame(FrameType.PING, 2))
    )
    for _ in range(2):
        with pytest.raises(FramingError, match="GET"):
            decoder.next_frame()


@pytest.mark.parametrize("num_bytes", range(1, HEADER_BYTES + 5))
def test_a_stream_that_ends_inside_a_frame_is_truncated(num_bytes: int) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(encode_frame(Frame(FrameType.PING, 1, b"12345"))[:num_bytes])
    assert decoder.next_frame() is NEED_DATA
    with pytest.raises(TruncatedTransfer):
        decoder.receive_eof()


@pytest.mark.parametrize(
    ("position", "value", "complaint"),
    [
        (0, 0x51, "QDKV"),
        (4, 9, "version is 9; ours is 1"),
        (5, 99, "frame type 99"),
        (16, 0x7F, "at most 65536"),
    ],
)
def test_header_faults_are_named_even_when_well_signed(position: int, value: int, complaint: str) -> None:
    header = bytearray(encode_header(FrameHeader(FrameType.OPEN, 1, 0, 0)))
    header[position] = value
    with pytest.raises(FramingError, match=complaint):
        decode_header(resign(bytes(header)))


def test_payload_limits_hold_at_both_ends() -> None:
    assert decode_header(encode_header(FrameHeader(FrameType.DATA, 1, MAX_DATA_PAYLOAD_BYTES, 0)))
    with pytest.raises(ProtocolError, match="DATA payload is"):
        encode_header(FrameHeader(FrameType.DATA, 1, MAX_DATA_PAYLOAD_BYTES + 1, 0))
    with pytest.raises(ProtocolError, match="OPEN payload is"):
        encode_header(FrameHeader(FrameType.OPEN, 1, MAX_CONTROL_PAYLOAD_BYTES + 1, 0))


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_slices_round_trip(layer: int, kv: int, start: int, count: int) -> None:
    part = DataSlice(layer, kv, start, count)
    assert decode_slice(encode_slice(part)) == part


def test_the_wire_format_is_what_it_was() -> None:
    """Bytes written down once: a change here is a new protocol version."""
    frame = encode_frame(Frame(FrameType.DATA, 0x0102030405060708, b"\x00" * 16 + b"kv", 3))
    assert frame[:20].hex() == "50444b5601130003010203040506070800000012"
    assert frame[20:28] == struct.pack("!Q", payload_checksum([b"\x00" * 16, b"kv"]))
    assert len(frame) == HEADER_BYTES + 18
