"""What reaches the log while a prompt is computed."""

import asyncio

from cluster.attempt_reports import PROGRESS_INTERVAL_S, AttemptReports, PrefillClock
from cluster.control import AnyMessage, StartPrefill
from cluster.events import Event, PrefillProgressed, PrefillStarted
from cluster.worker_outbox import WorkerOutbox
from engine.outputs import PrefillProgress
from engine.request import SamplingParams

CHUNK_TOKENS = 64
STEP_S = 0.01
MESSAGE = StartPrefill(
    request_id="r1",
    attempt=1,
    prompt_token_ids=(1,) * 1000,
    sampling=SamplingParams(),
    decode_worker="decode-0",
    decode_kv_host="",
    decode_kv_port=0,
    codec="raw",
    path="v2",
)


async def logged(num_tokens: int) -> list[Event]:
    """The events of a prompt that is computed in chunks, one every ``STEP_S``."""
    events: list[Event] = []

    def deliver(messages: list[AnyMessage], new: list[Event]) -> None:
        events.extend(new)

    reports, clock = (
        AttemptReports("prefill-0", WorkerOutbox(asyncio.get_running_loop(), deliver)),
        PrefillClock(),
    )
    now = 1000.0
    for start in range(0, num_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, num_tokens - start)
        progress = PrefillProgress("r1", start, size, num_cached=0, done=start + size == num_tokens)
        reports.prefill_progressed(MESSAGE, clock, progress, now, now + STEP_S, own_s=STEP_S)
        now += STEP_S
    await asyncio.sleep(0)
    return events


async def test_a_prompt_of_several_chunks_tells_its_first_and_then_a_few_a_second() -> None:
    """However fast the machine is: what waits for a prefill in its middle would else never see one there."""
    started, *progressed = await logged(100 * CHUNK_TOKENS)
    assert isinstance(started, PrefillStarted)
    found = [
        (event.at, event.computed_tokens) for event in progressed if isinstance(event, PrefillProgressed)
    ]
    assert found[0] == (1000.0 + STEP_S, CHUNK_TOKENS)
    assert len(found) == len(progressed) == 1 + int((100 - 2) * STEP_S / PROGRESS_INTERVAL_S)


async def test_a_prompt_of_one_chunk_is_started_and_nothing_between() -> None:
    (started,) = await logged(CHUNK_TOKENS)
    assert isinstance(started, PrefillStarted)
