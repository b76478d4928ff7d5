"""Runs one engine in a thread of its own: step while there is work, and in between run what others post.

Everything that touches the engine runs here, so the engine needs no locks and the control loop keeps answering
while a long step computes.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from engine.engine import Engine
from engine.outputs import OnLayer, StepOutput

Result = TypeVar("Result")


class EngineThread:
    """``on_step`` is called in the thread after each step, ``on_layer`` in the middle of those that compute prompts,
    ``on_idle`` when nothing is left to do; ``on_error`` once, if the thread dies."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepOutput], None],
        on_error: Callable[[BaseException], None],
        on_layer: OnLayer | None = None,
        on_idle: Callable[[], object] | None = None,
    ) -> None:
        self.engine = engine
        self.is_stepping = False  # it computes; may be read from any thread
        self._on_step = on_step
        self._on_error = on_error
        self._on_layer = on_layer
        self._on_idle = on_idle
        self._posted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards _is_closed together with the posting
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` between two steps. From any thread; after ``close`` it runs at once, in the caller's."""
        with self._lock:
            if not self._is_closed:
                self._posted.put(call)
                return
        call()

    def ask(self, call: Callable[[], Result]) -> "Future[Result]":
        """Like ``post``, with the result as a future."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
                os.sched_yield()  # who waits may share this core, and should hear before the next long step
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)
                raise

        self.post(run)
        return future

    def close(self) -> None:
        """Stop after the current step and wait for it. What was posted before runs; nothing waits for ever."""
        self._posted.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_posted():
                if self.engine.has_work():
                    self.is_stepping = True
                    output = self.engine.step(self._on_layer)
                    self.is_stepping = False
                    self._on_step(output)
            with self._lock:
                self._is_closed = True
            while not self._posted.empty():
                if (call := self._posted.get()) is not None:
                    call()
        except BaseException as error:
            self._on_error(error)
            raise

    def _run_posted(self) -> bool:
        """Run all that is posted, waiting for something when there is no work. False: closed."""
        while True:
            is_idle = not self.engine.has_work()
            if is_idle and self._on_idle is not None and self._posted.empty():
                self._on_idle()
            try:
                call = self._posted.get(block=is_idle)
            except Empty:
                return True
            if call is None:
                return False
            call()
