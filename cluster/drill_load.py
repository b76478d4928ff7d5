"""Sends a drill's requests as its clients would, and keeps what came of each."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Final

import aiohttp

from cluster.drill import Drill, RequestGroup
from cluster.drill_story import AFTER, DISTURBED, UNDISTURBED, SentRequest
from cluster.load_client import LoadClient
from cluster.workload import PlannedRequest, PromptCorpus

LABEL: Final = "client"
_PAUSE_AFTER_FAILURE_S: Final = 0.2
_HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


class DrillLoad:
    """All methods belong to one event loop; ``close`` it there."""

    def __init__(self, drill: Drill, url: str, model_id: str, corpus: PromptCorpus) -> None:
        self._drill = drill
        self._url = url
        self._client = LoadClient(url, model_id)
        self._requests = {
            name: _prompts(drill.name, name, group, corpus) for name, group in drill.requests.items()
        }
        self._sent: dict[str, SentRequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by client id
        self._schedules: list[asyncio.Task[None]] = []
        self._streams: list[asyncio.Task[None]] = []

    @property
    def sent(self) -> tuple[SentRequest, ...]:
        return tuple(self._sent.values())

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def undisturbed(self) -> None:
        """What is to be disturbed as it is without, then one by one the prompts of what will disturb it."""
        numbers = {
            name: group.num_prompts if group.streams else group.count
            for name, group in self._drill.requests.items()
            if not group.is_disturbance
        }
        await asyncio.gather(*(self._send_group(UNDISTURBED, name, count) for name, count in numbers.items()))
        for name, group in self._drill.requests.items():
            if group.is_disturbance:
                for number in range(group.num_prompts):
                    await self._send(UNDISTURBED, name, number)

    def begin(self) -> None:
        """The disturbed round."""
        for name, group in self._drill.requests.items():
            if group.streams:
                self._streams.append(
                    asyncio.create_task(self._keep_streams(name, group), name=f"streams {name}")
                )
            else:
                schedule = self._send_group(DISTURBED, name, group.count)
                self._schedules.append(asyncio.create_task(schedule, name=f"requests {name}"))

    @property
    def is_sent_and_answered(self) -> bool:
        """Nothing of the disturbed round is open but its streams."""
        return all(schedule.done() for schedule in self._schedules)

    async def end_streams(self) -> None:
        """No new requests; returns when the open ones are answered."""
        for stream in self._streams:
            stream.cancel()
        if self._streams:
            await asyncio.wait(self._streams)
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def after(self) -> None:
        """The first request of each group that was disturbed, one by one."""
        for name, group in self._drill.requests.items():
            if not group.is_disturbance:
                await self._send(AFTER, name, 0)

    async def leave(self, client_id: str) -> bool:
        """Close this request's connection. False: it has been answered already."""
        task = self._tasks.get(client_id)
        if task is None:
            return False
        self._sent[client_id] = replace(self._sent[client_id], left_at=time.monotonic())
        task.cancel()
        await asyncio.wait({task})
        return True

    async def is_ready(self) -> bool:
        """Whether the router says that a token goes through."""
        try:
            async with (
                aiohttp.ClientSession(timeout=_HEALTH_TIMEOUT) as session,
                session.get(f"{self._url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Drop what is open."""
        tasks = [*self._schedules, *self._streams, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._client.close()

    async def _send_group(self, round_: str, name: str, count: int) -> None:
        group = self._drill.requests[name]
        if group.streams:  # so many at a time, as in the disturbed round
            room = asyncio.Semaphore(group.streams)

            async def in_turn(number: int) -> None:
                async with room:
                    await self._send(round_, name, number)

            await asyncio.gather(*map(in_turn, range(count)))
            return
        began_at = time.monotonic()
        sending = []
        for number in range(count):
            due_at = began_at + group.at_s + number * group.every_s
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            sending.append(self._spawn(round_, name, number))
        await asyncio.wait(sending)

    async def _keep_streams(self, name: str, group: RequestGroup) -> None:
        """``streams`` requests at a time; the next one leaves when one is answered."""
        await asyncio.sleep(group.at_s)
        open_: set[asyncio.Task[None]] = set()
        number = 0
        while True:
            while len(open_) < group.streams:
                open_.add(self._spawn(DISTURBED, name, number))
                number += 1
            done, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            if any(not self._sent[task.get_name()].has_finished for task in done):
                await asyncio.sleep(
                    _PAUSE_AFTER_FAILURE_S
                )  # what refuses at once must not be asked in a tight loop

    def _spawn(self, round_: str, name: str, number: int) -> asyncio.Task[None]:
        client_id = f"{round_}/{name}/{number}"
        task = asyncio.create_task(self._send(round_, name, number), name=client_id)
        self._tasks[client_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(client_id, None))
        return task

    async def _send(self, round_: str, name: str, number: int) -> None:
        requests = self._requests[name]
        prompt = number % len(requests)
        request = SentRequest(round_, name, number, prompt, time.monotonic())
        self._sent[request.client_id] = request
        result = await self._client.send(requests[prompt], LABEL, request.client_id)
        self._sent[request.client_id] = replace(request, result=result, ended_at=time.monotonic())


def _prompts(name: str, group_name: str, group: RequestGroup, corpus: PromptCorpus) -> list[PlannedRequest]:
    """The same for the same drill, however often it is run."""
    rng = random.Random(f"{name} {group_name}")
    return [
        PlannedRequest(
            at_s=0.0,
            prompt_token_ids=corpus.cut(rng, group.prompt_tokens),
            max_tokens=group.max_tokens,
            temperature=group.temperature,
            seed=number,
        )
        for number in range(group.num_prompts)
    ]
