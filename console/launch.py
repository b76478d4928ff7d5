"""Starts the supervisor process and talks to it over the parent link.

The link is also the lifeline: when this process goes, however it goes, the supervisor reads its end and stops the
cluster. So nothing here needs to succeed for nothing to be left behind; ``stop`` is the polite way.
"""

import asyncio
import contextlib
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from cluster.control import (
    Command,
    CommandDone,
    CommandSent,
    Detach,
    Detached,
    Ping,
    StartFailed,
    StopCluster,
    SupervisorSpec,
    SupervisorStopped,
    SupervisorUp,
)
from cluster.heartbeat import PING_INTERVAL_S, Heartbeats
from cluster.json_stream import JsonStream, StreamError
from cluster.log_lines import last_lines
from cluster.python_program import PYTHON_MODULE
from console.errors import UserError
from console.signals import Outcome, Signals

SUPERVISOR_MODULE: Final = "cluster.supervisor_main"
STOP_MARGIN_S: Final = 10.0
"""Beyond the profile's own grace: writing the summary, removing the links."""

SILENCE_LIMIT_S: Final = 5.0

_LIFELINE_WAIT_S: Final = 3.0
_LOG_LINES_SHOWN: Final = 5


class LaunchError(UserError):
    """The cluster did not start or did not stay up. ``exit_code`` as of the command line."""


class SupervisorClient:
    """One supervisor process, from spawn to exit. Belongs to the event loop in which ``launch`` was awaited."""

    def __init__(self, process: subprocess.Popen[bytes], stream: JsonStream, spec: SupervisorSpec) -> None:
        self._process = process
        self._stream = stream
        self._log = supervisor_log(Path(spec.run_dir))
        self._grace_s = spec.profile.supervisor.stop_grace_s + STOP_MARGIN_S
        self._waiting: dict[int, asyncio.Future[CommandDone]] = {}
        self._last_command_id = 0
        self._answer: SupervisorUp | StartFailed | None = None
        self._answered = asyncio.Event()
        self._gone = asyncio.Event()
        self._settled = asyncio.Event()  # detached, or gone
        self._reader = asyncio.create_task(self._read(), name="parent link")
        self._watcher = asyncio.create_task(self._watch(), name="supervisor's heartbeat")
        self._heard_at = time.monotonic()
        self._fault = ""
        self.stopped: SupervisorStopped | None = None
        self.detached = False

    @classmethod
    async def launch(cls, spec: SupervisorSpec, module: str = SUPERVISOR_MODULE) -> "SupervisorClient":
        """Spawn the supervisor for ``spec`` (its run directory exists). Call it from the main thread: a process that
        asks to die with its parent dies with the thread that forked it."""
        ours, theirs = socket.socketpair()
        log = supervisor_log(Path(spec.run_dir))
        log.parent.mkdir(mode=0o700, exist_ok=True)
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220
                [*PYTHON_MODULE, module, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        stream = await JsonStream.from_socket(ours)
        stream.send(spec)
        return cls(process, stream, spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """The supervisor closed its end: it stopped, refused to start, or died."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        await self._gone.wait()

    async def wait_up(self) -> SupervisorUp:
        """Return when the cluster is ready. Raises LaunchError when it refuses to start or ends first."""
        await self._answered.wait()
        if isinstance(self._answer, SupervisorUp):
            return self._answer
        if isinstance(self._answer, StartFailed):
            raise LaunchError(self._answer.message, self._answer.exit_code)
        raise LaunchError(await self.death_report(), exit_code=1)

    async def send_command(self, command: Command) -> CommandDone:
        """Have the supervisor carry out ``command``; its answer. A supervisor that is gone answers ok=False."""
        self._last_command_id += 1
        command_id = self._last_command_id
        if self.is_gone:
            return _gone_answer(command_id)
        answer: asyncio.Future[CommandDone] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = answer
        self._stream.send(CommandSent(command_id=command_id, command=command))
        try:
            return await answer
        finally:
            del self._waiting[command_id]

    async def detach(self) -> bool:
        """Leave the cluster to itself: it goes on when this process ends. False: it was gone, or does not answer."""
        self._stream.send(Detach())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_LIMIT_S):
                await self._settled.wait()
        if not self.detached:
            return False
        self._watcher.cancel()
        await self._stream.close()
        await asyncio.wait({self._reader, self._watcher})
        self._process.returncode = 0  # not ours to wait for any more
        return True

    async def stop(self, reason: str) -> None:
        """Stop the cluster and wait for the supervisor's end: told, then its lifeline cut, then TERM, then KILL.

        Safe to call again, and after the supervisor has died.
        """
        self._watcher.cancel()  # writing the summary of a long run takes its time
        if not self.is_gone:
            self._last_command_id += 1
            stop = StopCluster(reason=reason)
            self._stream.send(CommandSent(command_id=self._last_command_id, command=stop))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), self._grace_s)
        await self._stream.close()
        for escalate in (_nothing, self._process.terminate, self._process.kill):
            escalate()
            if await self._has_exited(_LIFELINE_WAIT_S):
                break
        await asyncio.wait({self._reader, self._watcher})

    def kill(self) -> None:
        """At once, without a summary: workers and router follow by their own lifelines."""
        self._process.kill()

    async def death_report(self) -> str:
        """How the supervisor ended and the last lines of its log, for a user who did not ask for that."""
        await self._has_exited(_LIFELINE_WAIT_S)
        code = self._process.poll()
        how = "is still running" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        how = self._fault or how
        lines = last_lines(self._log, _LOG_LINES_SHOWN)
        return f"the supervisor ended unexpectedly ({how}); last lines of {self._log}:" + "".join(
            f"\n  {line}" for line in lines or ["(empty)"]
        )

    async def _has_exited(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, timeout_s)
        return self._process.poll() is not None

    async def _watch(self) -> None:
        """A supervisor that is stopped or stuck supervises nothing: end it, and the cluster with it."""
        seq = 0
        heartbeats = Heartbeats(SILENCE_LIMIT_S)  # forgives what passed while this process was stopped itself
        heartbeats.silent({}, time.monotonic())
        while not self.is_gone:
            await asyncio.sleep(PING_INTERVAL_S)
            silent = heartbeats.silent({"supervisor": self._heard_at}, time.monotonic())
            if isinstance(self._answer, SupervisorUp):  # before that its start has limits of its own
                seq += 1
                self._stream.send(Ping(seq=seq))
                if silent:
                    self._fault = f"it did not answer for {SILENCE_LIMIT_S:g} s and was killed"
                    self._process.kill()
                    return

    async def _read(self) -> None:
        try:
            while (message := await self._stream.receive()) is not None:
                self._heard_at = time.monotonic()
                if isinstance(message, CommandDone):
                    answer = self._waiting.get(message.command_id)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                elif isinstance(message, SupervisorUp | StartFailed) and self._answer is None:
                    self._answer = message
                    self._answered.set()
                elif isinstance(message, SupervisorStopped):
                    self.stopped = message
                elif isinstance(message, Detached):
                    self.detached = True
                    self._settled.set()
        except StreamError as error:
            with self._log.open("a", encoding="utf-8") as log:  # where ``death_report`` shows it
                log.write(f"pdconsole: {error}\n")
        finally:
            self._gone.set()
            self._answered.set()
            self._settled.set()
            for command_id, answer in self._waiting.items():
                if not answer.done():
                    answer.set_result(_gone_answer(command_id))


async def stop_supervisor(client: SupervisorClient, signals: Signals, reason: str) -> None:
    """``client.stop`` for an operator at the keys: a signal meanwhile means that it takes too long, and kills."""
    stopping = asyncio.create_task(client.stop(reason))
    while not stopping.done():
        if await signals.race(_finished(stopping)) is Outcome.SIGNAL:
            client.kill()
    stopping.result()


async def _finished(task: asyncio.Task[None]) -> None:
    """Wait for a task that a cancelled wait must not cancel."""
    await asyncio.wait({task})


def supervisor_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "supervisor.log"


def _gone_answer(command_id: int) -> CommandDone:
    return CommandDone(command_id=command_id, ok=False, message="the cluster is gone")


def _nothing() -> None:
    """First stage of ``stop``: the closed link is enough."""
