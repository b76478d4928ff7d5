"""From the worker's threads to its control loop: messages for the router and events for the run log, in order."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from cluster.control import AnyMessage, TokenProduced, Tokens
from cluster.events import Event


class WorkerOutbox:
    """``say`` and ``emit`` may be called from any thread; ``deliver`` runs on the loop with what has come since."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[AnyMessage], list[Event]], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._messages: list[AnyMessage] = []
        self._events: list[Event] = []
        self._is_scheduled = False

    def say(self, message: AnyMessage) -> None:
        """To the router."""
        with self._lock:
            self._messages.append(message)
            self._schedule()

    def say_tokens(self, tokens: Sequence[TokenProduced]) -> None:
        """All tokens of one step, in one message."""
        if tokens:
            self.say(Tokens(tokens=tuple(tokens)))

    def emit(self, event: Event) -> None:
        """To the run log."""
        with self._lock:
            self._events.append(event)
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, []
            events, self._events = self._events, []
            self._is_scheduled = False
        self._deliver(messages, events)
