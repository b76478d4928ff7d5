import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transport.codec import Codec, RawCodec, RowShape, find_codec
from transport.errors import ProtocolError, UnknownCodec
from transport.int8_codec import Int8Codec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODECS: list[Codec] = [RawCodec(), Int8Codec()]
# the largest error that storing a value of size 1 in the dtype can add
STORED_ERROR = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker; more threads only wait for each other on tiles of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def through(codec: Codec, values: torch.Tensor, run_rows: int) -> tuple[torch.Tensor, bytes]:
    """Encodes (rows, D) values lying in runs of some rows, decodes into the same kind of runs."""
    shape = RowShape(values.shape[0], values.shape[1], str(values.dtype).removeprefix("torch."))
    stored = bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())
    row_bytes = shape.raw_bytes // shape.num_rows
    bounds = [*range(0, len(stored), run_rows * row_bytes), len(stored)]
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1]))
    num_bytes = codec.encode([memoryview(stored)[a:b] for a, b in itertools.pairwise(bounds)], shape, wire)
    back = bytearray(len(stored))
    views = [memoryview(back)[a:b] for a, b in itertools.pairwise(bounds)]
    codec.decode(wire[:num_bytes], shape, views)
    return torch.frombuffer(back, dtype=values.dtype).view(values.shape), bytes(wire[:num_bytes])


def assert_within_bound(values: torch.Tensor, back: torch.Tensor) -> None:
    x, y = values.double(), back.double()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=float(torch.finfo(torch.float32).tiny))
    name = str(values.dtype).removeprefix("torch.")
    smallest = torch.finfo(values.dtype).smallest_normal * 2.0**-7
    bound = 0.5001 * scale + STORED_ERROR[name] * (y.abs() + scale) + smallest
    assert ((x - y).abs() <= bound).all(), ((x - y).abs() - bound).max()


@given(
    st.sampled_from(list(DTYPES)),
    st.integers(1, 40),
    st.sampled_from([1, 3, 8, 64]),
    st.integers(1, 7),
    st.integers(0, 2**32 - 1),
    st.integers(-30, 30),
)
def test_int8_error_stays_within_its_bound(
    dtype: str, rows: int, head_dim: int, run_rows: int, seed: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, head_dim), generator=generator) * 2.0**exponent
    # rows of very different size, and single large elements
    values *= 10 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    values[:, 0] *= 50
    limit = torch.finfo(DTYPES[dtype]).max / 2
    stored = values.clamp(-limit, limit).to(DTYPES[dtype])
    back, wire = through(Int8Codec(), stored, run_rows)
    assert_within_bound(stored, back)
    assert len(wire) == rows * (head_dim + 4)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_int8_holds_its_bound_for_any_four_floats(row: list[float]) -> None:
    values = torch.tensor([row], dtype=torch.float32)
    back, _ = through(Int8Codec(), values, 1)
    assert_within_bound(values, back)


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 3000])
def test_int8_tiles_and_runs_meet_in_any_way(rows: int) -> None:
    values = torch.randn((rows, 64), generator=torch.Generator().manual_seed(rows)).bfloat16()
    whole, wire = through(Int8Codec(), values, rows)
    for run_rows in (16, 48, 1024):
        back, again = through(Int8Codec(), values, run_rows)
        assert again == wire
        assert torch.equal(back, whole)
    assert_within_bound(values, whole)


def test_int8_keeps_zeros_and_the_largest_element_of_a_row() -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, -127.0, 64.0], [1e-38, 0.0, -1e-38]])
    back, _ = through(Int8Codec(), values, 3)
    assert torch.equal(back[:2], values[:2])
    assert_within_bound(values, back)


def test_int8_of_a_row_that_is_not_finite_is_not_finite() -> None:
    values = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [3.0, 4.0]])
    back, _ = through(Int8Codec(), values, 1)
    assert not back[:2].isfinite().any()
    assert back[2].isfinite().all()


def test_int8_is_about_half_of_bfloat16() -> None:
    shape = RowShape(1000, 64, "bfloat16")
    assert Int8Codec().wire_bytes_range(shape) == (68_000, 68_000)
    assert 68_000 / shape.raw_bytes == pytest.approx(0.53, abs=0.002)


@given(st.binary(min_size=1, max_size=100))
def test_raw_is_bitwise(content: bytes) -> None:
    values = (
        torch.from_numpy(np.frombuffer(content * 4, dtype=np.uint8).copy()).view(torch.float32).view(-1, 1)
    )
    back, wire = through(RawCodec(), values, 3)
    assert wire == content * 4
    assert back.numpy().tobytes() == content * 4


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_views_that_do_not_add_up_are_refused(codec: Codec) -> None:
    shape = RowShape(4, 8, "float32")
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1]))
    views = [memoryview(bytearray(64))]
    for act in (lambda: codec.encode(views, shape, wire), lambda: codec.decode(wire, shape, views)):
        with pytest.raises(ProtocolError, match="128 bytes; the views hold 64"):
            act()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("extra", [-1, 1])
def test_wire_bytes_of_another_length_are_refused(codec: Codec, extra: int) -> None:
    shape = RowShape(4, 8, "float32")
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1] + extra))
    with pytest.raises(ProtocolError, match="due are"):
        codec.decode(wire, shape, [memoryview(bytearray(128))])


def test_an_unknown_codec_is_named_with_the_allowed_ones() -> None:
    with pytest.raises(UnknownCodec, match="codec is 'zip'; allowed here: raw, int8"):
        find_codec("zip", CODECS)
    assert find_codec("int8", CODECS).name == "int8"
