"""A running cluster as its router shows it over HTTP: the run log as it grows, and operator commands.

The log's times are of the cluster's host. Where that is another one, ``RemoteClock`` tells them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from cluster.control import Command, CommandDone

RETRY_S: Final = 0.3
"""The router restarts within a second when it dies; the log goes on after that."""
GIVE_UP_S: Final = 10.0


class AttachError(Exception):
    """The cluster does not answer, or not as one; the message is one line."""


class _Error(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    """What the supervisor said, or why the router did not ask it."""

    ok: bool = False
    message: str = ""
    error: _Error | None = None


class AttachedCluster:
    """``url`` without a path. ``token`` "" sends no command. Belongs to the event loop in which it is first used."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send_command(self, command: Command) -> CommandDone:
        """The supervisor's answer. Raises OSError when there is none."""
        headers = {"Authorization": f"Bearer {self._token}"}
        body = msgspec.json.encode(command)
        try:
            async with self._open().post(f"{self.url}/admin/command", data=body, headers=headers) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise OSError(f"the router does not answer: {error}") from error
        try:
            found = msgspec.json.decode(content, type=_Answer)
        except msgspec.DecodeError as error:
            raise OSError(f"HTTP {response.status}, not an operator's answer: {error}") from error
        message = found.error.message if found.error is not None else found.message
        return CommandDone(command_id=0, ok=found.ok, message=message or f"HTTP {response.status}")

    async def check(self) -> None:
        """Raises AttachError unless a cluster answers there."""
        try:
            async with self._events("from=0&follow=0") as response:
                self._refuse_others(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AttachError(f"{self.url} does not answer: {error}") from error

    async def copy_log(self, path: Path) -> None:
        """Write the run's log to ``path`` as it grows, whole lines only, until cancelled.

        Raises AttachError when the cluster has not answered for GIVE_UP_S, or answers with something else.
        """
        num_lines = 0
        heard_at = time.monotonic()
        with path.open("wb") as file:
            while True:
                problem = "it closed the connection"
                try:
                    async with self._events(f"from={num_lines}") as response:
                        self._refuse_others(response)
                        rest = b""
                        async for chunk in response.content.iter_any():
                            heard_at = time.monotonic()
                            whole, newline, rest = (rest + chunk).rpartition(b"\n")
                            num_lines += whole.count(b"\n") + len(newline)
                            file.write(whole + newline)
                            file.flush()
                except (aiohttp.ClientError, OSError) as error:
                    problem = str(error)
                if time.monotonic() - heard_at > GIVE_UP_S:
                    raise AttachError(f"{self.url} has not answered for {GIVE_UP_S:g} s: {problem}")
                await asyncio.sleep(RETRY_S)

    def _events(self, query: str) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=GIVE_UP_S)
        return self._open().get(f"{self.url}/events?{query}", timeout=timeout)

    def _refuse_others(self, response: aiohttp.ClientResponse) -> None:
        kind = response.headers.get("Content-Type", "")
        if response.status != 200 or not kind.startswith("application/x-ndjson"):
            raise AttachError(f"{self.url} is not a cluster of pdconsole: HTTP {response.status} {kind}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session


class RemoteClock:
    """The clock of a log's host, told by the newest time in the log: never ahead of it by more than the log is late."""

    def __init__(self, newest_at: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._newest_at = newest_at
        self._clock = clock
        self._ahead_s = float("inf")

    def __call__(self) -> float:
        now, newest_at = self._clock(), self._newest_at()
        if newest_at > 0:
            self._ahead_s = min(self._ahead_s, now - newest_at)
        return now - self._ahead_s if newest_at > 0 else 0.0
