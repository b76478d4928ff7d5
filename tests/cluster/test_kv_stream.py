"""Which rows a stream hands to the wire and when, against a sender that only remembers."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import kv_stream
from cluster.kv_stream import KVStream
from tests.transport.wire import PREFILL, make_contract, make_header
from transport.errors import OutboxFull
from transport.frame import DataSlice
from transport.messages import PrefillResult

LAYERS = 3
TOKEN_BYTES = 64  # of one layer's keys
CONTRACT = make_contract(num_layers=LAYERS, num_kv_heads=2, head_dim=8)
LEAST = kv_stream.MIN_PIECE_BYTES // TOKEN_BYTES


class FakeSender:
    """Takes parts or refuses them; keeps them in the order in which they came."""

    def __init__(self) -> None:
        self.calls: list[list[DataSlice]] = []
        self.is_full = False
        self.committed: list[PrefillResult] = []

    def send_parts(self, transfer_id: int, parts: Sequence[tuple[DataSlice, Sequence[memoryview]]]) -> None:
        assert transfer_id == 7
        assert not self.committed
        if self.is_full:
            raise OutboxFull("full")
        for part, views in parts:
            assert sum(view.nbytes for view in views) == part.num_tokens * TOKEN_BYTES
        self.calls.append([part for part, _ in parts])

    @property
    def parts(self) -> list[DataSlice]:
        return [part for call in self.calls for part in call]

    def commit(self, transfer_id: int, prefill: PrefillResult) -> None:
        assert transfer_id == 7
        self.committed.append(prefill)

    def ranges(self, layer: int, kv: int) -> list[tuple[int, int]]:
        return [
            (part.start_token, part.end_token) for part in self.parts if (part.layer, part.kv) == (layer, kv)
        ]


def rows(layer: int, kv: int, start_token: int, num_tokens: int) -> list[memoryview]:
    return [memoryview(bytes(num_tokens * TOKEN_BYTES))]


def make_stream(
    num_tokens: int, *, is_bulk: bool = False, link_bytes_per_s: float | None = None
) -> tuple[KVStream, FakeSender]:
    sender = FakeSender()
    header = make_header(CONTRACT, num_tokens=num_tokens)
    stream = KVStream(
        sender,  # type: ignore[arg-type]
        7,
        header,
        rows,
        is_bulk=is_bulk,
        link_bytes_per_s=link_bytes_per_s,
    )
    return stream, sender


def compute(stream: KVStream, end_token: int) -> None:
    for layer in range(LAYERS):
        stream.layer_written(layer, end_token)


LAYER = 2 * kv_stream.MIN_PIECE_BYTES  # LEAST tokens of one layer


@pytest.fixture
def ungathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's piece goes at once, in any chunk."""
    monkeypatch.setattr(kv_stream, "MAX_GATHERED_BYTES", 1)
    monkeypatch.setattr(kv_stream, "LAST_GATHERED_BYTES", 1)


def test_layers_go_together_and_in_the_last_chunk_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "MAX_GATHERED_BYTES", 2 * LAYER)
    monkeypatch.setattr(kv_stream, "LAST_GATHERED_BYTES", LAYER)
    stream, sender = make_stream(2 * LEAST)
    stream.layer_written(0, LEAST)
    assert not sender.calls
    stream.layer_written(1, LEAST)
    assert sender.calls == [[DataSlice(layer, kv, 0, LEAST) for layer in (0, 1) for kv in (0, 1)]]
    assert stream.has_sent
    stream.layer_written(2, LEAST)
    assert len(sender.calls) == 1
    stream.layer_written(0, 2 * LEAST)  # of the last chunk, with what layer 2 had left
    stream.layer_written(1, 2 * LEAST)
    stream.layer_written(2, 2 * LEAST)
    assert [[part.layer for part in call[::2]] for call in sender.calls[1:]] == [[0, 2], [1], [2]]
    assert sender.committed == []
    stream.finish(PREFILL)
    assert (len(sender.calls), sender.committed) == (4, [PREFILL])


@pytest.mark.parametrize(
    ("gathered_bytes", "first_at"),
    [(2 * LAYER, 2), (2 * LAYER + 1, 3), (3 * LAYER, 3), (9 * LAYER, 6), (1, 1)],
)
def test_a_slow_link_gets_what_it_can_take_meanwhile(
    monkeypatch: pytest.MonkeyPatch, gathered_bytes: int, first_at: int
) -> None:
    """Not more than the most, nor less than in a last chunk."""
    monkeypatch.setattr(kv_stream, "MAX_GATHERED_BYTES", 6 * LAYER)
    monkeypatch.setattr(kv_stream, "LAST_GATHERED_BYTES", LAYER)
    stream, sender = make_stream(9 * LEAST, link_bytes_per_s=gathered_bytes / kv_stream.GATHERED_S)
    written = [(layer, end) for end in (LEAST, 2 * LEAST) for layer in range(LAYERS)]
    for count, (layer, end) in enumerate(written, start=1):
        stream.layer_written(layer, end)
        assert bool(sender.calls) == (count >= first_at)


def test_with_the_last_layer_goes_whatever_is_worth_a_frame() -> None:
    assert kv_stream.LAST_GATHERED_BYTES > LAYERS * LAYER
    stream, sender = make_stream(LEAST)
    compute(stream, LEAST)
    assert [[part.layer for part in call[::2]] for call in sender.calls] == [[0, 1, 2]]
    assert not sender.committed


def test_bulk_sends_everything_at_the_end() -> None:
    stream, sender = make_stream(3 * LEAST, is_bulk=True)
    compute(stream, 3 * LEAST)
    assert not stream.has_sent
    assert stream.first_sent_at == 0.0
    stream.finish(PREFILL)
    assert stream.has_sent
    assert [sender.ranges(layer, kv) for layer in range(LAYERS) for kv in (0, 1)] == (
        [[(0, 3 * LEAST)]] * 2 * LAYERS
    )
    assert sender.committed == [PREFILL]


def test_a_prompt_below_one_piece_is_a_bulk_transfer() -> None:
    stream, sender = make_stream(LEAST - 1)
    compute(stream, LEAST - 1)
    assert sender.parts == []
    stream.finish(PREFILL)
    assert sender.ranges(0, 0) == [(0, LEAST - 1)]


@pytest.mark.usefixtures("ungathered")
def test_small_chunks_are_gathered_into_pieces_worth_a_frame() -> None:
    stream, sender = make_stream(10 * LEAST)
    for end in range(16, 10 * LEAST + 1, 16):
        compute(stream, end)
    assert len(sender.ranges(1, 1)) == 10


@pytest.mark.usefixtures("ungathered")
def test_a_full_outbox_costs_no_row_and_no_order() -> None:
    stream, sender = make_stream(4 * LEAST)
    compute(stream, LEAST)
    sender.is_full = True
    stream.layer_written(0, 2 * LEAST)
    stream.layer_written(1, 2 * LEAST)
    sender.is_full = False
    stream.layer_written(2, 2 * LEAST)
    compute(stream, 3 * LEAST)
    assert len(sender.calls) == LAYERS + 1 + LAYERS, "what was refused goes with the next layer"
    assert sender.ranges(0, 0) == [(0, LEAST), (LEAST, 2 * LEAST), (2 * LEAST, 3 * LEAST)]
    assert sender.ranges(2, 1) == [(0, LEAST), (LEAST, 2 * LEAST), (2 * LEAST, 3 * LEAST)]
    sender.is_full = True
    with pytest.raises(OutboxFull):
        stream.finish(PREFILL)
    assert sender.committed == []


@pytest.mark.usefixtures("ungathered")
def test_what_the_receiver_holds_is_neither_sent_nor_the_beginning_of_the_transfer() -> None:
    stream, sender = make_stream(4 * LEAST)
    compute(stream, LEAST)
    assert stream.first_sent_at > 0
    stream.skip(2 * LEAST)  # an ACCEPT that came late
    assert stream.first_sent_at == 0.0
    assert stream.has_sent, "the wire may still look at what it was given"
    compute(stream, 2 * LEAST)
    assert stream.first_sent_at == 0.0
    compute(stream, 3 * LEAST)
    assert stream.first_sent_at > 0
    assert sender.ranges(0, 0) == [(0, LEAST), (2 * LEAST, 3 * LEAST)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_goes_exactly_once_and_in_order_however_the_prompt_is_cut(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 5 * LEAST), "tokens")
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=12), "cuts") | {num_tokens})
    start_token = data.draw(st.integers(0, num_tokens - 1), "held")
    accept_at = data.draw(st.integers(0, len(cuts)), "chunks before the accept")
    stream, sender = make_stream(num_tokens)
    for index, end in enumerate(cuts):
        if index == accept_at:
            stream.skip(start_token)
        for layer in range(LAYERS):
            sender.is_full = data.draw(st.booleans())
            stream.layer_written(layer, end)
    sender.is_full = False
    streamed = len(sender.parts)
    stream.finish(PREFILL)
    for part in sender.parts[:streamed]:
        assert part.num_tokens >= LEAST
    for layer in range(LAYERS):
        for kv in (0, 1):
            ranges = sender.ranges(layer, kv)
            assert ranges == sorted(ranges)
            sent = [token for begin, end in ranges for token in range(begin, end)]
            assert len(sent) == len(set(sent))
            assert set(range(start_token if accept_at < len(cuts) else 0, num_tokens)) <= set(sent)
            assert ranges[-1][1] == num_tokens
    assert sender.committed == [PREFILL]
