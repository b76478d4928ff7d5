"""The supervisor's end of its nursery: starts it, has workers forked, waits for them through it.

Known by its own module alone at start (standard library and msgspec), so that the nursery's slow imports begin before
the supervisor's. A nursery that dies takes its workers with it and is started again; where none comes up, workers are
run as programs instead.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from cluster.nursery_messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Fork,
    Forked,
    NurseryReady,
    Reap,
    Reaped,
    Request,
    decode_answer,
    encode_request,
)
from cluster.python_program import PYTHON_MODULE
from cluster.spawner import LIBRARY_SETTINGS, Spawned, Spawner

NURSERY_COMMAND: Final = (*PYTHON_MODULE, "cluster.nursery_main")
READY_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 5.0
"""Forking and reaping an ended process take milliseconds: a nursery that does not answer for so long hangs."""
MAX_RESTARTS: Final = 3


class Nursery:
    """A Spawner. ``fallback`` makes the process where the nursery cannot.

    A nursery that hangs when it is asked is killed. One that dies is started again, at most ``MAX_RESTARTS`` times;
    ``on_death`` (to be set by the owner) is told in one line.
    """

    def __init__(self, fallback: Spawner, command: Sequence[str]) -> None:
        self._fallback = fallback
        self._command = tuple(command)
        self._waiting: deque[asyncio.Future[Answer]] = deque()  # requests in order, as are the answers
        self._reading: asyncio.Task[None] | None = None
        self._restarts = 0
        self._is_closing = False
        self.on_death: Callable[[str], None] = lambda line: None
        self._begin()

    def _begin(self) -> None:
        """A new process, importing. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **LIBRARY_SETTINGS},
            )
        ours.setblocking(False)
        self._socket = ours
        self._started_at = time.monotonic()
        self._is_ready = False
        self._is_gone = False

    @classmethod
    def start(cls, fallback: Spawner, command: Sequence[str] = NURSERY_COMMAND) -> Self:
        """Begin the nursery's imports, from the main thread. Its output goes where this process's does.

        Raises OSError.
        """
        return cls(fallback, command)

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self) -> None:
        """Begin to take answers; call it once, on the event loop."""
        self._reading = asyncio.create_task(self._read_for_ever(), name="nursery")

    @property
    def is_pending(self) -> bool:
        """It is still importing: better to wait than to import beside it."""
        return not (self._is_ready or self._is_gone) and time.monotonic() - self._started_at < READY_TIMEOUT_S

    async def spawn(self, child_id: str, log_path: Path, link_fd: int, fds: Sequence[int]) -> Spawned:
        """See Spawner."""
        if not self._is_ready or self._is_gone:
            return await self._fallback.spawn(child_id, log_path, link_fd, fds)
        numbers = (link_fd, *fds)
        answer = await self._ask(Fork(child_id=child_id, log_path=str(log_path), numbers=numbers), numbers)
        if not isinstance(answer, Forked):
            return await self._fallback.spawn(child_id, log_path, link_fd, fds)
        return _Forked(self, answer.pid)

    async def reap(self, pid: int) -> int:
        """The exit code of a forked worker that has ended; an end that nobody can tell counts as SIGKILL."""
        answer = await self._ask(Reap(pid=pid)) if not self._is_gone else None
        if isinstance(answer, Reaped) and answer.code is not None:
            return answer.code
        return _wait(pid)

    async def close(self) -> None:
        """End it, and with it whatever it forked that is still alive."""
        self._is_closing = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self._lose()
        self._socket.close()
        if self._is_ready:  # else it is importing, and hears nothing until that is done
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._process.kill()
        self._process.wait()

    async def _ask(self, request: Request, fds: Sequence[int] = ()) -> Answer | None:
        """None when the nursery died before it answered."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._socket, [encode_request(request)], list(fds))
        except OSError:
            return None
        self._waiting.append(future)
        process = self._process
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except ConnectionError:
            return None
        except TimeoutError:
            process.kill()  # its end is told as any other's
            return None

    async def _read_for_ever(self) -> None:
        while True:
            await self._read()
            pid, code = self.pid, await asyncio.to_thread(self._process.wait)
            if self._is_closing or self._restarts >= MAX_RESTARTS:
                self.on_death(
                    f"the nursery (pid {pid}, exit code {code}) is gone; workers are run as programs"
                )
                return
            self._restarts += 1
            self._socket.close()
            self._begin()
            self.on_death(
                f"the nursery (pid {pid}, exit code {code}) died and its workers with it; a new one starts"
            )

    async def _read(self) -> None:
        """Take answers until the process ends."""
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._socket, MAX_MESSAGE_BYTES):
                answer = decode_answer(packet)
                if isinstance(answer, NurseryReady):
                    self._is_ready = True
                    continue
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(answer)
        except OSError:
            pass  # as its end of file: it is gone
        finally:
            self._lose()

    def _lose(self) -> None:
        self._is_gone = True
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError("the nursery died"))


def _wait(pid: int) -> int:
    """The nursery died: what it forked came to this process if it is a subreaper."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


class _Forked:
    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    async def reap(self) -> int:
        return await self._nursery.reap(self.pid)
