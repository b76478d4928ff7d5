"""What a peer may write into a lossless frame without meaning well: each is refused by name, and makes no room."""

import contextlib
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.codec import RowShape
from transport.errors import CompressionError, ProtocolError
from transport.lossless_codec import LosslessCodec

SHAPE = RowShape(64, 64, "bfloat16")
PLANE = SHAPE.raw_bytes // 2
LOW = bytes(PLANE)


def decode(compressed: bytes, shape: RowShape = SHAPE) -> bytearray:
    room = bytearray(shape.raw_bytes)
    wire = bytes(shape.raw_bytes // 2) + compressed
    LosslessCodec().decode(memoryview(wire), shape, [memoryview(room)])
    return room


def frame(content: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)  # type: ignore[arg-type]


def states(num_bytes: int) -> bytes:
    """The head of a frame of one segment that states so many bytes, with one raw block of four."""
    return b"\x28\xb5\x2f\xfd\xe0" + num_bytes.to_bytes(8, "little") + b"\x21\x00\x00abcd"


def test_a_good_frame_is_taken() -> None:
    assert decode(frame(b"\x3f" * PLANE))[1::2] == b"\x3f" * PLANE


@pytest.mark.parametrize(
    ("compressed", "words"),
    [
        (frame(bytes(PLANE - 1)), "states 4095; due are 4096"),
        (frame(bytes(PLANE + 1)), "states 4097; due are 4096"),
        (frame(bytes(1 << 24)), "states 16777216; due are 4096"),
        (states(1 << 62), "states 4611686018427387904; due are 4096"),
        (frame(bytes(PLANE), write_content_size=False), "states no size"),
        (states(PLANE), "damaged"),
        (frame(bytes(PLANE)) + b"more", "damaged|holds"),
        (frame(bytes(PLANE)) * 2, "damaged|holds"),
        (frame(bytes(PLANE))[:-1], "damaged|holds"),
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", "states|damaged"),  # a frame to be skipped
        (b"not compressed at all", "damaged"),
        (b"\x28", "damaged"),
    ],
    ids=[
        "less",
        "more",
        "much more",
        "absurdly much",
        "unstated",
        "cut",
        "extra bytes",
        "two frames",
        "no end",
        "to be skipped",
        "text",
        "one byte",
    ],
)
def test_a_frame_that_is_not_what_is_due_is_refused(compressed: bytes, words: str) -> None:
    with pytest.raises(CompressionError, match=words):
        decode(compressed)


def test_a_window_larger_than_the_content_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    writer = compressor.compressobj(size=PLANE)
    compressed = bytearray(writer.compress(bytes(PLANE)) + writer.flush())
    # without "single segment" the window stands on its own: 2**27 bytes
    assert compressed[4] & 0x20, (
        "the compressor no longer joins window and content; build the frame otherwise"
    )
    size = {0: 1, 1: 2, 2: 4, 3: 8}[compressed[4] >> 6]
    content_size = int.from_bytes(compressed[5 : 5 + size], "little") + (256 if size == 2 else 0)
    head = bytes([0x80, (27 - 10) << 3]) + content_size.to_bytes(4, "little")
    wide = bytes(compressed[:4]) + head + bytes(compressed[5 + size :])
    assert zstandard.get_frame_parameters(wide).window_size == 1 << 27
    with pytest.raises(CompressionError, match="window of 134217728 bytes"):
        decode(wide)


def test_a_bomb_makes_no_room() -> None:
    bomb = frame(bytes(1 << 28))
    assert len(bomb) < PLANE * 8
    shape = RowShape(64 * 8, 64, "bfloat16")
    tracemalloc.start()
    try:
        with pytest.raises(CompressionError):
            decode(bomb, shape)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * shape.raw_bytes


@settings(deadline=None)  # the first example may compile
@given(st.binary(min_size=1, max_size=PLANE - 1))
def test_any_bytes_are_refused_or_taken_whole(compressed: bytes) -> None:
    try:
        decode(compressed)
    except CompressionError:
        return
    assert zstandard.get_frame_parameters(compressed).content_size == PLANE


@settings(deadline=None)  # the first example may compile
@given(st.data())
def test_a_damaged_frame_is_refused_or_of_the_right_size(data: st.DataObject) -> None:
    good = bytearray(frame(bytes(range(256)) * (PLANE // 256)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CompressionError):
        decode(bytes(good))


@pytest.mark.parametrize("num_bytes", [0, PLANE, 2 * PLANE + 1])
def test_a_length_that_cannot_be_is_refused(num_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"came as {num_bytes} bytes; due are 4097 to 8192"):
        LosslessCodec().decode(memoryview(bytes(num_bytes)), SHAPE, [memoryview(bytearray(2 * PLANE))])
