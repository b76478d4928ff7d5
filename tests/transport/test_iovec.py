"""Views as one long buffer, against the plain bytes."""

import array
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.iovec import MAX_IOV, IoVec, split_views, total_bytes

PIECES = st.lists(st.binary(max_size=9), max_size=12)


@given(PIECES, st.lists(st.integers(0, 20), max_size=40))
def test_any_steps_pass_every_byte_once_and_in_order(pieces: list[bytes], steps: list[int]) -> None:
    whole, passed = b"".join(pieces), b""
    vector = IoVec(pieces)
    assert vector.num_bytes == len(whole)
    for step in steps:
        step = min(step, vector.remaining_bytes)
        assert b"".join(vector.head()) == whole[len(passed) :]
        views = vector.advance(step)
        assert all(view.nbytes for view in views)
        assert total_bytes(views) == step
        passed += b"".join(views)
        assert vector.remaining_bytes == len(whole) - len(passed)
    assert passed == whole[: len(passed)]


@given(PIECES, st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=40))
def test_a_head_of_at_most_so_many_bytes(pieces: list[bytes], steps: list[tuple[int, int]]) -> None:
    rest = b"".join(pieces)
    vector = IoVec(pieces)
    for most_bytes, step in steps:
        assert b"".join(vector.head(most_bytes)) == rest[:most_bytes]
        step = min(step, len(rest))
        vector.skip(step)
        rest = rest[step:]
        assert vector.remaining_bytes == len(rest)
        assert b"".join(vector.head()) == rest


@given(PIECES, st.data())
def test_splitting_gives_consecutive_pieces(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    bounds = [0, *cuts, len(whole)]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    parts = split_views(map(memoryview, pieces), sizes)
    assert [b"".join(part) for part in parts] == [
        whole[start:end] for start, end in itertools.pairwise(bounds)
    ]


def test_too_much_is_refused() -> None:
    vector = IoVec([b"abc"])
    with pytest.raises(ValueError, match="advance by 4 bytes; allowed is at most 3"):
        vector.advance(4)
    with pytest.raises(ValueError, match="skip of 4 bytes; allowed is at most 3"):
        vector.skip(4)
    with pytest.raises(ValueError, match="1 bytes are left over"):
        split_views([memoryview(b"abc")], [2])


def test_one_call_of_the_kernel_gets_so_many_views() -> None:
    vector = IoVec([b"ab"] * (MAX_IOV + 5))
    assert len(vector.head()) == MAX_IOV
    vector.advance(2 * MAX_IOV + 1)
    assert b"".join(vector.head()) == b"b" + b"ab" * 4


def test_what_is_not_bytes_is_taken_as_bytes() -> None:
    numbers = array.array("H", [1, 2, 3])
    vector = IoVec([memoryview(numbers), bytearray(b"xy")])
    assert vector.num_bytes == 8
    assert b"".join(vector.advance(8)) == numbers.tobytes() + b"xy"
