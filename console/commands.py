"""Sends the operator's commands to the cluster and turns every way that can fail into one line."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from cluster.control import Command, CommandDone

SendCommand = Callable[[Command], Awaitable[CommandDone]]

ANSWER_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the operator is told."""

    ok: bool
    message: str


class CommandSink:
    """``deliver`` never raises for a cluster that is gone, silent or refuses: the answer says so. ``read_only`` says
    why nothing may be sent; "" lets everything through."""

    def __init__(
        self, send: SendCommand, *, read_only: str = "", timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._send = send
        self._read_only = read_only
        self._timeout_s = timeout_s

    def refusal(self, title: str) -> str:
        """Why an action that changes the cluster is not allowed here; "" when it is."""
        return f"{title}: {self._read_only}" if self._read_only else ""

    async def deliver(self, command: Command, title: str) -> Answer:
        """Send one command and wait for its answer."""
        refused = self.refusal(title)
        if refused:
            return Answer(False, refused)
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await self._send(command)
        except TimeoutError:
            return Answer(False, f"{title}: no answer from the cluster in {self._timeout_s:g} s")
        except OSError as error:
            return Answer(False, f"{title}: the cluster cannot be reached: {error}")
        return Answer(done.ok, done.message or title)
