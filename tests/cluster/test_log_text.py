"""Prompts and answers in the run log: only where the profile asks for them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from cluster.events import RequestFinished, TextDelivered
from tests.cluster.router_harness import HandWorker, RouterHarness, profile


@pytest.fixture
async def worker() -> AsyncIterator[HandWorker]:
    made = HandWorker("decode-0")
    await made.listen()
    yield made
    await made.close()


@pytest.mark.parametrize("log_text", [False, True])
async def test_texts_are_logged_where_asked_for(
    tmp_path: Path, worker: HandWorker, *, log_text: bool
) -> None:
    run_profile = profile(log_text=log_text)
    async with (
        RouterHarness.run(tmp_path, run_profile) as harness,
        httpx2.AsyncClient(base_url=harness.url, trust_env=False, timeout=30.0) as http,
    ):
        harness.list_workers(worker)
        body = {"prompt": "say it", "max_tokens": 6, "ignore_eos": True, "stream": True}
        answer = asyncio.create_task(http.post("/v1/completions", json=body))
        start = await worker.started()
        worker.say_tokens(start, 0, 2)
        worker.say_tokens(start, 2, 4, "length")
        assert (await answer).status_code == 200
        await harness.logged(RequestFinished, lambda event: event.output_tokens == 6)
        texts = [event for event in harness.events if isinstance(event, TextDelivered)]
        assert "".join(event.text for event in texts) == ("abcdef" if log_text else "")
        assert [event.prompt for event in texts][:1] == (["say it"] if log_text else [])
        assert not any(event.prompt for event in texts[1:])
