"""A request's view when the worker chose the codec: what it took, and why, whatever order the events come in."""

import itertools

import pytest

from cluster.events import Event, RequestArrived, RequestDispatched, TransferStarted
from console.request_book import RequestBook

REASON = "estimated lossless 275 ms, raw 401 ms for 50 MB over 125 MB/s measured"
DISPATCHED = RequestDispatched(
    at=1.1, request_id="r1", attempt=1, mode="disagg", codec="auto", decode_worker="decode-0",
    decode_reason="most free blocks", prefill_worker="prefill-0",
)  # fmt: skip
STARTED = TransferStarted(
    at=1.2, request_id="r1", attempt=1, from_worker="prefill-0", to_worker="decode-0", codec="lossless",
    tokens=8, raw_bytes=50_000_000, codec_reason=REASON,
)  # fmt: skip


@pytest.mark.parametrize(
    "order", list(itertools.permutations([DISPATCHED, STARTED])), ids=["in order", "late"]
)
def test_the_codec_shown_is_the_one_that_was_taken(order: tuple[Event, ...]) -> None:
    book = RequestBook()
    book.fold(RequestArrived(at=1.0, request_id="r1", prompt_tokens=8, max_tokens=4))
    for event in order:
        book.fold(event)
    found = book.get("r1")
    assert found is not None
    assert found.codec == "lossless"
    assert f"codec lossless: {REASON}" in [text for _, text in found.story]


def test_before_the_transfer_it_is_the_one_that_was_asked_for() -> None:
    book = RequestBook()
    book.fold(RequestArrived(at=1.0, request_id="r1", prompt_tokens=8, max_tokens=4))
    book.fold(DISPATCHED)
    found = book.get("r1")
    assert found is not None
    assert found.codec == "auto"
