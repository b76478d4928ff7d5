import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.codec import Codec, RawCodec, RowShape, find_codec
from transport.codec_rates import measure_codec
from transport.errors import ProtocolError, UnknownCodec
from transport.int8_codec import Int8Codec
from transport.lossless_codec import LosslessCodec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODECS: list[Codec] = [RawCodec(), Int8Codec(), LosslessCodec()]
# the largest error that storing a value of size 1 in the dtype can add
STORED_ERROR = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


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
    scale = (x.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)).clamp(min=2.0**-126)
    name = str(values.dtype).removeprefix("torch.")
    smallest = torch.finfo(values.dtype).smallest_normal * 2.0**-7
    bound = 0.5001 * scale + STORED_ERROR[name] * (y.abs() + scale) + smallest
    assert ((x - y).abs() <= bound).all(), ((x - y).abs() - bound).max()


@settings(deadline=None)  # the first example may compile
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
    assert len(wire) == rows * (head_dim + 2)


@settings(deadline=None)  # the first example may compile
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
    values = torch.tensor([[0.0, -0.0, 0.0], [1.0, -127.0, 64.0], [1e-38, 0.0, -1e-38]])
    back, wire = through(Int8Codec(), values, 3)
    assert torch.equal(back[:2], values[:2])
    assert wire[6:9] == bytes(3)
    assert_within_bound(values, back)


def test_int8_of_a_row_that_is_not_finite_is_not_finite() -> None:
    values = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [-float("inf"), 0.0], [3.0, 4.0]])
    for dtype in DTYPES.values():
        back, _ = through(Int8Codec(), values.to(dtype), 1)
        assert back[:3].isnan().all()
        assert back[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_int8_never_makes_the_largest_numbers_infinite(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    values = torch.tensor([[most, -most, most / 2, 1.0]], dtype=dtype)
    back, _ = through(Int8Codec(), values, 1)
    assert back.isfinite().all()
    assert_within_bound(values, back)


def test_int8_of_denormal_rows_stays_within_half_of_the_smallest_scale() -> None:
    values = torch.tensor([[1e-45, -1e-45], [5e-39, -3e-39], [1.1e-38, 2.0**-127]], dtype=torch.float32)
    back, _ = through(Int8Codec(), values, 1)
    assert ((values.double() - back.double()).abs() <= 2.0**-127).all()
    assert torch.equal(back[:2], torch.zeros(2, 2))


@settings(deadline=None)  # the first example may compile
@given(st.binary(min_size=2 * (2 + 5), max_size=2 * (2 + 5)), st.sampled_from(list(DTYPES)))
def test_int8_takes_any_wire_bytes(content: bytes, dtype: str) -> None:
    """Whatever a peer means by them, every number is a number or NaN, and none is infinite."""
    shape = RowShape(2, 5, dtype)
    room = bytearray(shape.raw_bytes)
    Int8Codec().decode(memoryview(content), shape, [memoryview(room)])
    assert not torch.frombuffer(room, dtype=DTYPES[dtype]).isinf().any()


@pytest.mark.parametrize(("head_dim", "ratio"), [(128, 0.508), (64, 0.516), (32, 0.531)])
def test_int8_is_about_half_of_bfloat16(head_dim: int, ratio: float) -> None:
    shape = RowShape(1000, head_dim, "bfloat16")
    assert Int8Codec().wire_bytes_range(shape)[1] / shape.raw_bytes == pytest.approx(ratio, abs=0.001)


def plausible(rows: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, another size in every column."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.randn(head_dim, generator=generator).exp()
    return (torch.randn((rows, head_dim), generator=generator) * sizes).to(dtype)


@settings(deadline=None)  # the first example may compile
@given(st.binary(min_size=1, max_size=400), st.sampled_from(list(DTYPES)), st.integers(1, 5))
def test_lossless_is_bitwise_for_any_bytes(content: bytes, dtype: str, run_rows: int) -> None:
    values = (
        torch.from_numpy(np.frombuffer(content * 8, dtype=np.uint8).copy()).view(DTYPES[dtype]).view(-1, 2)
    )
    back, wire = through(LosslessCodec(), values, run_rows)
    assert back.view(torch.uint8).numpy().tobytes() == content * 8
    assert len(wire) <= len(content) * 8


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 0.75), ("float32", 0.88)])
def test_lossless_compresses_exponents_whatever_the_runs(dtype: str, ratio: float) -> None:
    values = plausible(5000, 64, DTYPES[dtype])
    whole, wire = through(LosslessCodec(), values, 5000)
    assert torch.equal(whole, values)
    assert len(wire) / values.nbytes < ratio
    for run_rows in (48, 1024):
        back, again = through(LosslessCodec(), values, run_rows)
        assert again == wire
        assert torch.equal(back, values)


def test_lossless_of_what_cannot_be_compressed_is_as_long_as_raw() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 2 * 64 * 50, dtype=np.uint8)
    values = torch.from_numpy(noise).view(torch.bfloat16).view(50, 64)
    back, wire = through(LosslessCodec(), values, 50)
    assert len(wire) == values.nbytes
    assert back.view(torch.uint8).equal(values.view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS[1:], ids=lambda codec: codec.name)
def test_one_codec_serves_several_threads_at_once(codec: Codec) -> None:
    """A worker's senders and its receiver share theirs."""
    parts = [plausible(3000 + index, 64, torch.bfloat16) for index in range(4)]
    due = [through(codec, part, 16) for part in parts]
    found: dict[int, list[bool]] = {}

    def work(index: int) -> None:
        for _ in range(5):
            back, wire = through(codec, parts[index], 16)
            found.setdefault(index, []).append(torch.equal(back, due[index][0]) and wire == due[index][1])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [True] * 5 for index in range(4)}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("codec", CODECS[1:], ids=lambda codec: codec.name)
def test_a_measured_codec_has_rates_and_a_ratio(codec: Codec, dtype: str) -> None:
    rate = measure_codec(codec, dtype, 64)
    assert 0 < rate.encode_bytes_per_s < math.inf
    assert 0 < rate.decode_bytes_per_s < math.inf
    assert 0.2 < rate.ratio < 0.95
    assert rate.is_lossy == (codec.name == "int8")


@settings(deadline=None)  # the first example may compile
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


@pytest.mark.parametrize("codec", CODECS[:2], ids=lambda codec: codec.name)
@pytest.mark.parametrize("extra", [-1, 1])
def test_wire_bytes_of_another_length_are_refused(codec: Codec, extra: int) -> None:
    shape = RowShape(4, 8, "float32")
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1] + extra))
    with pytest.raises(ProtocolError, match="due are"):
        codec.decode(wire, shape, [memoryview(bytearray(128))])


def test_an_unknown_codec_is_named_with_the_allowed_ones() -> None:
    with pytest.raises(UnknownCodec, match="codec is 'zip'; allowed here: raw, int8, lossless"):
        find_codec("zip", CODECS)
    assert find_codec("int8", CODECS).name == "int8"
