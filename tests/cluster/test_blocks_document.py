"""What an operator reads of held blocks: whose they are, and whether anybody still wants them."""

from cluster.blocks_document import blocks_document
from cluster.control import BlockHolder, BlocksReported
from cluster.routed_request import Phase, RoutedRequest, Timeline
from engine.request import SamplingParams


def routed(request_id: str, attempt: int) -> RoutedRequest:
    request = RoutedRequest(request_id, (1, 2), SamplingParams(), Timeline(arrived_at=1.0, submitted_at=1.0))
    for _ in range(attempt):
        request.begin_attempt("disagg", "raw", "prefill-0", "decode-0")
    return request


def holder(request_id: str, attempt: int, owner: str = "decode") -> BlockHolder:
    return BlockHolder(
        request_id=request_id,
        attempt=attempt,
        status="running",
        blocks=4,
        age_s=1.5,
        owner=owner,
        peer="prefill-0",
    )


def test_a_holder_is_wanted_while_the_router_follows_that_attempt_there() -> None:
    report = BlocksReported(
        report_id=1,
        worker_id="decode-0",
        total_blocks=100,
        held_blocks=12,
        stranded_blocks=4,
        holders=(holder("a", 2), holder("b", 1), holder("gone", 1, owner="")),
    )
    requests = {"a": routed("a", 2), "b": routed("b", 2)}
    document = blocks_document([report, "decode-1"], requests)
    assert (document["held_blocks"], document["stranded_blocks"]) == (12, 4)
    first, second = document["workers"]
    assert [(h["request_id"], h["is_wanted"]) for h in first["holders"]] == [
        ("a", True),
        ("b", False),
        ("gone", False),
    ]
    assert first["holders"][0]["age_s"] == 1.5
    assert second == {"worker_id": "decode-1", "error": "no answer"}


def test_a_request_that_decodes_is_no_longer_on_its_prefill_worker() -> None:
    request = routed("a", 1)
    request.phase = Phase.DECODE
    report = BlocksReported(
        report_id=1,
        worker_id="prefill-0",
        total_blocks=10,
        held_blocks=4,
        stranded_blocks=0,
        holders=(holder("a", 1, owner="prefill"),),
    )
    document = blocks_document([report], {"a": request})
    assert document["workers"][0]["holders"][0]["is_wanted"] is False
