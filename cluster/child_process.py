"""One child process and its parent link: spawned, listened to, stopped, and gone with everything it started.

A child leads its own session and process group, so a stop reaches what it spawned too. It is not reaped until its
group has been killed: until then its pid, and so the group's id, cannot belong to anybody else.

Knows how to run a process, not what it is for: messages and the exit are handed to whoever owns it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cluster.control import AnyMessage, Shutdown
from cluster.json_stream import JsonStream, StreamError
from cluster.restart_policy import ExitStatus
from cluster.spawner import Spawned, Spawner

_GROUP_POLL_S: Final = 0.01
_GROUP_WAIT_S: Final = 2.0
_READ_REST_S: Final = 1.0


class ChildProcess:
    """A running child. Made by ``spawn``; ``exited`` is set once it and its group are gone and its link is read out.

    ``heard_at`` is the last message of any kind, ``ready_at`` when the owner called ``mark_ready`` (None before); both
    are monotonic seconds.
    """

    def __init__(
        self,
        child_id: str,
        process: Spawned,
        stream: JsonStream,
        log_path: Path,
        on_message: Callable[["ChildProcess", AnyMessage], None],
        on_exit: Callable[["ChildProcess", ExitStatus], None],
    ) -> None:
        self.child_id = child_id
        self.pid = process.pid
        self.log_path = log_path
        self.spawned_at = time.monotonic()
        self.ready_at: float | None = None
        self.heard_at = self.spawned_at
        self.status: ExitStatus | None = None
        self.exited = asyncio.Event()
        self.fault = ""  # why the link broke, when not by end of file
        self.leftover: list[int] = []  # pids of its group that outlived SIGKILL (stuck in the kernel)
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._stream = stream
        self._on_message = on_message
        self._on_exit = on_exit
        self._ended = asyncio.Event()  # the leader is a zombie
        self._task = asyncio.create_task(self._live(), name=f"child {child_id}")

    @classmethod
    async def spawn(
        cls,
        child_id: str,
        spawner: Spawner,
        log_path: Path,
        *,
        on_message: Callable[["ChildProcess", AnyMessage], None],
        on_exit: Callable[["ChildProcess", ExitStatus], None],
        first: AnyMessage,
        pass_fds: Sequence[int] = (),
    ) -> "ChildProcess":
        """Have a process made with its end of the parent link, and send it ``first``.

        Call it in the main thread: the child asks the kernel to die with the thread that spawned it. Raises SpawnError.
        """
        ours, theirs = socket.socketpair()
        stream = await JsonStream.from_socket(ours)
        with theirs:
            try:
                process = await spawner.spawn(child_id, log_path, theirs.fileno(), pass_fds)
            except BaseException:  # a process that exists all the same meets the end of its link
                await stream.close()
                raise
        child = cls(child_id, process, stream, log_path, on_message, on_exit)
        child.send(first)
        return child

    @property
    def is_running(self) -> bool:
        """False as soon as the process itself has ended."""
        return not self._ended.is_set() and self.status is None

    def send(self, message: AnyMessage) -> None:
        """Queue one message; nothing happens when the child is gone."""
        self._stream.send(message)

    def mark_ready(self) -> float:
        """Its own message said ready; returns the seconds since it was spawned."""
        self.ready_at = time.monotonic()
        return self.ready_at - self.spawned_at

    def signal(self, number: int) -> None:
        """One signal to the process itself; nothing happens when it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def signal_group(self, number: int) -> None:
        """One signal to the process and everything it started."""
        if self.status is None:  # not reaped: the group id is still ours
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> None:
        """Shutdown, then SIGTERM, half of ``grace_s`` after each, then SIGKILL; returns when the group is gone.

        The message comes alone at first: a process that SIGTERM ends at once could not say its last events.
        """
        self.send(Shutdown())
        self.signal_group(signal.SIGCONT)  # a stopped process hears neither
        if self.ready_at is None:
            self.signal_group(signal.SIGTERM)  # busy loading: it hears no message and has nothing to say
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), grace_s / 2)
            if self._ended.is_set():
                break
            self.signal_group(number)
        await self.exited.wait()

    async def _live(self) -> None:
        """From the first message to the last: read the link, notice the end, clear the group away, report."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._ended.set)
        reading = asyncio.create_task(self._read(), name=f"link of {self.child_id}")
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
            status = await self._clear_group()
            # What it said before it died is still in the socket.
            await asyncio.wait({reading}, timeout=_READ_REST_S)
            reading.cancel()
            await asyncio.wait({reading})
            await self._stream.close()
            os.close(self._pidfd)
            self._on_exit(self, status)
            self.exited.set()

    async def _read(self) -> None:
        try:
            while (message := await self._stream.receive()) is not None:
                self.heard_at = time.monotonic()
                self._on_message(self, message)
        except StreamError as error:
            self.fault = str(error)
            self.signal_group(signal.SIGKILL)

    async def _clear_group(self) -> ExitStatus:
        """Kill what is left of the group while its id is still ours, then reap and wait until it is empty."""
        self.signal_group(signal.SIGKILL)
        code = await self._process.reap()
        self.status = ExitStatus(signal=-code) if code < 0 else ExitStatus(exit_code=code)
        deadline = time.monotonic() + _GROUP_WAIT_S
        # The kernel tells nobody that a group has become empty: look.
        while (leftover := group_members(self.pid)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_GROUP_POLL_S)
        self.leftover = leftover
        return self.status


def group_members(group: int) -> list[int]:
    """Pids of the live processes of a process group; zombies that are ours are reaped, others are not alive."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid pgrp ...; the name may hold blanks and brackets
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    members.append(int(name))
    return members
