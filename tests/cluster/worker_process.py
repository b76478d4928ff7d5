"""A real worker process without a supervisor and a router: the test is both."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from cluster.child_process import ChildProcess
from cluster.control import AnyMessage, Events, StartFailed, StartLocal, Tokens, WorkerSpec, WorkerUp
from cluster.events import Event
from cluster.profile import Profile
from cluster.restart_policy import ExitStatus
from cluster.spawner import Spawner
from cluster.worker_link import WorkerLink
from engine.request import SamplingParams

SECRET = "5e" * 32
WAIT_S = 100.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Kind = TypeVar("Kind")


class WorkerProcess:
    """What the process said, on both of its links, and what the kernel says of it."""

    def __init__(self) -> None:
        self.child: ChildProcess
        self.status: ExitStatus | None = None
        self.messages: list[AnyMessage] = []
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        self._link: WorkerLink | None = None
        self._is_linked = False
        self._num_started = 0

    @property
    def pid(self) -> int:
        return self.child.pid

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [item for item in (*self.messages, *self.events) if isinstance(item, kind)]

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Return once it is true; looked at after everything that the process says."""
        async with asyncio.timeout(WAIT_S):
            while not is_true():
                assert self.status is None or not self.is_up, f"the worker ended: {self.status}"
                self._changed.clear()
                await self._changed.wait()

    @property
    def is_up(self) -> bool:
        return bool(self.of(WorkerUp))

    async def start(self, *prompts: int, max_tokens: int = 1) -> None:
        """Have prompts of these lengths, unlike all others, computed and decoded here."""
        if self._link is None:
            address = self.of(WorkerUp)[0].address
            self._link = WorkerLink(
                address, bytes.fromhex(SECRET), self._linked, lambda detail: None, self._take
            )
            await self.until(lambda: self._is_linked)
        for length in prompts:
            self._num_started += 1
            prompt = (5 + index * self._num_started % 400 for index in range(1, length + 1))
            self._link.send(
                StartLocal(
                    request_id=f"r{self._num_started}",
                    attempt=1,
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                )
            )

    async def compute(self, *prompts: int, max_tokens: int = 1) -> None:
        """Start them, and wait until all that was ever started has ended."""
        await self.start(*prompts, max_tokens=max_tokens)
        await self.until(lambda: self._num_finished() == self._num_started)

    def _num_finished(self) -> int:
        return sum(bool(token.finish_reason) for tokens in self.of(Tokens) for token in tokens.tokens)

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def affinities(self) -> dict[int, set[int]]:
        """Thread id -> the cores it may use."""
        return {thread: os.sched_getaffinity(thread) for thread in self._threads()}

    def thread_seconds(self) -> dict[int, float]:
        """Thread id -> processor time it has used."""
        seconds = {}
        for thread in self._threads():
            fields = Path(f"/proc/{self.pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
            seconds[thread] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return seconds

    def _threads(self) -> list[int]:
        return [int(name) for name in os.listdir(f"/proc/{self.pid}/task")]

    def _linked(self) -> None:
        self._is_linked = True
        self._changed.set()

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, Events):
            self.events += message.events
        else:
            self.messages.append(message)
        self._changed.set()

    def _exited(self, child: ChildProcess, status: ExitStatus) -> None:
        self.status = status
        self._changed.set()

    @classmethod
    @contextlib.asynccontextmanager
    async def run(
        cls, spawner: Spawner, profile: Profile, cpus: tuple[int, ...], directory: Path
    ) -> AsyncIterator["WorkerProcess"]:
        """Spawn one, wait until it is up or refuses, stop it at the end."""
        worker = cls()
        spec = WorkerSpec(
            worker_id="decode-0", role="decode", run="test", secret=SECRET, profile=profile, cpus=cpus
        )
        worker.child = await ChildProcess.spawn(
            "decode-0",
            spawner,
            directory / "decode-0.log",
            on_message=lambda child, message: worker._take(message),
            on_exit=worker._exited,
            first=spec,
        )
        try:
            await worker.until(lambda: worker.is_up or bool(worker.of(StartFailed)))
            yield worker
        finally:
            if worker._link is not None:
                await worker._link.close()
            await worker.child.stop(5.0)
